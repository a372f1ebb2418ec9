"""EAGLE-3's chains and trees: what its definition drafts, and lossless whatever they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import eagle
from tests.costs import settle
from tests.proposers.answers import (
    COUNT,
    PROMPTS,
    V,
    check_law,
    check_penalties_and_seeds,
    check_that_drafts_give_way,
    expected,
    run,
    small_pair,
)
from tests.tiny import Pair, tokens
from volley import Engine, SamplingParams
from volley.config import DecodingConfig
from volley.decode.rules import Constraint
from volley.decode.tree import CANDIDATES, expand_freely
from volley.decode.work import DraftSpec, Proposal, Work, Works
from volley.errors import ConfigError
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.eagle_model import EagleModel
from volley.proposers.base import Proposer
from volley.proposers.eagle import EagleProposer, _Tree

SWITCHES: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "qk_norm": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "own_embedding": True},
]


def drafting(pair: Pair, folder: Path, **options: Any) -> Engine:
    drafter = load_drafter(folder, pair.target, "bf16")
    return Engine(pair.target, drafter, **{"policy": "fixed", "page_size": 4, "num_pages": 200, **options})


def check_kept_drafts(engine: Engine) -> None:
    """Assert that greedy answers are the target's, with drafts that were kept."""
    results = run(engine)
    assert [result.token_ids for result in results] == expected()
    lengths = [length for result in results for length in result.stats.accepted_lengths]
    assert sum(lengths) / len(lengths) > 1.5, "drafts must have been kept for this to mean anything"
    assert [result.token_ids for result in run(engine)] == expected(), "with prefixes in the cache"


class Watched(Proposer):
    """Notes what another proposer drafts after each text."""

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.block_size, self.can_grow_trees = inner, inner.block_size, inner.can_grow_trees
        self.seen: list[tuple[list[int], list[int]]] = []
        self.trees: list[tuple[list[int], DraftSpec, Proposal]] = []

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        seconds = self.inner.propose(works, with_confidence=with_confidence)
        self.seen += [(list(work.request.token_ids), work.proposal.token_ids) for work in works]
        self.trees += [
            (list(work.request.token_ids), work.spec, work.proposal) for work in works if work.proposal.parents
        ]
        return seconds


@pytest.mark.slow
@pytest.mark.parametrize("switches", SWITCHES, ids=lambda switches: "+".join(switches) or "as published")
def test_chains_are_those_of_the_definition(pair: Pair, tmp_path: Path, switches: dict[str, bool]) -> None:
    folder = eagle.checkpoint(tmp_path, **switches)
    engine = drafting(pair, folder, prefix_caching=False, max_batch_tokens=23)
    assert engine.core.proposer is not None
    watched = engine.core.proposer = Watched(engine.core.proposer)
    run(engine)
    weights = load_file(folder / "model.safetensors")
    assert len(watched.seen) > 80
    for text, drafted in watched.seen[::3]:
        assert drafted == eagle.dense_draft(pair.hf, weights, text, len(drafted), **switches)


@pytest.mark.slow
@pytest.mark.parametrize("switches", SWITCHES, ids=lambda switches: "+".join(switches) or "as published")
def test_trees_are_the_likeliest_paths_of_the_definition(pair: Pair, tmp_path: Path, switches: dict[str, bool]) -> None:
    folder = eagle.checkpoint(tmp_path, **switches)
    engine = drafting(pair, folder, tree_nodes=7, policy="fixed:5")
    assert engine.core.proposer is not None
    watched = engine.core.proposer = Watched(engine.core.proposer)
    run(engine)
    weights = load_file(folder / "model.safetensors")
    assert len(watched.trees) > 60
    for text, spec, found in watched.trees[::6]:

        def children(path: list[int], text: list[int] = text) -> list[tuple[int, float]]:
            best = eagle.dense_logits(pair.hf, weights, text, path, **switches).topk(CANDIDATES)
            return list(zip(best.indices.tolist(), (-best.values.log_softmax(-1)).tolist(), strict=True))

        wanted = expand_freely(children, spec.size, spec.positions)
        assert (found.token_ids, found.parents) == (wanted.token_ids, wanted.parents)
        assert found.confidence == pytest.approx(wanted.confidence, rel=1e-3)


@pytest.mark.slow
def test_a_reduced_vocabulary_drafts_its_tokens_only(pair: Pair, tmp_path: Path) -> None:
    some = [1, 2, 5, 8, 13, 21, 34]
    folder = eagle.checkpoint(tmp_path, drafted=some)
    engine = drafting(pair, folder)
    assert engine.core.proposer is not None
    watched = engine.core.proposer = Watched(engine.core.proposer)
    assert [result.token_ids for result in run(engine)] == expected()
    weights = load_file(folder / "model.safetensors")
    text, drafted = watched.seen[5]
    assert drafted == eagle.dense_draft(pair.hf, weights, text, len(drafted))
    assert {token for _, drafted in watched.seen for token in drafted} <= set(some)


class AfterOdd(Constraint):
    """One token alone follows an odd one; a few follow an even one."""

    def __init__(self, prompt: Sequence[int], vocab_size: int, _: torch.device) -> None:
        self.last, self.size = prompt[-1], vocab_size

    def take(self, token_id: int) -> None:
        self.last = token_id

    def mask(self, path: Sequence[int]) -> Any:
        last = path[-1] if path else self.last
        bits = np.zeros(self.size, dtype=np.bool_)
        bits[[4] if last % 2 else [3, 6, 7, 9, 11]] = True
        return np.packbits(bits, bitorder="little")

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return 0


@pytest.mark.slow
def test_drafts_that_gave_way_to_a_prompt_are_made_once_more(pair: Pair, tmp_path: Path) -> None:
    folder = eagle.checkpoint(tmp_path)
    check_that_drafts_give_way(lambda: drafting(pair, folder))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [None, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_under_a_constraint_are_plain_decodings(
    pair: Pair, tmp_path: Path, temperature: float, nodes: int | None
) -> None:
    params = SamplingParams(max_tokens=COUNT, temperature=temperature, seed=5, rules=(AfterOdd,))
    engine = drafting(pair, eagle.checkpoint(tmp_path), tree_nodes=nodes)
    drafted, plain = run(engine, params), run(Engine(pair.target, block_size=1), params)
    assert tokens(drafted) == tokens(plain)
    assert any(max(result.stats.accepted_lengths) > 2 for result in drafted)


class Knowing(EagleProposer):
    """Knows four of five tokens of each answer: a random drafter is hardly ever right."""

    def open(self, works: Works) -> list[Work[Any]]:
        self.drafted = dict.fromkeys((work.request.request_id for work in works), 0)
        return super().open(works)

    def read(self, requests: Sequence[Any], token_ids: list[int]) -> Tensor:
        logits = super().read(requests, token_ids)
        for row, request in zip(logits, requests, strict=True):
            at = request.num_output + self.drafted[request.request_id]
            answer = expected()[PROMPTS.index(request.token_ids[: request.num_prompt])]
            if at < COUNT and (at + request.num_prompt) % 5:
                row[answer[at]] = 100.0
            self.drafted[request.request_id] += 1
        return logits


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_tokens": 9, "max_running": 2},
        {"num_pages": 18},
        {"draft_window": 12},
        {"policy": "goodput"},
        {"policy": None, "block_size": 3},
        {"draft_kv_dtype": "int8"},
    ],
    ids=["usual", "chunks", "preemption", "window", "goodput", "shorter blocks", "int8 K/V"],
)
def test_greedy_answers_are_the_targets(
    pair: Pair, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch, token=0.01)
    engine = drafting(pair, eagle.checkpoint(tmp_path), **options)
    assert isinstance(engine.core.draft_model, EagleModel)
    engine.core.proposer = Knowing(engine.core.draft_model, engine.config)
    check_kept_drafts(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_tokens": 19, "max_running": 2},
        {"num_pages": 18},
        {"policy": "goodput"},
        {"draft_kv_dtype": "int8"},
    ],
    ids=["usual", "chunks", "preemption", "goodput", "int8 K/V"],
)
def test_greedy_answers_of_trees_are_the_targets(
    pair: Pair, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaf on the answer's path gets the answer's next token as its second child."""
    settle(monkeypatch, token=0.01)
    engine = drafting(pair, eagle.checkpoint(tmp_path), tree_nodes=12, **options)
    add = _Tree.add

    def knowing(self: _Tree, logits: Tensor, states: Tensor) -> None:
        logits, request = logits.clone(), self.work.request
        answer = expected()[PROMPTS.index(request.token_ids[: request.num_prompt])][request.num_output :]
        for row, leaf in zip(logits, self.leaves, strict=True):
            path = list[int]()
            while leaf:
                path, leaf = [self.nodes[leaf].token, *path], self.nodes[leaf].parent
            if path == answer[: len(path)] and len(path) < len(answer):
                row[answer[len(path)]] = row.max() - 0.1
        add(self, logits, states)

    monkeypatch.setattr(_Tree, "add", knowing)
    check_kept_drafts(engine)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [None, 9])
def test_penalties_and_seeds(pair: Pair, tmp_path: Path, nodes: int | None) -> None:
    check_penalties_and_seeds(pair, drafting(pair, eagle.checkpoint(tmp_path), tree_nodes=nodes))


@pytest.mark.slow
@pytest.mark.parametrize("biased", [False, True])
def test_sampled_answers_follow_the_targets_law_and_a_wrong_distribution_is_seen(tmp_path: Path, biased: bool) -> None:
    pair = small_pair()
    eagle.write(tmp_path, eagle.config(vocab_size=V, draft_vocab_size=V), eagle.tensors(vocab=V))
    engine = drafting(pair, tmp_path, max_running=256, num_pages=2000, verification="rejection")
    check_law(engine, pair, biased=biased)


@pytest.mark.slow
def test_sampled_answers_of_trees_follow_the_targets_law(tmp_path: Path) -> None:
    pair = small_pair()
    eagle.write(tmp_path, eagle.config(vocab_size=V, draft_vocab_size=V), eagle.tensors(vocab=V))
    check_law(drafting(pair, tmp_path, max_running=256, num_pages=2000, tree_nodes=6), pair, biased=False)


def test_what_it_has_no_use_for_is_refused(pair: Pair, tmp_path: Path) -> None:
    folder = eagle.checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="writes token by token; use 1"):
        drafting(pair, folder, denoising_steps=2)
    with pytest.raises(ConfigError, match="tree_nodes is 4"):
        drafting(pair, folder, tree_nodes=4, draft_window=12)
    engine = drafting(pair, folder)
    assert engine.config == DecodingConfig(policy="fixed")
