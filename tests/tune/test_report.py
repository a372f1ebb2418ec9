"""The first lines of a tuning's report."""

from pathlib import Path
from typing import Any

import pytest

from volley.files import make_folder
from volley.prompts import read_jsonl
from volley.train.loop import train
from volley.train.options import TrainConfig
from volley.tune.report import is_overfit, notes

from ..conftest import TinyPair
from ..train.runs import make_rows, tiny_run, write_rows

DONE = {"train": {"stopped_early": False}, "measure": {"rows": [{"speedup": 1.4}, {"speedup": 1.1}]}}
LOSSLESS = {"verdict": "lossless", "finding": None}


def log(train: list[float], held_out: list[float]) -> list[dict[str, Any]]:
    """Lines of steps 1, 2, … each; the weighted loss, which hardly moves, says nothing."""
    return [
        {"kind": kind, "step": step, "loss": 1.0, "cross_entropy": value}
        for kind, values in (("train", train), ("eval", held_out))
        for step, value in enumerate(values, 1)
    ]


FITS, OVERFITS = log([3.0, 2.5, 2.0], [2.5, 2.2, 2.21]), log([3.0, 2.0, 1.0], [2.5, 2.2, 2.4])


def test_nothing_is_said_of_a_run_that_went_well() -> None:
    assert notes(DONE, FITS, LOSSLESS) == []


@pytest.mark.parametrize(
    ("done", "lines", "certificate", "said"),
    [
        ({"train": {"stopped_early": True}}, FITS, {}, "Training stopped early, because the real τ"),
        ({}, OVERFITS, {}, "The drafter over-fits: the cross-entropy of held-out responses rose"),
        ({"measure": {"rows": [{"speedup": 1.4}, {"speedup": 0.9}]}}, FITS, {}, "slower than plain decoding"),
        ({}, FITS, {"verdict": "not lossless", "finding": "greedy"}, "The pair is not lossless: greedy."),
    ],
)
def test_each_trouble_is_named(done: dict[str, Any], lines: Any, certificate: dict[str, Any], said: str) -> None:
    (note,) = notes({**DONE, **done}, lines, {**LOSSLESS, **certificate})
    assert said in note


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (OVERFITS, True),
        (FITS, False),  # within what losses differ by
        (log([3.0, 2.5, 2.0], [2.5, 2.2, 2.0]), False),
        (log([3.0, 2.0, 2.6], [2.5, 2.0, 2.1]), False),  # the training went wrong as well
        (log([3.0, 2.0], [2.0]), False),  # one evaluation says nothing
        ([{"kind": "eval", "step": 1, "loss": 2.0}], False),  # of a training before there was cross-entropy
        ([], False),
    ],
)
def test_overfitting_is_cross_entropy_that_rises_where_it_is_held_out_and_falls_where_it_is_learnt(
    lines: Any, expected: bool
) -> None:
    assert is_overfit(lines) == expected


@pytest.mark.slow
def test_a_training_that_learns_few_rows_by_heart_overfits(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """And one that sees them few times does not."""
    for epochs, expected in ((10, False), (160, True)):
        folder = tmp_path / str(epochs)
        make_folder(folder)
        held_out = write_rows(folder / "held-out.jsonl", make_rows(24, seed=1))
        options: dict[str, Any] = {
            "eval_data": str(held_out),
            "loss_decay": "pace",
            "learning_rate": 0.01,
            "init": "random",
        }
        options |= {"epochs": epochs, "max_steps": None, "eval_steps": 40, "log_steps": 4, "tokens_per_batch": 200}
        train(TrainConfig(**tiny_run(tiny_pair.target, folder, **options)))
        lines = [row for _, row in read_jsonl(folder / "run" / "log.jsonl")]
        assert is_overfit(lines) == expected
