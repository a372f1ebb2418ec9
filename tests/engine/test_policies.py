"""Every policy through the engine: the same greedy tokens, the same law, and what a biased one would look like."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.chi_square import chi_square_p, joint_counts
from tests.costs import settle
from tests.engine.test_greedy import PROMPTS, expected, run, taught, tokens
from tests.engine.test_sampled import TOKENS, V, exact_law, sampled, tiny
from tests.tiny import Pair, random_drafter
from volley import Engine, SamplingParams
from volley.decode import lookup
from volley.decode.on_device import Reading
from volley.decode.sampling import Purpose, draw, token_probs
from volley.decode.work import DraftSpec, Proposal, Rule, Shape, Verdict, Work, Works
from volley.errors import ConfigError
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.pilot import PilotConfig, net_for
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.policies.base import Cycle, Policy, View
from volley.policies.fixed import Fixed
from volley.policies.goodput import Goodput
from volley.policies.make import DEFAULT_POLICY
from volley.policies.pilot import Pilot
from volley.procedures.request import Request
from volley.procedures.speculative import Speculative
from volley.proposers.block import BlockProposer


class Restless(Policy):
    """Another size for every request and cycle, and another cut: more different batches than any real policy makes."""

    uses_confidence = True

    def __init__(self) -> None:
        self.turn = 0

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        self.turn += 1
        return [self.spec(view) for view in views]

    def spec(self, view: View) -> DraftSpec:
        return view.draft((self.turn + 3 * view.request_id) % 6)

    def trim(self, cycles: Sequence[Cycle]) -> list[int]:
        for cycle in cycles:
            own = cycle.confidence
            if cycle.spec.shape is Shape.TREE:
                assert len(own) <= cycle.spec.size
                assert own == sorted(own, reverse=True)
            else:
                assert len(own) == cycle.spec.positions
        return [max(0, len(cycle.confidence) - (self.turn + cycle.request_id) % 3) for cycle in cycles]


class Climbing(Restless):
    """Asks for chains and trees by turns, and prunes the trees."""

    def spec(self, view: View) -> DraftSpec:
        nodes = (0, 7, 0, 3)[(self.turn + (view.rule is Rule.REJECTION)) % 4]
        return view.draft((self.turn + 3 * view.request_id) % 6, nodes)


class Copying(Restless):
    """Takes what is found in the text, or some of it, whether that is wise or not."""

    uses_lookup = True

    def spec(self, view: View) -> DraftSpec:
        assert all(0 < sure < 1 for sure in view.lookup_confidence)
        count = min(len(view.lookup_confidence), (self.turn + view.request_id) % 7)
        return view.lookup(count) if count else super().spec(view)


def random_pilot(drafter: Drafter | None = None) -> Pilot:
    """One that knows nothing, so that its choices vary with the prompt."""
    drafter = drafter or random_drafter()
    sizes = tuple(range(2, drafter.config.block_size + 1))
    config = PilotConfig(drafter=drafter_fingerprint(drafter), input="logits", block_sizes=sizes, width=8, layers=2)
    torch.manual_seed(0)
    return Pilot(config, net_for(config, drafter).requires_grad_(False))


def made(policy: Any) -> Any:
    return policy if isinstance(policy, str) else policy()


@pytest.mark.parametrize(("token", "least", "most"), [(0.01, 4, 6), (0.2, 1.3, 4.5), (50.0, 0.9, 2)])
def test_goodput_adapts_and_changes_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, token: float, least: float, most: float
) -> None:
    settle(monkeypatch, token=token)
    engine = taught(pair, policy="goodput")
    results = [result for _ in range(3) for result in run(engine)]
    assert tokens(results) == expected() * 3
    sizes = [size for result in results[len(PROMPTS) :] for size in result.stats.block_sizes]
    mean = sum(sizes) / len(sizes)
    assert least < mean < most


HOT = SamplingParams(temperature=1.0, max_tokens=TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Restless, Goodput, lambda: random_pilot(tiny().drafter)])
def test_the_sampled_law_is_the_targets(monkeypatch: pytest.MonkeyPatch, policy: Any) -> None:
    settle(monkeypatch, token=1e-3)
    sequences, accepted = sampled(HOT, policy=policy(), verification="rejection")
    assert chi_square_p(joint_counts(sequences, V), exact_law(HOT)) > 1e-3
    assert accepted > 0.1, "drafts must have been accepted for this to mean anything"


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "seeded"), [(Climbing, False), (Climbing, True), (Goodput, False)])
def test_the_law_of_trees_and_chains_by_turns_is_the_targets(
    monkeypatch: pytest.MonkeyPatch, policy: Any, seeded: bool
) -> None:
    """Without a seed they are speculatively sampled chains until a policy grows trees; goodput does not, though they are free."""
    settle(monkeypatch, token=0.0)
    numbers, are_chains = itertools.count(), set[bool]()
    monkeypatch.setattr("volley.engine.requests.secrets.randbits", lambda bits: next(numbers))
    sequences, accepted = sampled(
        HOT,
        policy=policy(),
        seeded=seeded,
        listener=lambda request, proposal, _: are_chains.add(proposal.parents is None),
    )
    assert chi_square_p(joint_counts(sequences, V), exact_law(HOT)) > 1e-3
    assert accepted > 0.1, "drafts must have been accepted for this to mean anything"
    assert are_chains == ({False, True} if policy is Climbing else {True})


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [True, False])
def test_the_law_of_drafts_and_copies_by_turns_is_the_targets(monkeypatch: pytest.MonkeyPatch, seeded: bool) -> None:
    sequences, copied = sampled_copies(monkeypatch, seeded=seeded)
    assert chi_square_p(joint_counts(sequences, V), exact_law(HOT)) > 1e-3
    assert copied > 300, "copies must have been accepted for this to mean anything"


def sampled_copies(monkeypatch: pytest.MonkeyPatch, *, seeded: bool) -> tuple[Tensor, int]:
    """Return what :func:`sampled` finds where a single token in common is enough to copy, and how many copies were right."""
    monkeypatch.setattr(lookup, "KEY", 1)
    monkeypatch.setattr("tests.engine.test_sampled.PROMPT", [*range(V), *range(V), 2, 2])
    numbers, copied = itertools.count(), 0
    monkeypatch.setattr("volley.engine.requests.secrets.randbits", lambda bits: next(numbers))

    def count(request: Request, proposal: Proposal, verdict: Verdict) -> None:
        nonlocal copied
        copied += verdict.accepted if proposal.parents is None and not proposal.confidence else 0

    sequences, _ = sampled(HOT, policy=Copying(), seeded=seeded, listener=count)
    return sequences, copied


class DrawingAgain(Speculative):
    """A bias: where a copy is refused the token is drawn once more, from the whole distribution."""

    def verify(self, works: Sequence[Work[Request]], logits: Tensor) -> Reading:
        super().verify(works, logits).read()
        for work in works:
            request, verdict = work.request, work.verdict
            if work.spec.shape is Shape.LOOKUP and work.proposal.token_ids and not verdict.accepted:
                probs = token_probs(logits[work.rows][:1], request.params)
                verdict.token_ids = draw(probs, request.noise.uniforms(Purpose.DRAFT, request.length, 1)).tolist()
        return Reading()


@pytest.mark.slow
def test_copies_that_are_refused_and_drawn_again_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volley.engine.engine.Speculative", DrawingAgain)
    sequences, _ = sampled_copies(monkeypatch, seeded=False)
    assert chi_square_p(joint_counts(sequences, V), exact_law(HOT)) < 1e-6


class Peeking(Fixed):
    """A bias: verify only as far as the *sampled* tokens are their positions' likeliest; it reads them where no policy may."""

    def __init__(self) -> None:
        super().__init__()
        self.works: Sequence[Work[Request]] = []

    def trim(self, cycles: Sequence[Cycle]) -> list[int]:
        proposals = {work.request.request_id: work.proposal for work in self.works}
        sizes = []
        for cycle in cycles:
            proposal = proposals.get(cycle.request_id)
            if proposal is None or proposal.draft_probs is None:
                sizes.append(cycle.spec.size)
                continue
            best = proposal.draft_probs.argmax(dim=-1).tolist()
            kept = [token == top for token, top in zip(proposal.token_ids, best, strict=True)]
            sizes.append([*kept, False].index(False))
        return sizes


@pytest.mark.slow
def test_a_policy_that_peeks_at_the_sampled_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, propose = Peeking(), BlockProposer.propose

    def spied(self: BlockProposer, works: Works, *, with_confidence: bool) -> float:
        policy.works = works
        return propose(self, works, with_confidence=with_confidence)

    monkeypatch.setattr(BlockProposer, "propose", spied)
    sequences, _ = sampled(HOT, policy=policy, verification="rejection")
    assert chi_square_p(joint_counts(sequences, V), exact_law(HOT)) < 1e-6


# -- asking for one ----------------------------------------------------------------------------------------------------


def test_what_is_asked_for_is_what_one_gets(pair: Pair) -> None:
    assert DEFAULT_POLICY == "goodput"
    engine = Engine(pair.target, pair.drafter, policy=DEFAULT_POLICY)
    assert isinstance(engine.policy, Goodput)
    assert engine.block_size == 6
    engine.policy = "fixed:3"  # type: ignore[assignment]
    assert isinstance(engine.policy, Fixed)
    assert engine.block_size == 3
    engine.block_size = 2
    assert (type(engine.policy), engine.policy.block_size) == (Fixed, 2)
    own = Restless()
    assert Engine(pair.target, pair.drafter, policy=own).policy is own
    assert Engine(pair.target, pair.drafter, block_size=4).policy.block_size == 4
    assert Engine(pair.target).block_size == 1


@pytest.mark.slow
def test_without_a_drafter_the_default_copies_from_the_text(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are timed when something is first found in a text, and not before."""
    settle(monkeypatch, token=0.01)
    params, prompt = SamplingParams(max_tokens=60), [*PROMPTS[0], *PROMPTS[0][:-1]]
    default, plain = Engine(pair.target), Engine(pair.target, policy="plain")
    with pytest.MonkeyPatch.context() as nothing:
        nothing.setattr(lookup.Lookup, "find", lambda *_: ([], 0))
        (unfound,) = default.generate(prompt, params)
    assert default.core.pacing.costs.target.num_timed == 0
    assert set(unfound.stats.block_sizes) == {1}
    (copied,), (plainly,) = default.generate(prompt, params), plain.generate(prompt, params)
    assert copied.token_ids == unfound.token_ids == plainly.token_ids
    assert max(copied.stats.accepted_lengths) > 4
    assert default.core.pacing.costs.target.num_timed > 0
    assert set(plainly.stats.block_sizes) == {1}
    assert plain.core.pacing.costs.target.num_timed == 0
    default.block_size = 1
    (fixed,) = default.generate(prompt, params)
    assert set(fixed.stats.block_sizes) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [9, 16, 40])
def test_texts_that_repeat_themselves_need_no_drafter(
    pair: Pair, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch, token=0.01)
    prompts = [[*prompt, *prompt[:-1]] for prompt in PROMPTS]
    params = SamplingParams(max_tokens=60)
    plain = tokens(Engine(pair.target, block_size=1).generate(prompts, params))
    for policy in ("goodput", Copying()):
        engine = Engine(pair.target, policy=policy, num_pages=num_pages)
        results = list(engine.generate(prompts, params))
        assert tokens(results) == plain
        assert max(length for result in results for length in result.stats.accepted_lengths) > 4
        assert engine.core.pool.num_used == 0
        assert num_pages > 24 or sum(result.stats.preemptions for result in results) > 0


def test_copying_ends_with_the_policy_that_wants_it(pair: Pair) -> None:
    engine = Engine(pair.target, policy=Copying())
    request = engine.add_request([1, 2, 3, 4] * 5, SamplingParams(max_tokens=60))
    while max(request.stats.block_sizes, default=1) == 1:
        engine.step()
    engine.block_size = 1
    cycles = len(request.stats.block_sizes)
    while request.finish_reason is None:
        engine.step()
    assert max(request.stats.block_sizes[cycles:]) == 1


def test_a_text_is_searched_only_for_a_policy_that_asks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup.Lookup, "find", lambda *_: pytest.fail("nobody asked"))
    for policy in ("fixed", "feedback", "goodput:drafts"):
        assert tokens(run(taught(pair, policy=policy))) == expected()


def test_a_policy_needs_a_drafter(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="with a drafter"):
        Engine(pair.target, policy="fixed:4")
    with pytest.raises(ConfigError, match="give one of them"):
        Engine(pair.target, random_drafter(), policy="fixed", block_size=3)


# -- the pilot ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_pilot_decides_once_for_each_request(pair: Pair) -> None:
    """From the prompt alone: cut in chunks, found in the prefix cache or read again after a preemption, it is the same."""
    chosen: list[list[list[int]]] = []
    options: dict[str, Any]
    for options in ({}, {"max_batch_tokens": 5}, {"num_pages": 16}):
        engine = taught(pair, policy=(policy := random_pilot()), **options)
        results = run(engine) + run(engine)  # the second time with cached prefixes
        assert tokens(results) == expected() * 2
        assert not policy.positions
        chosen.append([result.stats.block_sizes for result in results])
    sizes = [max(blocks) for blocks in chosen[0]]
    assert len(set(sizes)) > 1
    for other in chosen:
        for size, blocks in zip(sizes, other, strict=True):
            assert set(blocks[:-4]) <= {size}, "until the answer's end leaves less room"
