"""What the report of a tuning says before anything else."""

from typing import Any

import pytest

from volley.tune.report import is_overfit, notes

DONE = {"train": {"stopped_early": False}, "measure": {"rows": [{"speedup": 1.4}, {"speedup": 1.1}]}}
LOSSLESS = {"verdict": "lossless", "finding": None}


def log(train: list[float], held_out: list[float]) -> list[dict[str, Any]]:
    return [{"kind": "train", "loss": loss} for loss in train] + [{"kind": "eval", "loss": loss} for loss in held_out]


FITS, OVERFITS = log([3.0, 2.0], [2.5, 2.2, 2.21]), log([3.0, 1.0], [2.5, 2.2, 2.4])


def test_nothing_is_said_of_a_run_that_went_well() -> None:
    assert notes(DONE, FITS, LOSSLESS) == []


@pytest.mark.parametrize(
    ("done", "lines", "certificate", "said"),
    [
        ({"train": {"stopped_early": True}}, FITS, {}, "Training stopped early, because the real τ"),
        ({}, OVERFITS, {}, "The drafter over-fits: its held-out loss rose while the training loss fell."),
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
        (log([3.0, 2.0], [2.5, 2.2, 2.0]), False),
        (log([3.0, 2.6], [2.0, 2.1]), False),  # the training loss is above: it has not fallen
        (log([1.0], [2.0]), False),  # one evaluation says nothing
        ([], False),
    ],
)
def test_overfitting_is_a_held_out_loss_that_rises_above_a_training_loss_that_fell(lines: Any, expected: bool) -> None:
    assert is_overfit(lines) == expected
