"""How a request may be drafted for, what a pass computes for it, and which tokens come of the logits."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.made_up import decoding, random_tree, request
from volley.config import DecodingConfig
from volley.decode.sampling import Purpose, draw, race, token_probs
from volley.decode.work import DraftSpec, Phase, Proposal, Rule, Shape, Verdict, Work
from volley.params import SamplingParams
from volley.procedures.request import Request
from volley.procedures.speculative import Speculative

V = 7


def procedure(**options: Any) -> Speculative:
    return Speculative(DecodingConfig(**options))


# -- what the policy is shown ------------------------------------------------------------------------------------------


def test_greedy_requests_are_drafted_for_up_to_their_end() -> None:
    view = procedure().view(decoding([1, 2, 3], SamplingParams(max_tokens=20)), 8)
    assert (view.rule, view.limit, view.chain_limit) == (Rule.GREEDY, 7, 7)
    view = procedure().view(decoding([1, 2, 3], SamplingParams(max_tokens=5)), 8)
    assert view.limit == 3, "of the four tokens that are left the target writes the last one"


@pytest.mark.parametrize(
    ("options", "seed", "rule"),
    [({}, None, Rule.REJECTION), ({}, 0, Rule.COUPLED), ({"verification": "coupled"}, None, Rule.COUPLED)],
)
def test_sampled_requests_are_verified_as_they_were_configured(
    options: dict[str, Any], seed: int | None, rule: Rule
) -> None:
    own = decoding([1, 2, 3], SamplingParams(temperature=1.0, seed=seed))
    assert procedure(**options).view(own, 8).rule is rule


def test_positions_whose_noise_a_draft_knew_are_matched_and_chains_stay_within_them() -> None:
    own = decoding([1, 2, 3], SamplingParams(temperature=1.0))
    own.noise_used_until = 5
    view = procedure().view(own, 8)
    assert (view.rule, view.limit, view.chain_limit) == (Rule.COUPLED, 7, 2)
    own.noise_used_until = 3
    assert procedure().view(own, 8).rule is Rule.REJECTION


# -- what the pass computes --------------------------------------------------------------------------------------------


def test_a_decoding_request_computes_its_anchor_and_its_draft() -> None:
    own = decoding([1, 2, 3])
    work = procedure().next_work(own, DraftSpec(Shape.TREE, Rule.GREEDY, 3, 2))
    work.proposal = Proposal([4, 5, 6], parents=(0, 0, 1))
    tokens, segment = procedure().segment(work)
    assert tokens == [3, 4, 5, 6]
    assert (segment.start, segment.length, segment.parents) == (2, 4, (0, 0, 1))
    assert procedure().num_rows(work) == 4


@pytest.mark.parametrize(("computed", "count", "rows"), [(0, 2, 0), (0, 4, 1), (2, 2, 1), (2, 1, 0)])
def test_a_prompt_needs_logits_only_at_its_end(computed: int, count: int, rows: int) -> None:
    own = request([1, 2, 3, 4])
    own.computed = computed
    work = procedure().read(own, count)
    assert procedure().num_rows(work) == rows
    assert work.phase is Phase.PREFILL


def test_what_a_preemption_took_is_read_again_without_choosing_a_token() -> None:
    own = request([1, 2, 3, 4], answered=2)
    assert procedure().num_rows(procedure().read(own, own.prefill_end)) == 0


# -- what comes of the logits ------------------------------------------------------------------------------------------


def on_rows(works: list[Work[Request]]) -> int:
    """Give every work its rows; how many there are."""
    count = 0
    for work in works:
        wanted = procedure().num_rows(work)
        work.rows = slice(count, count + wanted)
        count += wanted
    return count


def one_by_one(work: Work[Request], logits: Tensor) -> Verdict:
    """The slow reference: the target's choices one after the other, each after what was accepted so far."""
    own, proposal = work.request, work.proposal
    parents = proposal.parents or tuple(range(len(proposal.token_ids)))
    node, chosen, path = 0, list[int](), list[int]()
    while True:
        row = logits[node]
        position = own.length + len(chosen)
        if own.params.temperature == 0:
            token = int(row.argmax())
        elif work.spec.rule is Rule.COUPLED:
            probs = token_probs(row[None], own.params)
            token = int(race(probs, own.noise.exponentials([position], V)))
        else:
            probs = token_probs(row[None], own.params)
            token = int(draw(probs, own.noise.uniforms(Purpose.TARGET, position, 1)))
        chosen.append(token)
        following = [
            index
            for index, (parent, drafted) in enumerate(zip(parents, proposal.token_ids, strict=True), start=1)
            if parent == node and drafted == token
        ]
        if not following:
            return Verdict(len(path), chosen, None if proposal.parents is None else tuple(path))
        node = following[0]
        path.append(node)


KINDS = ("greedy", "match", "compared", "greedy tree", "matched tree", "plain", "plain sampled", "chunk")


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_a_batch_of_all_kinds_is_judged_as_each_alone(kinds: list[str], chance: random.Random) -> None:
    works: list[Work[Request]] = []
    for kind in kinds:
        is_sampled = kind in ("match", "compared", "matched tree", "plain sampled")
        temperature = chance.choice([0.7, 1.0]) if is_sampled else 0.0
        seed = chance.randrange(100)
        own = decoding([1, 2, 3], SamplingParams(max_tokens=30, temperature=temperature, seed=seed))
        own.noise.seed = seed
        rule = Rule.GREEDY
        if is_sampled:
            rule = Rule.COUPLED if kind.startswith("match") else Rule.REJECTION
        shape = Shape.TREE if kind.endswith("tree") else Shape.CHAIN
        work = Work(own, DraftSpec(shape, rule, 5, 5))
        if kind.endswith("tree"):
            work.proposal = random_tree(5, V, chance)
        elif not kind.startswith("plain"):
            work.proposal = Proposal([chance.randrange(V) for _ in range(chance.randint(1, 4))])
        if kind == "chunk":
            own = request([1, 2, 3])
            work = procedure().read(own, 2)
        works.append(work)
    count = on_rows(works)
    logits = 2 * torch.randn(count, V, generator=torch.Generator().manual_seed(chance.randrange(1000)))
    for work in works:  # make chains right now and then
        for place, token in enumerate(work.proposal.token_ids):
            if work.proposal.parents is None and chance.random() < 0.7:
                logits[work.rows.start + place, token] += 10
    procedure().verify(works, logits).read()
    for kind, work in zip(kinds, works, strict=True):
        if kind == "chunk":
            assert work.verdict == Verdict(0, [])
        else:
            assert work.verdict == one_by_one(work, logits[work.rows]), kind


def test_a_draft_with_its_distribution_is_judged_by_the_ratio_of_both() -> None:
    """If draft and target are one distribution everything is kept; if they share no token, nothing is."""
    for shared, accepted in ((True, 3), (False, 0)):
        for seed in range(20):
            own = decoding([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=9))
            own.noise.seed = seed
            logits = torch.full((4, V), -torch.inf)
            logits[:, :3] = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            probs = token_probs(logits[:3], own.params)
            if not shared:
                probs = probs.roll(3, dims=-1)
            tokens = draw(probs, own.noise.uniforms(Purpose.DRAFT, own.length, 3)).tolist()
            work = Work(own, DraftSpec(Shape.CHAIN, Rule.REJECTION, 3, 3), proposal=Proposal(tokens, probs))
            on_rows([work])
            procedure().verify([work], logits).read()
            assert work.verdict.accepted == accepted
            assert work.verdict.token_ids[:accepted] == tokens[:accepted]
            assert max(work.verdict.token_ids) < 3, "what the target gives no probability never comes out"


@pytest.mark.parametrize("kind", ["match", "compared", "ratio"])
def test_a_large_vocabulary_is_judged_as_each_request_alone(kind: str) -> None:
    """On a CPU some requests at a time: six drafts of three tokens have more probabilities than are made at once."""
    large, noise = 2**17, torch.Generator().manual_seed(5)
    logits = torch.randn(24, large, generator=noise)
    likely = torch.randint(large, (24,), generator=noise)
    logits[torch.arange(24), likely] += 13  # as likely as all others together

    def work(place: int) -> Work[Request]:
        own = decoding([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=9))
        own.noise.seed = place
        first = 4 * place
        probs = token_probs(logits[first : first + 3], own.params) if kind == "ratio" else None
        proposal = Proposal(likely[first : first + 3].tolist(), probs)
        return Work(
            own, DraftSpec(Shape.CHAIN, Rule.COUPLED if kind == "match" else Rule.REJECTION, 3, 3), proposal=proposal
        )

    together = [work(place) for place in range(6)]
    on_rows(together)
    procedure().verify(together, logits).read()
    for place, own in enumerate(together):
        alone = work(place)
        on_rows([alone])
        procedure().verify([alone], logits[4 * place : 4 * place + 4]).read()
        assert own.verdict == alone.verdict
    assert len({own.verdict.accepted for own in together}) > 1 or kind == "ratio"


def test_log_probabilities_belong_to_the_tokens_that_come_out() -> None:
    own = decoding([1, 2, 3], SamplingParams(logprobs=True, top_logprobs=2))
    work = Work(own, DraftSpec(Shape.TREE, Rule.GREEDY, 3, 2), proposal=Proposal([4, 5, 6], parents=(0, 0, 2)))
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    logits[0, 5] = logits[2, 6] = 10
    on_rows([work])
    procedure().verify([work], logits).read()
    assert work.verdict.path == (2, 3)
    rows = logits.log_softmax(dim=-1)[[0, 2, 3]]
    expected = [float(row[token]) for row, token in zip(rows, work.verdict.token_ids, strict=True)]
    assert [score.logprob for score in work.scores] == pytest.approx(expected)
    assert [[token for token, _ in pairs] for _, _, pairs in work.scores] == rows.topk(2).indices.tolist()
