"""A run goes on if its files are named in another way, and not if others are."""

from pathlib import Path

import pytest

from volley.errors import ConfigError
from volley.train.options import TrainConfig
from volley.train.state import check_same_run, describe


def test_files_may_be_named_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("t", "rows.jsonl", "e.jsonl"):
        (tmp_path / name).touch()
    saved = {
        "options": describe(TrainConfig(target="t", data=("rows.jsonl",), out="o", eval_data="e.jsonl")),
        "facts": {},
    }
    same = TrainConfig(target="./t", data=(str(tmp_path / "rows.jsonl"),), out="elsewhere", eval_data="./e.jsonl")
    check_same_run(tmp_path, saved, describe(same), {})
    for changes in (
        {"data": ("other.jsonl",)},
        {"data": ("rows.jsonl", "more.jsonl")},
        {"eval_data": None},
        {"seed": 1},
    ):
        given = TrainConfig(**{"target": "t", "data": ("rows.jsonl",), "out": "o", "eval_data": "e.jsonl", **changes})
        with pytest.raises(ConfigError, match="give the same value to go on"):
            check_same_run(tmp_path, saved, describe(given), {})
