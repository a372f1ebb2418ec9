"""Replayed acceptance is that of decoding."""

import pytest
import torch

from tests.conftest import TinyPair
from tests.tiny import random_prompts
from volley import Engine, SamplingParams
from volley.files import REFERENCE
from volley.models.drafters.drafter import Drafter
from volley.recalibrate.replay import replay
from volley.recalibrate.reservoir import Entry, ServedRow
from volley.train.features import FrozenTarget


def row(prompt: list[int], response: list[int], temperature: float) -> ServedRow:
    return ServedRow(Entry(0, 0, "a", 1, True), prompt, response, temperature)


@pytest.mark.slow
def test_replayed_cycles_are_those_of_sampled_decoding(tiny_pair: TinyPair, frozen: FrozenTarget) -> None:
    """A hot target of 260 tokens is nearly uniform: drafts are often kept, whatever the drafter knows."""
    engine = Engine.from_pretrained(tiny_pair.target, tiny_pair.drafter, dtype=torch.float32, policy="fixed")
    params = SamplingParams(max_tokens=41, temperature=3.0, ignore_eos=True)
    prompts = random_prompts(30, seed=3, vocab=250)
    results = list(engine.generate(prompts, params))
    rows = [row(prompt, result.token_ids, 3.0) for prompt, result in zip(prompts, results, strict=True)]
    found = replay([Drafter.from_pretrained(tiny_pair.drafter, torch.float32)], frozen, rows)
    cycles = [len(result.stats.accepted_lengths) for result in results]
    assert sum(one.tokens for one in found) == sum(sum(result.stats.accepted_lengths) for result in results)
    assert sum(cycles) < 0.9 * 30 * 40, "drafts are kept"
    replayed = sum(one.cycles[0] for one in found)
    assert 0.8 < sum(cycles) / replayed < 1.03, "block verification keeps more than token by token, never less"


@pytest.mark.slow
def test_replayed_cycles_are_those_of_greedy_decoding() -> None:
    """The bundled pair's drafts are often kept."""
    engine = Engine.from_pretrained(dtype=torch.float32, policy="fixed")
    prompts = [engine.encode([{"role": "user", "content": text}]) for text in ("How do I use `tar`?", "What is 3 + 4?")]
    results = list(engine.generate(prompts, SamplingParams(max_tokens=40)))
    rows = [row(prompt, result.token_ids, 0.0) for prompt, result in zip(prompts, results, strict=True)]
    target = FrozenTarget(str(REFERENCE / "target"), torch.float32, torch.device("cpu"))
    found = replay([Drafter.from_pretrained(REFERENCE / "drafter", torch.float32)], target, rows)
    cycles = [len(result.stats.accepted_lengths) for result in results]
    assert sum(cycles) < 50, "drafts are kept"
    assert [one.cycles[0] for one in found] == cycles


def test_rows_too_short_to_draft_in_are_left_out(tiny_pair: TinyPair, frozen: FrozenTarget) -> None:
    assert replay([Drafter.from_pretrained(tiny_pair.drafter, torch.float32)], frozen, [row([5, 6], [7], 0.0)]) == []
