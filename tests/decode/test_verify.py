"""Are the verifiers exactly lossless? 10⁵ sequences a mode against the exact law, and planted biases that must show.

The target is a table p(x | prefix) over 5 tokens. Every draw drafts three tokens, verifies them, and is completed by plain
sampling to four tokens, so that the joint law of whole sequences can be compared, not only that of single tokens.
"""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.chi_square import chi_square_p, joint_counts
from volley.decode import verify
from volley.decode.sampling import race
from volley.decode.verify import verify_choices
from volley.decode.work import Verdict

V, K = 5, 3
LENGTH = K + 1
DRAWS = 100_000
BIASED_DRAWS = 30_000


def random_laws(rows: int, seed: int, *, zeros: bool = True) -> Tensor:
    laws = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)).mul(1.2).exp()
    if zeros:
        laws[:, 1:] *= (torch.rand(rows, V - 1, generator=torch.Generator().manual_seed(seed + 1)) > 0.15).float()
    return laws / laws.sum(dim=-1, keepdim=True)


TARGET = [random_laws(V**length, 10 + length) for length in range(LENGTH)]
"""``TARGET[i][prefix]``: law after a prefix of i tokens, itself read as a number in base 5."""
DRAFT = (0.5 * TARGET[0] + 0.5 * random_laws(K, 99)).contiguous()
"""Single-pass draft: the law of each position, independent of the others."""
DRAFT_GIVEN_LAST = random_laws(V, 7, zeros=False)
"""Two-step draft: the last position is revealed first, the one before it depends on it."""


def exact_law() -> Tensor:
    law = torch.ones(1, dtype=torch.double)
    for table in TARGET:
        law = (law[:, None] * (table.double() / table.double().sum(-1, keepdim=True))).flatten()
    return law


def code(tokens: Tensor) -> Tensor:
    """``[N, i]`` tokens → ``[N]`` row of the table of length i."""
    return (tokens * V ** torch.arange(tokens.shape[1] - 1, -1, -1)).sum(dim=1)


def exponentials(*shape: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_exponential(shape, dtype=np.float32)).clamp_min(1e-30)


def target_rows(drafts: Tensor) -> Tensor:
    """Target laws of every row of a ragged batch: ``[N · (k + 1), V]`` for drafts ``[N, k]``."""
    rows = [TARGET[i][code(drafts[:, :i])] for i in range(drafts.shape[1] + 1)]
    return torch.stack(rows, dim=1).flatten(0, 1)


def complete(verdicts: list[Verdict], noise: Tensor | int) -> Tensor:
    """Sequences ``[N, LENGTH]``: what was emitted, continued by plain sampling with ``noise [N, LENGTH, V]`` or its seed."""
    emitted = torch.full((len(verdicts), LENGTH), -1)
    for row, verdict in enumerate(verdicts):
        assert len(verdict.token_ids) == verdict.accepted + 1
        emitted[row, : len(verdict.token_ids)] = torch.tensor(verdict.token_ids)
    if isinstance(noise, int):
        noise = exponentials(len(verdicts), LENGTH, V, seed=noise)
    for i in range(LENGTH):
        fresh = race(TARGET[i][code(emitted[:, :i])], noise[:, i])
        emitted[:, i] = torch.where(emitted[:, i] < 0, fresh, emitted[:, i])
    return emitted


def p_value(verdicts: list[Verdict], noise: Tensor | int = 1000) -> float:
    return chi_square_p(joint_counts(complete(verdicts, noise), V), exact_law())


def sample_single_pass(draws: int, seed: int) -> Tensor:
    return race(DRAFT.expand(draws, -1, -1).reshape(-1, V), exponentials(draws * K, V, seed=seed)).view(draws, K)


def sample_two_step(noise: Tensor) -> Tensor:
    """Drafts ``[N, 3]`` from noise ``[N, 3, V]``: the last token first, then the middle one given it."""
    draws = len(noise)
    last = race(DRAFT[2].expand(draws, -1), noise[:, 2])
    middle = race(DRAFT_GIVEN_LAST[last], noise[:, 1])
    first = race(DRAFT[0].expand(draws, -1), noise[:, 0])
    return torch.stack([first, middle, last], dim=1)


def speculative(drafts: Tensor, scored_with: Tensor, seed: int, lengths: Tensor | None = None) -> list[Verdict]:
    """One ragged call for all ``drafts [N, 3]``, the first ``lengths [N]`` of each, scored with laws ``[N, 3, V]``."""
    draws = len(drafts)
    sizes = [K] * draws if lengths is None else lengths.tolist()
    uniforms = np.random.default_rng(seed).random((draws, K)).tolist()
    kept = torch.arange(LENGTH) <= torch.tensor(sizes)[:, None]
    noise_seed = seed + 1

    def draw(laws: Tensor, rows: list[int]) -> list[int]:
        assert len(rows) == draws
        return race(laws, exponentials(draws, V, seed=noise_seed)).tolist()

    with torch.inference_mode():
        return verify_speculative(
            target_rows(drafts)[kept.flatten()],
            [laws[:size] for laws, size in zip(scored_with, sizes, strict=True)],
            [draft[:size] for draft, size in zip(drafts.tolist(), sizes, strict=True)],
            [row[:size] for row, size in zip(uniforms, sizes, strict=True)],
            draw,
        )


def verify_speculative(
    target: Tensor,
    laws: Sequence[Tensor],
    drafts: Sequence[Sequence[int]],
    uniforms: Sequence[Sequence[float]],
    draw: Callable[[Tensor, list[int]], list[int]],
) -> list[Verdict]:
    """The verifier's verdicts; ``draw`` gets what each token behind a draft is drawn from, and the row it belongs to."""
    tokens = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int64)
    sizes = [len(draft) for draft in drafts]
    numbers = [number for own in uniforms for number in own]
    judged = verify.verify_speculative(target, torch.cat(list(laws)), tokens, sizes, numbers)
    found = zip(judged.kept.tolist(), drafts, draw(judged.weights, judged.rows.tolist()), strict=True)
    return [Verdict(kept, [*draft[:kept], token]) for kept, draft, token in found]


def single_pass_laws(draws: int) -> Tensor:
    return DRAFT.expand(draws, -1, -1)


# -- what must pass ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_test_accepts_plain_sampling_and_knows_the_law() -> None:
    """Calibration: sequences drawn token by token fit; against a table with one row off by a tenth they do not."""
    nothing = [
        Verdict(0, [token]) for token in race(TARGET[0].expand(DRAWS, -1), exponentials(DRAWS, V, seed=1)).tolist()
    ]
    sequences = complete(nothing, 2)
    assert chi_square_p(joint_counts(sequences, V), exact_law()) > 1e-3
    nudged = exact_law().view(V, -1).clone()
    nudged[4] *= 1.1
    assert chi_square_p(joint_counts(sequences, V), nudged / nudged.sum()) < 1e-4


def judge_slowly(draft: tuple[int, ...], target: Tensor, laws: Tensor) -> list[tuple[float, Tensor]]:
    """Block verification of one draft as the paper has it, in double precision: for each number of kept tokens its probability
    and the law of the token behind them; ``target [k + 1, V]``, ``laws [k, V]``."""
    level, found = 1.0, []
    for i in range(len(draft) + 1):
        if i:
            level = min(1.0, level * float(target[i - 1, draft[i - 1]] / laws[i - 1, draft[i - 1]]))
        if i == len(draft):
            found.append((level, target[i]))
            break
        residual = (level * target[i] - laws[i]).clamp_min(0)
        mass = float(residual.sum())
        found.append((1.0 if i == 0 else mass / (mass + 1 - level) if mass else 0.0, residual / max(mass, 1e-300)))
    weighted, longer = [], 1.0
    for chance, law in reversed(found):
        weighted.append((longer * chance, law))
        longer *= 1 - chance
    return weighted[::-1]


def test_block_verification_has_the_targets_law_exactly_and_keeps_more_than_token_by_token() -> None:
    """Every draft and every number of kept tokens, weighted: no chance involved."""
    law, kept, kept_by_token = torch.zeros(V, V, V, V, dtype=torch.double), 0.0, 0.0
    draft_law, tables = DRAFT.double(), [table.double() / table.double().sum(-1, keepdim=True) for table in TARGET]
    draft_law /= draft_law.sum(dim=-1, keepdim=True)
    full = exact_law().view(V, V, V, V)
    for draft in product(range(V), repeat=K):
        weight = float(torch.stack([draft_law[i, token] for i, token in enumerate(draft)]).prod())
        if weight == 0:
            continue
        rows = torch.stack([tables[i][code(torch.tensor([draft[:i]]).view(1, i).long())[0]] for i in range(LENGTH)])
        for count, (probability, behind) in enumerate(judge_slowly(draft, rows, draft_law)):
            kept += weight * probability * count
            for token in range(V):
                place = (*draft[:count], token)
                if (begun := float(full[place].sum())) > 0:
                    law[place] += weight * probability * float(behind[token]) * full[place] / begun
        ratios = [min(1.0, float(rows[i, token] / draft_law[i, token])) for i, token in enumerate(draft)]
        kept_by_token += weight * sum(np.cumprod(ratios))
    torch.testing.assert_close(law, full, atol=1e-12, rtol=1e-9)
    assert kept > kept_by_token + 0.01


@given(size=st.integers(0, 4), seed=st.integers(0, 10_000))
def test_the_verifier_keeps_what_the_slow_one_keeps(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target, laws = random_laws(size + 1, seed), random_laws(size, seed + 50)
    draft = tuple(torch.multinomial(laws, 1, generator=generator)[:, 0].tolist()) if size else ()
    weighted = judge_slowly(draft, target.double(), laws.double())
    assert sum(probability for probability, _ in weighted) == pytest.approx(1)
    seen: list[Tensor] = []

    def draw(weights: Tensor, rows: list[int]) -> list[int]:
        seen.append(weights[0] / weights[0].sum())
        return [0]

    longer = 0.0
    for count in range(size, -1, -1):  # uniforms that keep exactly so many: just above or below each chance
        probability, behind = weighted[count]
        if probability < 1e-6:
            continue
        uniforms = [1.0] * size
        if count:
            chance = probability / (1 - longer)
            uniforms[count - 1] = chance - 1e-6
            (verdict,) = verify_speculative(target, [laws], [list(draft)], [list(uniforms)], draw)
            assert verdict.accepted == count
            torch.testing.assert_close(seen[-1].double(), behind, atol=1e-5, rtol=1e-3)
            uniforms[count - 1] = chance + 1e-5
        (verdict,) = verify_speculative(target, [laws], [list(draft)], [uniforms], draw)
        assert verdict.accepted < max(count, 1) or chance + 1e-5 > 1
        longer += probability


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5), seed=st.integers(0, 10_000))
def test_many_drafts_at_once_are_judged_as_each_slowly(sizes: list[int], seed: int) -> None:
    """With target laws that have zeros, so that some drafts become impossible, and levels that fall and rise again."""
    generator = torch.Generator().manual_seed(seed)
    targets = [random_laws(size + 1, seed + 7 * i) for i, size in enumerate(sizes)]
    laws = [random_laws(size, seed + 50 + 7 * i) for i, size in enumerate(sizes)]
    drafts = [torch.multinomial(law, 1, generator=generator)[:, 0].tolist() if len(law) else [] for law in laws]
    uniforms = [torch.rand(size, generator=generator, dtype=torch.double).tolist() for size in sizes]
    expected, behind = [], []
    for target, law, draft, own in zip(targets, laws, drafts, uniforms, strict=True):
        kept, longer, weighted = 0, 0.0, judge_slowly(tuple(draft), target.double(), law.double())
        for count in range(len(draft), 0, -1):
            chance = weighted[count][0] / (1 - longer) if longer < 1 - 1e-9 else 0.0
            assume(abs(own[count - 1] - chance) > 1e-5)
            if own[count - 1] < chance:
                kept = count
                break
            longer += weighted[count][0]
        expected.append(kept)
        behind.append(weighted[kept][1] / weighted[kept][1].sum())
    seen: list[Tensor] = []

    def draw(weights: Tensor, rows: list[int]) -> list[int]:
        seen.append(weights.double() / weights.double().sum(dim=-1, keepdim=True))
        return [0] * len(rows)

    verdicts = verify_speculative(torch.cat(targets), laws, drafts, uniforms, draw)
    assert [verdict.accepted for verdict in verdicts] == expected
    torch.testing.assert_close(seen[0], torch.stack(behind), atol=1e-4, rtol=1e-3)


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5), seed=st.integers(0, 10_000))
def test_laws_of_the_drafted_tokens_alone_are_laws_of_all(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafted = torch.randperm(V, generator=generator)[: 1 + seed % V]
    few = torch.rand(sum(sizes), len(drafted), generator=generator)
    few /= few.sum(dim=-1, keepdim=True)
    whole = torch.zeros(len(few), V).index_copy_(1, drafted, few)
    tokens = drafted[torch.multinomial(few, 1, generator=generator)[:, 0]] if len(few) else drafted[:0]
    uniforms = torch.rand(len(few), generator=generator, dtype=torch.double).tolist()
    target = random_laws(len(few) + len(sizes), seed)
    expected = verify.verify_speculative(target, whole, tokens, sizes, uniforms)
    found = verify.verify_speculative(target, few, tokens, sizes, uniforms, drafted)
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_speculative_sampling_has_the_targets_law() -> None:
    verdicts = speculative(sample_single_pass(DRAWS, 3), single_pass_laws(DRAWS), 4)
    assert p_value(verdicts) > 1e-3
    assert {verdict.accepted for verdict in verdicts} == {0, 1, 2, 3}


@pytest.mark.slow
def test_ragged_lengths_decided_before_sampling_keep_the_law() -> None:
    """A truncation rule may look at the draft law, at earlier tokens, or at nothing: here at d₁ for d₂ and d₃."""
    drafts = sample_single_pass(BIASED_DRAWS, 5)
    lengths = torch.where(drafts[:, 0] == 0, 1, K)
    lengths[::7] = 0
    assert p_value(speculative(drafts, single_pass_laws(BIASED_DRAWS), 6, lengths)) > 1e-3


@pytest.mark.slow
def test_greedy_drafts_scored_as_point_masses_keep_the_law() -> None:
    drafts = DRAFT.argmax(dim=-1).expand(BIASED_DRAWS, -1)
    point_masses = torch.nn.functional.one_hot(drafts, V).float()
    assert p_value(speculative(drafts, point_masses, 7)) > 1e-3


def verify_each(choices: Tensor, drafts: Tensor) -> list[Verdict]:
    """``choices [N · (K + 1)]`` against ``drafts [N, K]``."""
    return [verify_choices(*pair) for pair in zip(choices.view(len(drafts), -1).tolist(), drafts.tolist(), strict=True)]


def match(drafts: Tensor, noise: Tensor) -> list[Verdict]:
    """Sample-and-match: row i of a request chooses with the noise of its position."""
    choices = race(target_rows(drafts), noise.flatten(0, 1))
    return verify_each(choices, drafts)


@pytest.mark.slow
def test_sample_and_match_has_the_targets_law_for_coupled_drafts() -> None:
    noise = exponentials(DRAWS, LENGTH, V, seed=8)
    drafts = race(single_pass_laws(DRAWS).reshape(-1, V), noise[:, :K].reshape(-1, V)).view(DRAWS, K)
    verdicts = match(drafts, noise)
    assert p_value(verdicts) > 1e-3  # each draft token knows the noise of its own position only
    assert p_value(verdicts, noise) > 1e-3
    accepted = torch.tensor([float(verdict.accepted > 0) for verdict in verdicts]).mean()
    independent = float((TARGET[0][0] * DRAFT[0]).sum())
    assert accepted > independent + 0.1, "the coupling is what makes matching fast"


@pytest.mark.slow
def test_sample_and_match_has_the_targets_law_for_multi_step_drafts() -> None:
    """Coupled: a position keeps its noise after a rejection, as in the engine."""
    noise = exponentials(DRAWS, LENGTH, V, seed=9)
    verdicts = match(sample_two_step(noise), noise)
    assert p_value(verdicts, noise) > 1e-3
    assert {verdict.accepted for verdict in verdicts} == {0, 1, 2, 3}


@pytest.mark.slow
def test_sample_and_match_has_the_targets_law_for_independent_multi_step_drafts() -> None:
    drafts = sample_two_step(exponentials(DRAWS, K, V, seed=22))
    verdicts = match(drafts, exponentials(DRAWS, LENGTH, V, seed=23))
    assert p_value(verdicts) > 1e-3
    assert {verdict.accepted for verdict in verdicts} == {0, 1, 2, 3}


@pytest.mark.slow
def test_sample_and_match_has_the_targets_law_for_an_adversarial_draft() -> None:
    """A draft that knows the target's choices and spoils some of them changes speed, not the law."""
    noise = exponentials(BIASED_DRAWS, LENGTH, V, seed=10)
    drafts = torch.zeros(BIASED_DRAWS, K, dtype=torch.long)
    for i in range(K):
        drafts[:, i] = race(TARGET[i][code(drafts[:, :i])], noise[:, i])
    drafts[:, 1] = torch.where(drafts[:, 0] == 2, (drafts[:, 1] + 1) % V, drafts[:, 1])
    assert p_value(match(drafts, noise), noise) > 1e-3


def test_greedy_verification_is_the_argmax_of_every_prefix() -> None:
    best = [table.argmax(dim=-1) for table in TARGET]
    answer: list[int] = []
    for i in range(LENGTH):
        answer.append(int(best[i][code(torch.tensor([answer], dtype=torch.long).view(1, i))[0]]))
    drafts = torch.tensor(list(product(range(V), repeat=K)))
    verdicts = verify_each(target_rows(drafts).argmax(dim=-1), drafts)
    for draft, verdict in zip(drafts.tolist(), verdicts, strict=True):
        right = next((i for i in range(K) if draft[i] != answer[i]), K)
        assert verdict.accepted == right
        assert verdict.token_ids == answer[: right + 1]


@given(pairs=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=4), bonus=st.integers(0, 2))
def test_choices_come_out_up_to_the_first_that_differs(pairs: list[tuple[int, int]], bonus: int) -> None:
    verdict = verify_choices([*(choice for _, choice in pairs), bonus], [draft for draft, _ in pairs])
    expected = []
    for draft, choice in [*pairs, (-1, bonus)]:
        expected.append(choice)
        if draft != choice:
            break
    assert verdict.token_ids == expected
    assert verdict.accepted == len(expected) - 1


@given(data=st.data(), sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_speculative_requests_do_not_mix(data: st.DataObject, sizes: list[int]) -> None:
    """A ragged call equals one call a request."""
    seed = data.draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    targets = [random_laws(size + 1, seed + i) for i, size in enumerate(sizes)]
    laws = [random_laws(size, seed + 50 + i) for i, size in enumerate(sizes)]
    drafts = [torch.multinomial(law, 1, generator=generator)[:, 0].tolist() if len(law) else [] for law in laws]
    uniforms = [torch.rand(size, generator=generator).tolist() for size in sizes]
    noise = torch.rand(sum(sizes) + len(sizes), V, generator=generator) + 0.01

    def drawer(offset: int) -> Callable[[Tensor, list[int]], list[int]]:
        return lambda probs, rows: race(probs, noise[[offset + row for row in rows]]).tolist()

    together = verify_speculative(torch.cat(targets), laws, drafts, uniforms, drawer(0))
    offset = 0
    for i, size in enumerate(sizes):
        alone = verify_speculative(targets[i], [laws[i]], [drafts[i]], [uniforms[i]], drawer(offset))
        assert together[i] == alone[0]
        offset += size + 1


def test_identical_laws_accept_everything() -> None:
    laws = random_laws(3, 0)
    drafts = laws[:2].argmax(dim=-1).tolist()
    (verdict,) = verify_speculative(laws, [laws[:2]], [drafts], [[1 - 1e-12] * 2], lambda probs, rows: [4])
    assert verdict == Verdict(2, [*drafts, 4])


def test_an_impossible_token_is_never_accepted() -> None:
    target = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    seen: list[Tensor] = []

    def draw(weights: Tensor, rows: list[int]) -> list[int]:
        seen.append(weights)
        return [1]

    (verdict,) = verify_speculative(target, [torch.tensor([[0.5, 0.5]])], [[0]], [[0.0]], draw)
    assert verdict == Verdict(0, [1])
    assert seen[0].tolist() == [[0, 0.5]]


# -- what must fail ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_soft_scoring_of_greedy_drafts_is_seen() -> None:
    drafts = DRAFT.argmax(dim=-1).expand(BIASED_DRAWS, -1)
    assert p_value(speculative(drafts, single_pass_laws(BIASED_DRAWS), 11)) < 1e-9


@pytest.mark.slow
def test_scoring_multi_step_drafts_with_marginals_is_seen() -> None:
    drafts = sample_two_step(exponentials(BIASED_DRAWS, K, V, seed=12))
    marginals = torch.stack([DRAFT[0], DRAFT[2] @ DRAFT_GIVEN_LAST, DRAFT[2]])
    counted = torch.stack([torch.bincount(drafts[:, i], minlength=V) / BIASED_DRAWS for i in range(K)])
    torch.testing.assert_close(counted, marginals, atol=0.015, rtol=0)  # each marginal is right; their product is not
    assert p_value(speculative(drafts, marginals.expand(BIASED_DRAWS, -1, -1), 13)) < 1e-9


@pytest.mark.slow
def test_scoring_multi_step_drafts_with_the_law_given_later_tokens_is_seen() -> None:
    drafts = sample_two_step(exponentials(BIASED_DRAWS, K, V, seed=14))
    laws = torch.stack(
        [DRAFT[:1].expand(BIASED_DRAWS, V), DRAFT_GIVEN_LAST[drafts[:, 2]], DRAFT[2:].expand(BIASED_DRAWS, V)], 1
    )
    assert p_value(speculative(drafts, laws, 15)) < 1e-9


@pytest.mark.slow
def test_truncation_that_peeks_at_the_sampled_token_is_seen() -> None:
    """Giving up a token because *its own* probability came out low."""
    drafts = sample_single_pass(BIASED_DRAWS, 16)
    own = DRAFT.expand(BIASED_DRAWS, -1, -1).gather(2, drafts[:, :, None])[:, :, 0]
    lengths = (own > 0.25).long().cumprod(dim=1).sum(dim=1)
    assert 0 < lengths.double().mean() < K
    assert p_value(speculative(drafts, single_pass_laws(BIASED_DRAWS), 17, lengths)) < 1e-9


@pytest.mark.slow
def test_drafts_from_another_temperature_than_scored_are_seen() -> None:
    hot = DRAFT.sqrt() / DRAFT.sqrt().sum(dim=-1, keepdim=True)
    drafts = race(hot.expand(BIASED_DRAWS, -1, -1).reshape(-1, V), exponentials(BIASED_DRAWS * K, V, seed=18))
    assert p_value(speculative(drafts.view(-1, K), single_pass_laws(BIASED_DRAWS), 19)) < 1e-9


@pytest.mark.slow
def test_coupled_multi_step_drafts_with_fresh_noise_after_a_rejection_are_seen() -> None:
    """The place where the draft stops then depends on noise that is thrown away."""
    noise = exponentials(BIASED_DRAWS, LENGTH, V, seed=24)
    assert p_value(match(sample_two_step(noise), noise), 25) < 1e-9


@pytest.mark.slow
def test_matching_with_choices_from_the_residual_is_seen() -> None:
    """Matching needs choices that are the target's own; a choice drawn from the residual after a mismatch is not."""
    noise = exponentials(BIASED_DRAWS, LENGTH, V, seed=20)
    drafts = sample_single_pass(BIASED_DRAWS, 21)
    rows = target_rows(drafts).view(BIASED_DRAWS, LENGTH, V).clone()
    laws = single_pass_laws(BIASED_DRAWS)
    residual = (rows[:, :K] - laws).clamp_min(0)
    rows[:, :K] = torch.where(residual.sum(-1, keepdim=True) > 0, residual, rows[:, :K])
    choices = race(rows.flatten(0, 1), noise.flatten(0, 1))
    assert p_value(verify_each(choices, drafts)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("reused", ["nothing", "draft noise", "verification noise"])
def test_noise_of_a_position_used_again_in_the_next_cycle_is_seen(reused: str) -> None:
    """The tokens behind the kept ones influenced how many were kept: their noise must not serve once more.

    Sequences of three coins, drafted two at a time from a biased coin.
    """
    fair, biased = torch.tensor([0.5, 0.5]), torch.tensor([0.8, 0.2])
    fresh = np.random.default_rng(15)
    of_positions = fresh.random((2, BIASED_DRAWS, 4))
    sequences: list[list[int]] = [[] for _ in range(BIASED_DRAWS)]
    while rows := [row for row, sequence in enumerate(sequences) if len(sequence) < 3]:
        noise = fresh.random((2, len(rows), 2))
        places = np.array([len(sequences[row]) for row in rows])[:, None] + [0, 1]
        for kind, name in enumerate(("draft noise", "verification noise")):
            if reused == name:
                noise[kind] = of_positions[kind][np.array(rows)[:, None], places]
        verdicts = verify_speculative(
            fair.expand(3 * len(rows), -1),
            [biased.expand(2, -1)] * len(rows),
            (noise[0] > float(biased[0])).astype(int).tolist(),
            list(torch.from_numpy(noise[1])),
            lambda laws, _: (torch.from_numpy(fresh.random(len(laws))) > laws[:, 0]).long().tolist(),
        )
        for row, verdict in zip(rows, verdicts, strict=True):
            sequences[row] += verdict.token_ids
    p = chi_square_p(joint_counts(torch.tensor([sequence[:3] for sequence in sequences]), 2), torch.full((8,), 1 / 8))
    assert p > 1e-3 if reused == "nothing" else p < 1e-9
