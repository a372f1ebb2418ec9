"""The script for the day a GPU is there, dry: everything but the device."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.gpu import parts, run
from tests.memory.kernels import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="a dry run is for machines without a GPU")
ROOT = Path(__file__).resolve().parents[2]


def script(out: Path) -> subprocess.CompletedProcess[str]:
    """``scripts/gpu/run OUT --dry-run``, as on the day."""
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "scripts/gpu/run"), str(out), "--dry-run"]
    return subprocess.run(command, env=env, cwd=out, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Run all parts in this process and return the status: none imports everything anew."""

    def here(command: list[str], **_: object) -> Any:
        with monkeypatch.context() as part:
            part.setattr(sys, "argv", command[1:])
            return SimpleNamespace(returncode=run.main())

    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path), "--dry-run"])
    monkeypatch.setattr(run.subprocess, "run", here)
    return run.main


@pytest.mark.slow
def test_every_part_runs_dry_and_has_its_table(
    tmp_path: Path, dry_run: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run() == 0
    said = capsys.readouterr().out
    assert all(f"{name}: done" in said for name in run.PARTS)
    assert "passes: " in said.replace("passes: done", ""), "the verdict"
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in run.PARTS}
    assert found["rows"]["equal_rows"] == found["rows"]["equal_rows_filled_up"] == parts.BLOCK
    assert [row["equal"] for row in found["load"]["table"]] == [1, 1]
    assert [row["fixed:16"] > 0 for row in found["load_large"]["table"]] == [True, True]
    assert found["copy"]["GB_s"] > 0
    assert found["graphs"]["equal_answers"] == 1
    assert found["ahead"]["passed"]
    assert all(row["step behind"] > 0 and row["step ahead"] > 0 for row in found["ahead"]["table"])
    assert {(row["kind"], row["requests"]) for row in found["engine"]["table"]} >= {("goodput", 2), ("greedy trees", 1)}
    assert all(row["equal"] == 1 for row in found["engine"]["table"])
    assert [row["most_waits"] for row in found["waits"]["table"]] == [0] * 6
    assert all(row["step"] > 0 and row["busy"] > 0 for row in found["profile"]["table"])
    assert {row["tokens"] for row in found["kinds"]["table"]} == {"equal"}
    text = (tmp_path / "tables.md").read_text()
    assert "not run\n\n##" not in text.replace("- tail: not run", "")
    assert "| requests | T_plain | T_verify | T_draft | ratio |\n" in text
    assert all(row["T_draft"] > 0 for row in found["passes"]["table"])


def done_but(tmp_path: Path, *others: str) -> None:
    """All parts are done, except for some."""
    for name in run.PARTS.keys() - set(others):
        (tmp_path / f"{name}.json").write_text('{"seconds": 1, "passed": true}')


@pytest.mark.slow
def test_what_did_not_pass_is_run_again_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the script itself, in processes of its own."""
    done_but(tmp_path)
    (tmp_path / "copy.json").write_text('{"passed": false}')
    done = script(tmp_path)
    assert (done.returncode, done.stdout) == (0, "copy: done\n"), done.stderr
    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path), "--dry-run"])
    assert run.main() == 0
    assert capsys.readouterr().out == "", "nothing is left to do"


def test_a_part_that_does_not_pass_is_named_and_its_figures_are_kept(
    tmp_path: Path,
    dry_run: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done_but(tmp_path, "kernels")
    for _ in range(2):
        monkeypatch.setitem(run.PARTS, "kernels", lambda _: {"passed": False, "table": "they differ"})
        assert dry_run() == 1
        assert capsys.readouterr().out == "kernels: did not pass\n"
        assert "they differ" in (tmp_path / "tables.md").read_text()
    monkeypatch.setitem(run.PARTS, "kernels", lambda _: {"passed": True, "table": "alike"})
    assert dry_run() == 0
    assert capsys.readouterr().out == "kernels: done\n"


def test_a_part_that_takes_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done_but(tmp_path, "copy")

    def late(*_: object, **__: object) -> None:
        raise run.subprocess.TimeoutExpired("copy", run.SECONDS)

    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path)])
    monkeypatch.setattr(run.subprocess, "run", late)
    assert run.main() == 1
    assert capsys.readouterr().out == "copy: stopped after 540 s\n"
    assert "## copy\n\nnot run" in (tmp_path / "tables.md").read_text()


@pytest.mark.slow
def test_what_a_slow_command_said_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "COMMAND_SECONDS", 5)
    passed, said = parts.run_command("-c", "import time; print('so far'); time.sleep(60)")
    assert not passed
    assert said == "so far\n\nstopped after 5 s"
    monkeypatch.setattr(parts, "COMMAND_SECONDS", 60)
    assert parts.run_command("-c", "raise SystemExit(2)") == (False, "")
    assert parts.COMMAND_SECONDS < parts.SECONDS


@pytest.mark.parametrize(("missing", "named"), [("pytest", "pytest missing"), ("hypothesis", "hypothesis missing")])
def test_what_the_tests_need_is_named(missing: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda name: None if name == missing else name)
    found = parts.tests(SimpleNamespace(dry=False))  # type: ignore[arg-type]
    assert not found["passed"]
    assert named in found["tail"]


def test_every_wait_is_listed_and_no_other_warning() -> None:
    modes: list[bool] = []

    def step() -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    assert parts.waits_of(modes.append, step) == {"elsewhere": 2}
    assert modes == [True, False]


@pytest.mark.parametrize(("plain", "verdict"), [(86.0, "reached: 86 %"), (84.0, "MISSED: 84 %")])
def test_plain_decoding_is_judged_by_the_copy(plain: float, verdict: str) -> None:
    assert parts.compared(plain, 100.0)["verdict"].startswith(verdict.replace(" %", "%"))
