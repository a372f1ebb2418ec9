"""Position of a run: batches in order, fractions by the nearest bound, and what is due when."""

import pytest

from volley.train.documents import plan_epoch
from volley.train.options import TrainConfig
from volley.train.parallel import Ranks
from volley.train.schedule import Interval, Schedule, learning_rate_scale
from volley.train.state import Position

LENGTHS = [5 + 7 * index % 40 for index in range(60)]


def make_schedule(**options: object) -> Schedule:
    config = TrainConfig(
        target="t", data=("d",), out="o", tokens_per_batch=200, **{"epochs": 2, "max_steps": None, **options}
    )  # type: ignore[arg-type]
    return Schedule(config, LENGTHS, Ranks("cpu"))


def test_every_epoch_has_its_own_batches_and_a_run_that_goes_on_has_the_same() -> None:
    schedule = make_schedule(seed=3)
    epochs = [plan_epoch(LENGTHS, 200, 3, epoch) for epoch in range(2)]
    for number, batch in enumerate([*epochs[0], *epochs[1]]):
        assert schedule.batch == batch
        again = make_schedule(seed=3)
        again.go_on(Position(**vars(schedule.position)))
        assert (again.batch, again.progress()) == (batch, schedule.progress())
        assert schedule.position.step == number
        schedule.advance()
    assert schedule.progress() == 1


def test_the_nearest_bound_says_how_far_a_run_has_come() -> None:
    schedule = make_schedule(max_steps=10, max_minutes=2.0)
    schedule.go_on(Position(step=3, seconds=24.0))
    assert schedule.progress() == pytest.approx(0.3)
    schedule.position.seconds = 60.0
    assert schedule.progress() == pytest.approx(0.5)
    schedule.position.epoch = 1
    schedule.position.step = 99
    assert schedule.progress() == 1


def test_what_is_due_after_steps_and_after_minutes() -> None:
    ranks = Ranks("cpu")
    assert [step for step in range(1, 10) if Interval(3, None, ranks).due(step)] == [3, 6, 9]
    assert not Interval(None, None, ranks).due(4)
    clock = Interval(None, 1.0, ranks)
    assert not clock.due(1)
    clock.last -= 61
    assert clock.due(1)
    clock.restart()
    assert not clock.due(1)


def test_learning_rate_rises_then_falls_to_zero() -> None:
    scales = [learning_rate_scale(step / 100, 0.04) for step in range(101)]
    assert scales.index(max(scales)) == 4
    assert max(scales) == 1.0
    assert scales[0] > 0
    assert scales[-1] == pytest.approx(0)
    assert learning_rate_scale(0.0, 0.0) == 1.0
