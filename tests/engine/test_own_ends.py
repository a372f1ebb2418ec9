"""Drafters that bring an embedding and a head of their own, of a reduced vocabulary too, change no token and no law."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.chi_square import chi_square_p, joint_counts
from tests.engine import test_sampled
from tests.engine.test_greedy import check_drafter
from tests.tiny import VOCAB, Pair, make_pair, random_drafter
from volley import Engine, SamplingParams
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.drafters.drafter import Drafter
from volley.proposers import choose

HEAD = HeadConfig(type="residual", rank=4, candidates=8)


def own_ends(token_ids: list[int], **changes: Any) -> Drafter:
    """A drafter that knows only ``token_ids``."""
    drafter = random_drafter(own_embedding=True, draft_vocab_size=len(token_ids), **changes)
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.tensor(token_ids) - torch.arange(len(token_ids)))
    return drafter


def test_logits_stand_at_their_tokens_and_nowhere_else() -> None:
    token_ids = [1, 4, 5, 30, 49]
    drafter = own_ends(token_ids)
    hidden = torch.randn(3, 32)
    logits = drafter.logits(hidden, lambda _: pytest.fail("the target's head was asked"))
    assert drafter.lm_head is not None
    assert torch.equal(logits[:, token_ids], drafter.lm_head(hidden))
    others = sorted(set(range(VOCAB)) - set(token_ids))
    assert (logits[:, others] == -torch.inf).all()
    whole = own_ends(list(range(VOCAB)))
    assert whole.d2t is None
    assert whole.lm_head is not None
    assert torch.equal(whole.logits(hidden, torch.zeros_like), whole.lm_head(hidden))


def test_without_them_the_targets_are_used() -> None:
    drafter = random_drafter()
    ids = torch.arange(3)
    assert drafter.logits(ids.float(), torch.neg).tolist() == [0, -1, -2]
    assert drafter.embed(ids, torch.neg).tolist() == [0, -1, -2]
    assert own_ends([1, 2]).embed(ids, torch.neg).shape == (3, 32)


OPTIONS: list[dict[str, Any]] = [{}, {"tree_nodes": 9}, {"denoising_steps": 2}, {"policy": "goodput"}]


@pytest.mark.parametrize(
    ("size", "head", "options"),
    [
        *((size, None, options) for size in (3, 20, VOCAB) for options in OPTIONS),
        *((5, HEAD, options) for options in OPTIONS[:2]),  # fewer than the head has candidates
    ],
)
def test_greedy_answers_are_the_targets(
    pair: Pair, size: int, head: HeadConfig | None, options: dict[str, Any]
) -> None:
    drafter = own_ends(list(range(0, size * (VOCAB // size), VOCAB // size)), head=head)
    check_drafter(pair, drafter, **options)


@pytest.mark.parametrize("options", [{}, {"denoising_steps": 2}, {"tree_nodes": 9}])
@pytest.mark.parametrize("head", [None, HEAD])
def test_matching_gives_the_tokens_of_plain_decoding(
    pair: Pair, options: dict[str, Any], head: HeadConfig | None
) -> None:
    if head is not None and "denoising_steps" in options:
        options = {}
    engine = Engine(
        pair.target, own_ends([*range(0, VOCAB, 5)], head=head), page_size=4, verification="coupled", **options
    )
    assert test_sampled.answers(engine) == test_sampled.plain()


@functools.cache
def tiny(head: HeadConfig | None = None) -> Pair:
    pair = make_pair(2, {"vocab_size": 6, "block_size": 4, "mask_token_id": 5}, vocab_size=6, initializer_range=0.2)
    drafter = own_ends([0, 2, 3, 5], vocab_size=6, block_size=4, mask_token_id=5, head=head)
    assert drafter.embed_tokens is not None
    assert drafter.lm_head is not None
    drafter.embed_tokens.weight.copy_(pair.hf.get_input_embeddings().weight)
    drafter.lm_head.weight.copy_(pair.hf.get_output_embeddings().weight[[0, 2, 3, 5]])
    return Pair(pair.target, drafter, pair.hf)


def law(params: SamplingParams, pair: Pair, **options: Any) -> tuple[float, float]:
    sequences, accepted = test_sampled.sampled(params, pair, seeds=2000, **options)
    return chi_square_p(joint_counts(sequences, 6), test_sampled.exact_law(params, pair)), accepted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "options"),
    [
        (None, {"verification": "rejection"}),
        (HEAD, {"verification": "rejection"}),
        (None, {"tree_nodes": 7}),
    ],
)
def test_the_law_of_answers_is_the_targets(head: HeadConfig | None, options: dict[str, Any]) -> None:
    probability, accepted = law(SamplingParams(temperature=1.1, max_tokens=3), tiny(head), **options)
    assert probability > 1e-3
    assert accepted > 0.2


def scored_over_the_whole_vocabulary(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Drawn from the reduced vocabulary, scored as if the others could have been drawn as well."""
    tokens, probs = propose_sampled(logits, *rest)
    return tokens, 0.5 * probs + 0.5 / logits.shape[-1]


propose_sampled = choose.propose_sampled


@pytest.mark.slow
def test_a_wrong_draft_law_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "propose_sampled", scored_over_the_whole_vocabulary)
    probability, _ = law(SamplingParams(temperature=1.1, max_tokens=3), tiny(), verification="rejection")
    assert probability < 1e-6
