"""The script for the day a GPU is there, dry: everything but the device."""

import json
import sys
from pathlib import Path

import pytest

from scripts.gpu import run
from tests.memory.kernels import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="a dry run is for machines without a GPU")


def test_every_part_runs_dry_and_has_its_table(tmp_path: Path) -> None:
    for name in run.PARTS:
        run.run_part(name, tmp_path, dry=True)
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in run.PARTS}
    assert found["rows"]["equal_rows"] == found["rows"]["rows"] == run.BLOCK
    assert [row["equal"] for row in found["load"]["table"]] == [1, 1]
    assert found["copy"]["GB_s"] > 0
    assert found["graphs"]["equal_answers"] == 1
    text = run.tables(tmp_path)
    assert "not run\n\n##" not in text.replace("- tail: not run", "")
    assert "| requests | T_plain | T_verify | T_draft | ratio | T_draft_fp8 | ratio_fp8 |\n" in text
    assert all(row["T_draft_fp8"] > 0 for row in found["passes"]["table"])


def test_what_is_there_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in run.PARTS:
        (tmp_path / f"{name}.json").write_text('{"seconds": 1}')
    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path), "--dry-run"])
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: pytest.fail("a part was run again"))
    assert run.main() == 0


def test_a_part_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in run.PARTS.keys() - {"copy"}:
        (tmp_path / f"{name}.json").write_text('{"seconds": 1}')

    def late(*_: object, **__: object) -> None:
        raise run.subprocess.TimeoutExpired("copy", run.SECONDS)

    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path)])
    monkeypatch.setattr(run.subprocess, "run", late)
    assert run.main() == 1
    assert capsys.readouterr().out == "copy: failed with status 124\n"
    assert "## copy\n\nnot run" in (tmp_path / "tables.md").read_text()
