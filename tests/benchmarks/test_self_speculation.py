"""The table of ways to decode a model of both kinds, on tiny models."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.self_speculation import main
from tests.conftest import TinyPair
from tests.quantised import edit_config


def test_every_way_has_a_row_and_drafts_change_no_token(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both, prompts = tmp_path / "both", tmp_path / "prompts.jsonl"
    shutil.copytree(tiny_pair.target, both)
    edit_config(both, block_diffusion={"mask_token_id": 3, "canvas_length": 4})
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hello", "What is it?")))
    words = [
        "table",
        "--diffusion",
        both,
        "--target",
        tiny_pair.target,
        "--drafter",
        tiny_pair.drafter,
        "--prompts",
        prompts,
    ]
    words += ["--max-tokens", 9, "--steps", 2, "--thresholds", 0, 1]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    main()
    rows = [[column.strip() for column in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1] for row in rows] == [
        "one token at a time",
        "self",
        "self, 2 passes a draft",
        "threshold 0",
        "threshold 1",
        "one token at a time",
        "DFlash drafter",
    ]
    lossless = [row for row in rows if not row[1].startswith("threshold")]
    assert {row[5] for row in lossless} == {"2 of 2"}
    assert [row[2] for row in rows if row[1] == "one token at a time"] == ["1.00", "1.00"]
    assert float(rows[3][2]) > 2 * float(rows[4][2]), "a pass reveals a whole canvas, or a token"
