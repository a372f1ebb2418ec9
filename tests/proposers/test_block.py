"""The block drafter's proposals: of a batch as of each alone, each from the distribution it says."""

import functools
from collections.abc import Iterator

import pytest
import torch

from tests.made_up import lattice_of
from tests.tiny import VOCAB, Pair, block_proposer, make_pair, random_prompts
from volley import Engine, SamplingParams
from volley.config import DecodingConfig
from volley.decode.sampling import Purpose, draw, race, token_probs
from volley.decode.tree import coupled_logits, expand
from volley.decode.work import DraftSpec, Rule, Shape, Work
from volley.memory.batch import Segment
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.procedures.request import Request
from volley.proposers.block import BlockProposer

PROMPTS = random_prompts(4, longest=20, seed=3)
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.0, draft_temperature=0.6, seed=2),
    SamplingParams(temperature=1.0, top_k=9, seed=3),
]
ASKS = [
    DraftSpec(Shape.CHAIN, Rule.GREEDY, 5, 5),
    DraftSpec(Shape.CHAIN, Rule.COUPLED, 3, 3),
    DraftSpec(Shape.CHAIN, Rule.REJECTION, 4, 4),
    DraftSpec(Shape.TREE, Rule.COUPLED, 9, 4),
]


@functools.cache
def with_head() -> Pair:
    return make_pair(drafter={"head": HeadConfig(type="residual", rank=4, candidates=8)})


@pytest.fixture(params=["independent", "head"])
def drafting(request: pytest.FixtureRequest, pair: Pair) -> Iterator[tuple[BlockProposer, list[Request]]]:
    """A proposer and four requests whose prompts were read."""
    own = pair if request.param == "independent" else with_head()
    engine = Engine(own.target, own.drafter, policy="fixed:1", page_size=4, num_pages=100)
    requests = [engine.add_request(p, params) for p, params in zip(PROMPTS, PARAMS, strict=True)]
    engine.step()
    assert all(one.is_decoding for one in requests)
    for one in requests:
        assert engine.core.kv_manager.reserve(one, one.length + 6)
    yield block_proposer(engine), requests
    for one in requests:
        engine.abort(one)


def works_for(requests: list[Request]) -> list[Work[Request]]:
    return [Work(request, spec) for request, spec in zip(requests, ASKS, strict=True)]


def test_a_batch_is_drafted_for_as_each_alone(drafting: tuple[BlockProposer, list[Request]]) -> None:
    proposer, requests = drafting
    together, alone = works_for(requests), works_for(requests)
    with torch.inference_mode():
        proposer.propose(together, with_confidence=True)
        for work in alone:
            proposer.propose([work], with_confidence=True)
    for one, other in zip(together, alone, strict=True):
        assert one.proposal.token_ids == other.proposal.token_ids
        assert one.proposal.parents == other.proposal.parents
        assert one.proposal.confidence == pytest.approx(other.proposal.confidence, abs=1e-5)
        assert len(one.proposal.confidence) == len(one.proposal.token_ids)


def test_what_is_asked_for_is_what_is_proposed(drafting: tuple[BlockProposer, list[Request]]) -> None:
    proposer, requests = drafting
    works = works_for(requests)
    with torch.inference_mode():
        proposer.propose(works, with_confidence=False)
    greedy, matched, speculative, tree = (work.proposal for work in works)
    assert [len(p.token_ids) for p in (greedy, matched, speculative)] == [5, 3, 4]
    assert speculative.draft_probs is not None
    assert speculative.draft_probs.shape == (4, VOCAB)
    assert all(p.draft_probs is None for p in (greedy, matched, tree))
    assert tree.parents is not None
    assert len(tree.token_ids) <= 9
    assert all(p.parents is None for p in (greedy, matched, speculative))


def test_independent_positions_against_the_drafters_logits(pair: Pair) -> None:
    """The reference drafts position by position from one plain pass."""
    engine = Engine(pair.target, pair.drafter, policy="fixed:1", page_size=4, num_pages=100)
    own = engine.add_request(PROMPTS[0], SamplingParams(temperature=0.9, draft_temperature=0.7, seed=5))
    engine.step()
    assert engine.core.kv_manager.reserve(own, own.length + 6)
    proposer = block_proposer(engine)
    mask = pair.drafter.config.mask_token_id
    with torch.inference_mode():
        segment = Segment(own.draft_table, own.length - 1, 5, causal=False)
        rows = proposer.model.logits(proposer.model.states([segment], torch.tensor([own.anchor] + 4 * [mask])))
        works = [Work(own, DraftSpec(Shape.CHAIN, rule, 4, 4)) for rule in Rule]
        works.append(Work(own, DraftSpec(Shape.TREE, Rule.COUPLED, 6, 4)))
        for work in works:
            proposer.propose([work], with_confidence=False)
    greedy, matched, speculative, tree = (work.proposal for work in works)
    probs = token_probs(rows, own.params, 0.7)
    assert greedy.token_ids == rows.argmax(dim=-1).tolist()
    noise = own.noise.exponentials(range(own.length, own.length + 4), VOCAB)
    assert matched.token_ids == race(probs, noise).tolist()
    assert speculative.token_ids == draw(probs, own.noise.uniforms(Purpose.DRAFT, own.length, 4)).tolist()
    assert speculative.draft_probs is not None
    torch.testing.assert_close(speculative.draft_probs, probs)
    lattice = lattice_of(coupled_logits(rows, own.params, own.noise, range(own.length, own.length + len(rows))))
    assert tree.token_ids == expand(lattice, 6, 0.7).token_ids
    engine.abort(own)


def test_several_denoising_steps_know_no_distribution(drafting: tuple[BlockProposer, list[Request]]) -> None:
    proposer, requests = drafting
    proposer.configure(DecodingConfig(denoising_steps=2))
    work = Work(requests[1], DraftSpec(Shape.CHAIN, Rule.COUPLED, 5, 5))
    with torch.inference_mode():
        proposer.propose([work], with_confidence=True)
    assert len(work.proposal.token_ids) == len(work.proposal.confidence) == 5
    assert work.proposal.draft_probs is None


def test_drafting_takes_time(pair: Pair) -> None:
    """Reads the clock, but asks only that it moved; texts that run do not notice."""
    engine = Engine(pair.target, pair.drafter, policy="fixed:1", num_pages=20)
    proposer = BlockProposer(block_proposer(engine).model, engine.config)
    layers, choice = proposer.timed_parts(12, 2)
    assert layers > 0
    assert choice > 0
    assert engine.core.pool.num_used == 0
