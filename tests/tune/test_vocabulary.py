"""A smaller draft vocabulary is taken where it is faster here and held-out responses lose little by it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TinyPair
from volley.models.drafters.drafter import Drafter
from volley.models.targets.loading import load_config
from volley.models.targets.target import Target
from volley.train.features import FrozenTarget
from volley.train.options import TrainConfig
from volley.train.presets import with_preset
from volley.tune import vocabulary
from volley.tune.trials import Trial
from volley.tune.vocabulary import choose_vocabulary, sizes_for

SIZES = (10, 40)


@pytest.fixture(scope="module")
def models(tiny_pair: TinyPair) -> tuple[FrozenTarget, Target]:
    frozen = FrozenTarget(str(tiny_pair.target), torch.float32, torch.device("cpu"))
    return frozen, Target.from_pretrained(tiny_pair.target, dtype=torch.float32)


def config(folder: Path, target: str, learnt: range, held: range) -> TrainConfig:
    """Responses that are learnt from and held out are of the tokens of these ranges, evenly."""
    for name, tokens in (("train", learnt), ("held", held)):
        rows = [{"prompt_token_ids": [9], "response_token_ids": list(tokens)} for _ in range(4)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {"block_size": 4, "num_layers": 1, "draft_vocab_size": 0, "eval_prompts": 0}
    data = (str(folder / "train"),)
    chosen = TrainConfig(target=target, data=data, eval_data=str(folder / "held"), out=str(folder), **given)
    return with_preset(chosen, load_config(target), torch.device("cpu"))


@pytest.mark.parametrize(
    ("held", "saved", "want"),
    [
        (range(20, 30), 0.2, 10),  # ten tokens are all that comes
        (range(20, 30), 0.001, 0),  # a smaller head saves nothing
        (range(20, 60), 0.2, 40),  # ten would miss most of what comes
        (range(100, 200), 0.2, 0),  # held-out responses are of other tokens
    ],
)
def test_what_is_drafted_pays(
    models: tuple[FrozenTarget, Target],
    tiny_pair: TinyPair,
    tmp_path: Path,
    held: range,
    saved: float,
    want: int,
) -> None:
    def timed(_: Target, drafters: Sequence[Drafter]) -> list[float]:
        rows = [drafter.config.draft_vocab_size or drafter.config.vocab_size for drafter in drafters]
        assert rows == [260, *SIZES]
        return [1 - saved * (1 - row / 260) for row in rows]

    learnt = held if held.start == 20 else range(20, 60)
    trial = Trial("", {}, 2.5, [0.8, 0.7, 0.6], 0.01, 9, 1.0)
    size, why = choose_vocabulary(trial, config(tmp_path, str(tiny_pair.target), learnt, held), *models, SIZES, timed)
    assert size == want
    assert why.startswith("the most frequent tokens are drafted" if want else "all tokens are drafted")


def test_a_cycle_that_was_interrupted_once_does_not_decide(
    models: tuple[FrozenTarget, Target], tiny_pair: TinyPair, tmp_path: Path
) -> None:
    rounds = iter(([1.4, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]))
    trial = Trial("", {}, 2.5, [0.8, 0.7, 0.6], 0.01, 9, 1.0)
    given = config(tmp_path, str(tiny_pair.target), range(20, 30), range(20, 30))
    assert choose_vocabulary(trial, given, *models, SIZES, lambda *_: next(rounds))[0] == 0


def test_a_short_trial_does_not_hide_what_missing_tokens_cost(
    models: tuple[FrozenTarget, Target], tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """One token of twenty is not drafted, for a tenth of the time. That pays as long as drafts are hopeless."""
    trial = Trial("", {}, 1.05, [0.05, 0.0, 0.0], 0.01, 9, 1.0)
    given = config(tmp_path, str(tiny_pair.target), range(20, 59), range(20, 60))
    given = replace(given, block_size=8)
    assert choose_vocabulary(trial, given, *models, (38,), lambda *_: [1.0, 0.9])[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "LEARNT", 0.0)
        assert choose_vocabulary(trial, given, *models, (38,), lambda *_: [1.0, 0.9])[0] == 38


def test_small_vocabularies_are_drafted_whole() -> None:
    assert sizes_for(1000) == []
    assert sizes_for(8192) == [1024, 2048, 4096]
    assert sizes_for(151_936) == [9496, 18_992, 37_984, 75_968]


@pytest.mark.slow
def test_drafters_are_timed_here(models: tuple[FrozenTarget, Target], tiny_pair: TinyPair, tmp_path: Path) -> None:
    trial = Trial("", {}, 2.5, [0.8, 0.7, 0.6], 0.01, 9, 1.0)
    size, why = choose_vocabulary(trial, config(tmp_path, str(tiny_pair.target), range(50), range(50)), *models, SIZES)
    assert size in (0, *SIZES)
    assert "of 260 promise" in why
