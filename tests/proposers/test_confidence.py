"""DSpark's confidence head: what it says, who listens, and that what is cut by it changes no law."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chi_square import chi_square_p, joint_counts
from tests.engine.test_sampled import drawn, exact_law
from tests.tiny import VOCAB, Pair, block_proposer, drafter_config, greedy, make_pair, random_prompts, tokens
from volley import Engine, SamplingParams
from volley.decode.work import DraftSpec, Rule, Shape, Work, Works
from volley.errors import ConfigError
from volley.files import read_json
from volley.memory.batch import Segment
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.diagnosis import diagnose
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import export
from volley.policies.base import Cycle
from volley.policies.fixed import Fixed
from volley.proposers.block import BlockProposer
from volley.tensors import load_tensors

PROMPTS = random_prompts(4, longest=20, seed=3)
RANK, V = 4, 4
KINDS = ["dspark", None]


def with_confidence(kind: str | None, **changes: Any) -> Pair:
    head = None if kind is None else HeadConfig(type=kind, rank=RANK)
    return make_pair(drafter={"head": head, "confidence_width": 32 + (RANK if kind else 0), **changes})


def undecided(pair: Pair) -> Pair:
    """Return a pair with a head that depends on the token before, and is sure as often as not."""
    head = pair.drafter.confidence_head
    assert head is not None
    with torch.no_grad():
        head.proj.bias.zero_()
        head.proj.weight[:, :32] *= 0.1
        head.proj.weight[:, 32:] *= 10
    return pair


class Threshold(Fixed):
    """Verifies what comes before the first position that is less likely than ``least``."""

    uses_confidence = True
    least = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.cut = self.kept = 0

    def trim(self, cycles: Sequence[Cycle]) -> list[int]:
        sizes = []
        for cycle in cycles:
            doubtful = [place for place, sure in enumerate(cycle.confidence) if sure < self.least]
            sizes.append(min([*doubtful, cycle.spec.size]))
            self.kept += sizes[-1]
            self.cut += cycle.spec.size - sizes[-1]
        return sizes


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", list(Rule))
def test_a_rate_is_that_of_the_definition(kind: str | None, rule: Rule) -> None:
    pair = with_confidence(kind)
    engine = Engine(pair.target, pair.drafter, policy="fixed:1", page_size=4, num_pages=100)
    requests = [engine.add_request(prompt, SamplingParams(temperature=0.9, seed=5)) for prompt in PROMPTS]
    engine.step()
    works = [
        Work(one, DraftSpec(Shape.CHAIN, rule, size, size)) for one, size in zip(requests, (4, 2, 5, 3), strict=True)
    ]
    proposer = block_proposer(engine)
    with torch.inference_mode():
        for work in works:
            assert engine.core.kv_manager.reserve(work.request, work.request.length + 6)
        proposer.propose(works, with_confidence=True)
        for work in works:
            size = work.spec.positions
            tokens = torch.tensor([work.request.anchor] + size * [pair.drafter.config.mask_token_id])
            segment = Segment(work.request.draft_table, work.request.length - 1, 1 + size, causal=False)
            states = proposer.model.states([segment], tokens)
            weights = pair.drafter.state_dict()
            before = [work.request.anchor, *work.proposal.token_ids]
            for place, found in enumerate(work.proposal.confidence):
                read = states[place]
                if kind is not None:
                    read = torch.cat([read, weights["head.markov_w1.weight"][before[place]]])
                expected = (
                    weights["confidence_head.proj.weight"] @ read + weights["confidence_head.proj.bias"]
                ).sigmoid()
                assert found == pytest.approx(float(expected), abs=1e-5)
            assert len(work.proposal.confidence) == size
    for one in requests:
        engine.abort(one)


@pytest.mark.slow
def test_a_policy_cuts_by_it_and_greedy_answers_stay() -> None:
    pair, policy = undecided(with_confidence("dspark")), Threshold()
    engine = Engine(pair.target, pair.drafter, policy=policy, page_size=4, num_pages=100)
    expected, params = [greedy(pair.hf, prompt, 20) for prompt in PROMPTS], SamplingParams(max_tokens=20)
    assert tokens(engine.generate(PROMPTS, params)) == expected
    assert policy.cut > 10
    assert policy.kept > 10
    trees = Engine(pair.target, pair.drafter, page_size=4, num_pages=100)
    assert tokens(trees.generate(PROMPTS, params)) == expected


class LooksAtItsToken(BlockProposer):
    """Doubts a position for the token that was drawn there, which no rule that cuts may know."""

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        seconds = super().propose(works, with_confidence=with_confidence)
        for work in works:
            work.proposal.confidence = [float(token < 2) for token in work.proposal.token_ids]
        return seconds


@pytest.mark.slow
@pytest.mark.parametrize("biased", [False, True])
def test_answers_that_are_cut_by_it_follow_the_targets_law_unless_it_knows_the_token(biased: bool) -> None:
    head = HeadConfig(type="dspark", rank=RANK, candidates=V)
    drafter = {"vocab_size": V, "mask_token_id": 3, "head": head, "confidence_width": 32 + RANK}
    pair, policy = undecided(make_pair(2, drafter, vocab_size=V, initializer_range=0.2)), Threshold()
    engine = Engine(
        pair.target,
        pair.drafter,
        policy=policy,
        page_size=4,
        num_pages=2000,
        max_running=256,
        verification="rejection",
    )
    if biased:
        engine.core.proposer = LooksAtItsToken(block_proposer(engine).model, engine.config)
    params = SamplingParams(temperature=1.2, max_tokens=4, draft_temperature=0.7)
    found, _ = drawn(engine, params, 1500, seeded=False)
    probability = chi_square_p(joint_counts(found[:, :3], V), exact_law(replace(params, max_tokens=3), pair))
    assert probability < 1e-6 if biased else probability > 1e-3
    assert biased or min(policy.cut, policy.kept) > 100


def test_a_head_is_read_and_written(tmp_path: Path) -> None:
    pair = with_confidence("dspark")
    pair.drafter.save_pretrained(tmp_path / "own")
    assert Drafter.from_pretrained(tmp_path / "own").confidence_head is not None
    assert diagnose(tmp_path / "own").facts["confidence"] == "a head of its own"
    export(tmp_path / "own", tmp_path / "theirs", "speculators")
    raw = read_json(tmp_path / "theirs" / "config.json")
    assert (raw["enable_confidence_head"], raw["confidence_head_with_markov"]) == (True, True)
    theirs, own = (load_tensors(tmp_path / name / "model.safetensors") for name in ("theirs", "own"))
    assert torch.equal(theirs["confidence_head.proj.weight"], own["confidence_head.proj.weight"])
    export(tmp_path / "own", tmp_path / "plain", "zlab", drop_head=True)
    assert "confidence_head.proj.weight" not in load_tensors(tmp_path / "plain" / "model.safetensors")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["vocab_size"] == VOCAB


def test_a_head_of_another_width_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="confidence head reads 33 numbers; it must be a state of 32, or that and a row"
    ):
        drafter_config(confidence_width=33)
