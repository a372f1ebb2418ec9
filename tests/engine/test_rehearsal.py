"""Passes on made-up text. The clock is read, but a test asks only that it moved."""

import pytest

from tests.tiny import Pair, greedy, random_prompts
from volley import Engine, SamplingParams
from volley.engine.rehearsal import Rehearsal
from volley.memory.batch import RaggedBatch
from volley.models.target import Target

TIMED = Rehearsal.target


@pytest.mark.parametrize(("tokens", "requests"), [(1, 1), (12, 3), (600, 1)])
def test_a_pass_has_as_many_tokens_as_it_says(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tokens: int, requests: int
) -> None:
    """One of 600 tokens is longer than the context of 512: it is timed without any text before it."""
    seen: list[RaggedBatch] = []
    forward = Target.forward

    def spied(self: Target, batch: RaggedBatch, *others: object) -> object:
        seen.append(batch)
        return forward(self, batch, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Target, "forward", spied)
    assert TIMED(Rehearsal(pair.target, None), tokens, requests) > 0
    assert {(len(batch), len(batch.segments)) for batch in seen} == {(tokens, requests)}


def test_texts_that_run_do_not_notice(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, policy="fixed", num_pages=20)
    prompt = random_prompts(1, seed=3)[0]
    request = engine.add_request(prompt, SamplingParams(max_tokens=12))
    rehearsal = Rehearsal(pair.target, engine.draft_model)
    while request.finish_reason is None:
        engine.step()
        assert TIMED(rehearsal, 4, 2) > 0
    assert request.result().token_ids == greedy(pair.hf, prompt, 12)
