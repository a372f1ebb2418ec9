"""The search of tune: scripted trials show what it keeps, real ones that each of its questions can be trained."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TinyPair
from tests.train.runs import tiny_run
from volley import native
from volley.models.targets.target import Target
from volley.train.features import FrozenTarget
from volley.train.options import TrainConfig
from volley.train.parallel import Ranks
from volley.train.presets import muon_factor
from volley.tune import trials
from volley.tune.run import trial_minutes
from volley.tune.trials import (
    BETTER,
    BLOCK_SIZES,
    RULES,
    SEES,
    TRIAL_BLOCK,
    Search,
    Trainings,
    Trial,
    choose_block_size,
    from_json,
    more_taps,
    pass_seconds,
    rules,
    to_json,
    training_dtype,
)

BASE = TrainConfig(
    target="t",
    data=("d",),
    out="o",
    num_layers=1,
    learning_rate=0.01,
    optimizer="muon",
    max_minutes=1.0,
    tokens_per_batch=8192,
)
WIDTH = 32
QUESTIONS: dict[str, list[dict[str, Any]]] = {
    "residual head": [{"head": "residual", "head_rank": 16}],
    "markov head": [{"head": "markov", "head_rank": 16}],
    "rate up": [{"learning_rate": 0.025}, {"learning_rate": 0.0625}],
    "rate down": [{"learning_rate": 0.004}, {"learning_rate": 0.0016}],
    "layers": [{"num_layers": 2}, {"num_layers": 3}],
    "taps": [{"taps": "0,1,2"}],
    "batches": [{"tokens_per_batch": 2048}, {"tokens_per_batch": 512}],
    "soft targets": [{"soft_targets": 0.5}],
    "total variation": [{"soft_targets": 0.3, "total_variation": 0.5}],
    "optimizer": [{"optimizer": "adamw", "learning_rate": 0.01 / muon_factor(WIDTH)}],
}
"""The changes that each question tries, one after the other while they are better."""
ALONE = [{}, *(changes[0] for changes in QUESTIONS.values())]
"""All trials of a search in which nothing is better than the preset."""


class Script:
    """Trials by their options: ``tau(options)`` decides, and what was asked is kept."""

    def __init__(self, tau: Callable[[dict[str, Any]], float]) -> None:
        self.tau, self.asked = tau, list[dict[str, Any]]()

    def __call__(self, name: str, options: dict[str, Any], before: Sequence[Trial]) -> Trial:
        assert len(before) >= len(self.asked)
        self.asked.append(options)
        return Trial(name, options, self.tau(options), [0.5], 0.01, 10, 1.0)


def search(script: Script, **more: Any) -> Search:
    return Search(BASE, script, (0, 1, 2), WIDTH, more.pop("say", lambda _: None), **more)


def preferring(*wanted: dict[str, Any], gain: float = 1.1) -> Script:
    """The preset has τ 2; each of the ``wanted`` changes that options contain multiplies it, any other costs a tenth."""

    def tau(options: dict[str, Any]) -> float:
        held = [change for change in wanted if change.items() <= options.items()]
        known = {name for change in wanted for name in change}
        return 2.0 * gain ** len(held) * 0.9 ** len(options.keys() - known)

    return Script(tau)


def test_what_is_no_better_than_the_preset_is_dropped() -> None:
    script = preferring()
    assert search(script).run().options == {}
    assert script.asked == ALONE


@pytest.mark.parametrize("changes", QUESTIONS.values(), ids=QUESTIONS)
def test_each_question_keeps_what_is_better(changes: list[dict[str, Any]]) -> None:
    assert search(preferring(changes[0])).run().options == changes[0]
    assert search(preferring(changes[0], gain=BETTER - 0.01)).run().options == {}, "by less than trials differ"


@pytest.mark.parametrize("changes", [each for each in QUESTIONS.values() if len(each) > 1])
def test_a_question_goes_on_while_it_gets_better(changes: list[dict[str, Any]]) -> None:
    order = {tuple(change.items()): place for place, change in enumerate(changes, 1)}
    (name,) = changes[0]

    def tau(options: dict[str, Any]) -> float:
        return 2.0 + order.get(((name, options.get(name)),), -1 if options else 0) - 0.5 * (len(options) > 1)

    script = Script(tau)
    assert search(script).run().options == changes[-1]
    assert all(change in script.asked for change in changes)


def test_better_answers_add_up() -> None:
    wanted = (QUESTIONS["layers"][0], QUESTIONS["residual head"][0], QUESTIONS["total variation"][0])
    script = preferring(*wanted)
    assert search(script).run().options == {key: value for change in wanted for key, value in change.items()}
    assert not any(options.get("head") == "markov" for options in script.asked), "the residual head was better"


def test_a_slower_cycle_counts_against_tau() -> None:
    def make(name: str, options: dict[str, Any], before: Sequence[Trial]) -> Trial:
        return Trial(name, options, 2.2 if options else 2.0, [0.5], 0.012 if options else 0.01, 10, 1.0)

    assert Search(BASE, make, (0, 1, 2), WIDTH, lambda _: None).run().options == {}


@pytest.mark.parametrize("trials", [1, 2, 4, 7])
def test_the_minutes_are_kept(trials: int) -> None:
    script, said = preferring(), list[str]()
    search(script, minutes=float(trials), say=said.append).run()
    assert script.asked == ALONE[:trials]
    assert said[-1].endswith("no time is left to try")


def test_trials_that_see_nothing_are_not_made() -> None:
    script, said = Script(lambda options: SEES - 0.01), list[str]()
    found = search(script, say=said.append).run()
    assert script.asked == [{}]
    assert (found.name, found.options) == (RULES, rules(WIDTH))
    assert said[-1].endswith("cannot judge options: rules choose")


def test_the_clock_ends_the_trials() -> None:
    """Evaluations and timings count as well."""
    script, minutes = preferring(), chain([1.0, 3.0], repeat(5.0))
    search(script, minutes=4.0, spent=lambda: next(minutes)).run()
    assert script.asked == ALONE[:3]


def test_a_search_goes_on_after_the_last_whole_trial() -> None:
    whole, kept = preferring(*QUESTIONS["layers"][:1]), list[Trial]()
    expected = search(whole, trials=kept).run()
    for done in range(len(kept)):
        script, noted = preferring(*QUESTIONS["layers"][:1]), list[Trial]()
        before = [from_json(to_json(trial)) for trial in kept[:done]]
        found = search(script, trials=before, note=noted.append, minutes=float(len(kept))).run()
        assert found == expected
        assert script.asked == whole.asked[done:]
        assert noted == kept[done:]


def test_trials_take_less_of_many_minutes() -> None:
    assert [trial_minutes(minutes) for minutes in (4, 20, 60)] == pytest.approx([1.2, 6.0, 8.0])


@pytest.fixture(scope="module")
def trainings(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    options = tiny_run(tiny_pair.target, tmp_path_factory.mktemp("trials"), max_steps=2, eval_share=0.2)
    target = FrozenTarget(str(tiny_pair.target), torch.float32, torch.device("cpu"))
    serving = Target.from_pretrained(tiny_pair.target, dtype=torch.float32)
    return Trainings(TrainConfig(**options), target, serving, Ranks("cpu"))


@pytest.mark.slow
def test_each_question_can_be_trained(trainings: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "SEES", 0.0)
    made = list[Trial]()
    taps, width = more_taps(trainings.target), trainings.target.text_config.hidden_size
    assert list(taps) == [0, 1, 2]
    found = Search(replace(trainings.base, max_minutes=None), trainings, taps, width, lambda _: None, made, minutes=1e9)
    found.run()
    kinds = {name for trial in made for name in trial.options}
    assert kinds == {name for changes in QUESTIONS.values() for change in changes for name in change}
    for trial in made:
        assert trial.steps == 2
        assert trial.tau >= 1
        assert trial.cycle_seconds > 0
        assert len(trial.accuracy) == trainings.base.block_size - 1
    assert not list(Path(trainings.base.out).glob("trial-*")), "a trial leaves nothing behind"


def test_a_shape_is_timed_once(trainings: Trainings) -> None:
    first = trainings("preset", {}, [])
    kept = [replace(first, cycle_seconds=0.25)]
    later = Trainings(
        trainings.base, trainings.target, trainings.serving, trainings.ranks
    )  # a run that goes on has timed nothing yet
    again = later("soft targets", {"soft_targets": 0.5}, kept)
    assert again.cycle_seconds == 0.25, "an earlier run's seconds of the shape hold"


FREE, DEAR = dict.fromkeys(BLOCK_SIZES, 0.01), {size: 0.001 * size for size in BLOCK_SIZES}


@pytest.mark.parametrize(
    ("accuracy", "seconds", "chosen"),
    [
        (0.98, FREE, 16),
        (0.05, FREE, TRIAL_BLOCK),  # the same speed: nothing speaks for a shorter one
        (0.7, FREE, 12),
        (0.05, DEAR, 4),
        (0.6, DEAR, 4),
        (
            0.7,
            DEAR,
            TRIAL_BLOCK,
        ),  # 4 promise 1.04 times as much: a policy may cut, and trainings accept more than trials
        (0.9, DEAR, 12),
        (0.97, DEAR, 16),
    ],
)
def test_the_block_size_follows_acceptance_and_what_rows_cost(
    accuracy: float, seconds: dict[int, float], chosen: int
) -> None:
    tau = sum(accuracy**k for k in range(TRIAL_BLOCK))
    trial = Trial("preset", {}, tau, [accuracy] * (TRIAL_BLOCK - 1), 0.01 + seconds[TRIAL_BLOCK], 10, 1.0)
    assert choose_block_size(trial, seconds)[0] == chosen


def test_passes_of_each_size_are_timed(trainings: Trainings) -> None:
    seconds = pass_seconds(trainings.serving, BLOCK_SIZES)
    assert list(seconds) == list(BLOCK_SIZES)
    assert min(seconds.values()) > 0
    assert sorted(seconds.values()) == list(seconds.values()), "the machine's other work makes no longer pass cheaper"


@pytest.mark.parametrize(("preset", "best"), [(1, 1), (1, 2), (5, 2), (5, 1), (5, 6), (8, 4), (8, 2)])
def test_more_layers_are_tried_and_then_fewer(preset: int, best: int) -> None:
    def tau(options: dict[str, Any]) -> float:
        return 3.0 - 0.2 * abs(options.get("num_layers", preset) - best) - len(options.keys() - {"num_layers"})

    script = Script(tau)
    found = Search(replace(BASE, num_layers=preset), script, (0, 1, 2), WIDTH, lambda _: None).run()
    assert found.options.get("num_layers", preset) == best


def test_what_only_learns_fast_is_not_asked_about_where_the_training_is_long() -> None:
    def tau(options: dict[str, Any]) -> float:
        faster = options.get("learning_rate", BASE.learning_rate) > BASE.learning_rate
        return 2.0 + ("tokens_per_batch" in options) + (options.get("num_layers", 4) < 4) + faster

    long, short = Script(tau), Script(tau)
    assert (
        Search(replace(BASE, num_layers=4), long, (0, 1, 2), WIDTH, lambda _: None, few_steps=False).run().options == {}
    )
    found = Search(replace(BASE, num_layers=4), short, (0, 1, 2), WIDTH, lambda _: None, few_steps=True).run().options
    assert found == {"learning_rate": 0.025, "num_layers": 2, "tokens_per_batch": BASE.tokens_per_batch // 4}


@pytest.mark.parametrize(("width", "on_a_fast_cpu"), [(64, "float32"), (256, "bfloat16"), (1024, "bfloat16")])
def test_products_are_in_the_faster_type(width: int, on_a_fast_cpu: str) -> None:
    cpu = torch.device("cpu")
    slow = "float32" if width <= 512 else "bfloat16"
    assert training_dtype("auto", width, cpu) == getattr(torch, on_a_fast_cpu if native.has_dot_products else slow)
    assert training_dtype("auto", width, torch.device("cuda")) == torch.bfloat16
    assert training_dtype("float32", width, cpu) == torch.float32
