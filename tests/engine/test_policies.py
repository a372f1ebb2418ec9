"""Every policy through the engine: the same greedy tokens, the same law, and what a biased one would look like."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.chi_square import chi_square_p, joint_counts
from tests.costs import settle
from tests.engine.test_greedy import PROMPTS, expected, run, taught, tokens
from tests.engine.test_sampled import PARAMS, TOKENS, V, answers, exact_law, plain, sampled, tiny
from tests.tiny import Pair, random_drafter
from volley import Engine, SamplingParams
from volley.decode import lookup
from volley.decode.block_size import BlockSizePolicy, Decoding, Feedback, Fixed
from volley.decode.goodput import Goodput
from volley.decode.pilot import Pilot, PilotConfig, net_for
from volley.decode.sampling import Purpose, draw, token_probs
from volley.engine import judging
from volley.engine.engine import DEFAULT_POLICY
from volley.engine.pacing import Pacer
from volley.engine.request import Request
from volley.engine.scheduler import Scheduled
from volley.errors import ConfigError
from volley.models.adapter import drafter_fingerprint
from volley.models.drafter import Drafter
from volley.types import Proposal, Verdict


class Restless(BlockSizePolicy):
    """Another size for every request and cycle, and another cut: more different batches than any real policy makes."""

    uses_confidence = True

    def __init__(self) -> None:
        self.turn = 0

    def draft(self, requests: Decoding) -> list[int]:
        self.turn += 1
        return [
            min(limit, (self.turn + 3 * i) % 6) for i, limit in zip(requests.request_ids, requests.limits, strict=True)
        ]

    def verify(self, requests: Decoding, drafted: list[int], confidence: list[list[float]]) -> list[int]:
        for row, size, is_tree in zip(confidence, drafted, requests.trees, strict=True):
            assert len(row) <= requests.nodes if is_tree else len(row) == size
        return [max(0, len(row) - (self.turn + i) % 3) for i, row in zip(requests.request_ids, confidence, strict=True)]


class Climbing(Restless):
    """Asks for chains and trees by turns, and prunes the trees."""

    def tree_nodes(self, num_requests: int, *, speculative: bool) -> int:
        return (0, 7, 0, 3)[(self.turn + speculative) % 4]

    def verify(self, requests: Decoding, drafted: list[int], confidence: list[list[float]]) -> list[int]:
        assert all(
            row == sorted(row, reverse=True) for row, tree in zip(confidence, requests.trees, strict=True) if tree
        )
        return [max(0, len(row) - (self.turn + i) % 4) for i, row in zip(requests.request_ids, confidence, strict=True)]


class Copying(Restless):
    """Takes what is found in the text, or some of it, whether that is wise or not."""

    uses_lookup = True

    def look_up(self, requests: Decoding, drafting: list[int], confidence: list[list[float]]) -> list[int]:
        assert all(0 < sure < 1 for row in confidence for sure in row)
        return [min(len(row), (self.turn + i) % 7) for i, row in zip(requests.request_ids, confidence, strict=True)]


def random_pilot(drafter: Drafter | None = None) -> Pilot:
    """One that knows nothing, so that its choices vary with the prompt."""
    drafter = drafter or random_drafter()
    sizes = tuple(range(2, drafter.config.block_size + 1))
    config = PilotConfig(drafter=drafter_fingerprint(drafter), input="logits", block_sizes=sizes, width=8, layers=2)
    torch.manual_seed(0)
    return Pilot(config, net_for(config, drafter).requires_grad_(False))


POLICIES: list[Any] = [
    "goodput",
    "feedback",
    "fixed",
    "fixed:3",
    "fixed:1",
    Goodput,
    Feedback,
    Restless,
    Climbing,
    Copying,
    random_pilot,
]


def made(policy: Any) -> Any:
    return policy if isinstance(policy, str) else policy()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "options", [{}, {"num_pages": 16}, {"draft_window": 6, "max_batch_tokens": 9}, {"denoising_steps": 2}]
)
def test_greedy_tokens_are_the_targets(pair: Pair, policy: Any, options: dict[str, Any]) -> None:
    results = run(taught(pair, policy=made(policy), **options))
    assert tokens(results) == expected()


@pytest.mark.parametrize(("token", "least", "most"), [(0.01, 4, 6), (0.2, 1.3, 4), (50.0, 0.9, 2)])
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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_seed_gives_plain_decodings_tokens_under_every_policy(pair: Pair, policy: Any, steps: int) -> None:
    engine = Engine(pair.target, pair.drafter, policy=made(policy), denoising_steps=steps, page_size=4)
    assert all(params.seed is not None or params.temperature == 0 for params in PARAMS)
    assert answers(engine) == plain()


HOT = SamplingParams(temperature=1.0, max_tokens=TOKENS)


@pytest.mark.parametrize("policy", [Restless, Goodput, lambda: random_pilot(tiny().drafter)])
def test_the_sampled_law_is_the_targets(monkeypatch: pytest.MonkeyPatch, policy: Any) -> None:
    settle(monkeypatch, token=1e-3)
    sequences, accepted = sampled(HOT, policy=policy(), verification="speculative")
    assert chi_square_p(joint_counts(sequences, V), exact_law(HOT)) > 1e-3
    assert accepted > 0.1, "drafts must have been accepted for this to mean anything"


@pytest.mark.parametrize(("policy", "grown"), [(Climbing, True), (Goodput, False)])
def test_the_law_of_requests_without_a_seed_is_the_targets(
    monkeypatch: pytest.MonkeyPatch, policy: Any, grown: bool
) -> None:
    """Speculatively sampled as chains, until a policy grows trees for them; goodput does not, though they cost it nothing."""
    settle(monkeypatch, token=0.0)
    numbers = itertools.count()
    monkeypatch.setattr("volley.engine.engine.secrets.randbits", lambda bits: next(numbers))
    sequences, accepted, ways = sampled_ways(policy(), seeded=False)
    assert chi_square_p(joint_counts(sequences, V), exact_law(HOT)) > 1e-3
    assert accepted > 0.1, "drafts must have been accepted for this to mean anything"
    assert ways == ({False, True} if grown else {True})


@pytest.mark.parametrize("seeded", [True, False])
def test_the_law_of_drafts_and_copies_by_turns_is_the_targets(monkeypatch: pytest.MonkeyPatch, seeded: bool) -> None:
    sequences, copied = sampled_copies(monkeypatch, seeded=seeded)
    assert chi_square_p(joint_counts(sequences, V), exact_law(HOT)) > 1e-3
    assert copied > 300, "copies must have been accepted for this to mean anything"


def sampled_copies(monkeypatch: pytest.MonkeyPatch, *, seeded: bool) -> tuple[Tensor, int]:
    """What :func:`sampled` finds where a single token in common is enough to copy, and how many copies were right."""
    monkeypatch.setattr(lookup, "_KEY", 1)
    monkeypatch.setattr("tests.engine.test_sampled.PROMPT", [*range(V), *range(V), 2, 2])
    numbers, copied = itertools.count(), 0
    monkeypatch.setattr("volley.engine.engine.secrets.randbits", lambda bits: next(numbers))

    def count(request: Request, _: Proposal, verdict: Verdict) -> None:
        nonlocal copied
        copied += verdict.accepted if request.copied else 0

    sequences, _ = sampled(HOT, policy=Copying(), seeded=seeded, listener=count)
    return sequences, copied


def drawn_again(requests: list[Request], proposals: list[Proposal], logits: list[Tensor]) -> list[Verdict]:
    """A bias: where a copy is refused the token is drawn once more, from the whole law."""
    verdicts = honest_match(requests, proposals, logits)
    for verdict, request, rows in zip(verdicts, requests, logits, strict=True):
        if not verdict.accepted:
            probs = token_probs(rows[:1], request.params)
            verdict.token_ids = draw(probs, request.noise.uniforms(Purpose.DRAFT, len(request.token_ids), 1)).tolist()
    return verdicts


honest_match = judging._match


def test_copies_that_are_refused_and_drawn_again_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_match", drawn_again)
    sequences, _ = sampled_copies(monkeypatch, seeded=False)
    assert chi_square_p(joint_counts(sequences, V), exact_law(HOT)) < 1e-6


def test_the_law_of_trees_and_chains_by_turns_is_the_targets() -> None:
    sequences, accepted, ways = sampled_ways(Climbing(), seeded=True)
    assert chi_square_p(joint_counts(sequences, V), exact_law(HOT)) > 1e-3
    assert accepted > 0.1, "drafts must have been accepted for this to mean anything"
    assert ways == {False, True}


def sampled_ways(policy: BlockSizePolicy, *, seeded: bool) -> tuple[Tensor, float, set[bool]]:
    """What :func:`sampled` finds, and whether drafts were chains."""
    ways: set[bool] = set()
    sequences, accepted = sampled(
        HOT, policy=policy, seeded=seeded, listener=lambda request, proposal, _: ways.add(proposal.parents is None)
    )
    return sequences, accepted, ways


def peeking(self: Pacer, plan: list[Scheduled], proposals: list[Proposal]) -> list[Proposal]:
    """A bias: verify only as far as the *sampled* tokens are their slots' likeliest."""
    proposals = honest(self, plan, proposals)
    for proposal in proposals:
        if proposal.draft_probs is not None:
            best = proposal.draft_probs.argmax(dim=-1).tolist()
            kept = [token == top for token, top in zip(proposal.token_ids, best, strict=True)]
            size = [*kept, False].index(False)
            proposal.token_ids, proposal.draft_probs = proposal.token_ids[:size], proposal.draft_probs[:size]
    return proposals


honest = Pacer.after_drafting


def test_a_policy_that_peeks_at_the_sampled_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pacer, "after_drafting", peeking)
    sequences, _ = sampled(HOT, verification="speculative")
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "godput"}, "unknown policy 'godput'; did you mean 'goodput'"),
        ({"policy": "fixed:x"}, "such as fixed:8"),
        ({"policy": "fixed:0"}, "such as fixed:8"),
        ({"policy": "fixed:9"}, "beyond the 6"),
        ({"policy": "feedback:3"}, "takes nothing after a colon"),
        ({"policy": "goodput:draft"}, "takes nothing after a colon but 'drafts'"),
        ({"policy": "fixed", "block_size": 3}, "give one of them"),
        ({"policy": "pilot"}, "no pilot beside this drafter; train one with `volley pilot`"),
        ({"policy": "pilot:nowhere"}, "no pilot in nowhere; train one with `volley pilot`"),
        ({"policy": "pilto"}, "did you mean 'pilot'"),
    ],
)
def test_bad_policies_are_named(pair: Pair, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(pair.target, random_drafter(), **options)


@pytest.mark.parametrize("num_pages", [9, 12, 16, 24, 40])
def test_texts_that_repeat_themselves_need_no_drafter(
    pair: Pair, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch, token=0.01)
    prompts = [[*prompt, *prompt[:-1]] for prompt in PROMPTS]
    params = SamplingParams(max_tokens=60)
    plain = tokens(Engine(pair.target).generate(prompts, params))
    for policy in ("goodput", Copying()):
        engine = Engine(pair.target, policy=policy, num_pages=num_pages)
        results = list(engine.generate(prompts, params))
        assert tokens(results) == plain
        assert max(length for result in results for length in result.stats.accepted_lengths) > 4
        assert engine.pool.num_used == 0
        assert num_pages > 24 or sum(result.stats.preemptions for result in results) > 0


def test_copying_ends_with_the_policy_that_wants_it(pair: Pair) -> None:
    engine = Engine(pair.target, policy=Copying())
    request = engine.add_request([1, 2, 3, 4] * 5, SamplingParams(max_tokens=60))
    while not request.copied:
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
    with pytest.raises(ConfigError, match="there is none; name a drafter"):
        Engine(pair.target, policy="pilot")


# -- the pilot ---------------------------------------------------------------------------------------------------------


def test_the_pilot_decides_once_for_each_request(pair: Pair) -> None:
    """From the prompt alone: cut in chunks, found in the prefix cache or read again after a preemption, it is the same."""
    chosen: list[list[list[int]]] = []
    options: dict[str, Any]
    for options in ({}, {"max_batch_tokens": 5}, {"num_pages": 16}):
        engine = taught(pair, policy=(policy := random_pilot()), **options)
        results = run(engine) + run(engine)  # the second time with cached prefixes
        assert tokens(results) == expected() * 2
        assert not policy.slots
        chosen.append([result.stats.block_sizes for result in results])
    sizes = [max(blocks) for blocks in chosen[0]]
    assert len(set(sizes)) > 1
    for other in chosen:
        for size, blocks in zip(sizes, other, strict=True):
            assert set(blocks[:-4]) <= {size}, "until the answer's end leaves less room"
