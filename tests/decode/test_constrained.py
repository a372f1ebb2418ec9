"""Drafts under a constraint: each token by the rows of its own path, against a plain loop."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from volley import native
from volley.decode import constrained
from volley.decode.constrained import Following, columns, grow_constrained, walk_constrained
from volley.decode.rules import Bits, Constraint, TokenRule, allowed_choice, apply_rules, forced_tokens, make_rules
from volley.decode.sampling import PositionNoise, Purpose, draw, race, token_probs
from volley.decode.work import DraftSpec, Proposal, Rule, Shape, Work
from volley.native.sampling import allowed_best
from volley.params import SamplingParams

V, LEVELS = 20, 6
CPU = torch.device("cpu")


class Rising(Constraint):
    """Every token is larger than the one before, by at most three; only 12 follows 9, and nothing what is 11 or more."""

    def __init__(self) -> None:
        self.last = 0

    def take(self, token_id: int) -> None:
        self.last = token_id

    def allowed(self, path: Sequence[int]) -> list[int]:
        last = self.last
        for token in path:
            if token not in self.after(last):
                return []
            last = token
        return self.after(last)

    def after(self, last: int) -> list[int]:
        return [] if last >= 11 else [12] if last == 9 else list(range(last + 1, last + 4))

    def mask(self, path: Sequence[int]) -> Bits | None:
        bits = np.zeros(24, dtype=np.uint8)
        bits[self.allowed(path)] = 1
        return np.packbits(bits, bitorder="little") if bits.any() else None

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        count = 0
        while count < len(token_ids) and token_ids[count] in self.allowed(token_ids[:count]):
            count += 1
        return count


def masked(logits: Tensor, path: Sequence[int]) -> Tensor:
    """One row, from the definition; the slow reference."""
    allowed = Rising().allowed(path)
    return torch.tensor([float(x) if token in allowed else -torch.inf for token, x in enumerate(logits)])


def rows(seed: int) -> Tensor:
    return torch.randn(LEVELS, V, generator=torch.Generator().manual_seed(seed)) * 3


def asked(params: SamplingParams, seed: int, rules: Sequence[TokenRule], spec: DraftSpec) -> Work[Any]:
    request = SimpleNamespace(params=params, noise=PositionNoise(seed), rules=tuple(rules), anchor=0, length=40)
    return Work(request, spec)


def following(logits: Tensor) -> Following:
    return Following(lambda at, _, among: columns(logits[at : at + 1], among), V, False)


def looping(logits: Tensor) -> Following:
    """Draw with a loop in C that chooses."""
    return following(logits)._replace(best=lambda at, _, bits: allowed_best(logits[at], bits, with_chance=True))


def grown(logits: Tensor, params: SamplingParams, seed: int, count: int) -> Proposal:
    work = asked(params, seed, [Rising()], DraftSpec(Shape.TREE, Rule.COUPLED, count, LEVELS))
    return grow_constrained(following(logits), work)


def drafted(logits: Tensor, params: SamplingParams, rule: Rule, seed: int, rules: Sequence[TokenRule]) -> Proposal:
    work = asked(params, seed, rules, DraftSpec(Shape.CHAIN, rule, LEVELS, LEVELS))
    return walk_constrained(following(logits), work, CPU, with_confidence=True)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_a_chain_is_what_a_plain_loop_draws(rule: Rule, penalty: float) -> None:
    params = SamplingParams(temperature=float(rule is not Rule.GREEDY), top_p=0.9, frequency_penalty=penalty)
    ended = 0
    for seed in range(30):
        logits, noise, rules = rows(seed), PositionNoise(seed), make_rules(params, [], V, torch.device("cpu"))
        proposal = drafted(logits, params, rule, seed, [*rules, Rising()])
        path: list[int] = []
        for at, token in enumerate(proposal.token_ids):
            row = masked(apply_rules(rules, logits[at : at + 1], [path])[0], path)[None]
            probs = token_probs(row, params)
            match rule:
                case Rule.GREEDY:
                    expected, sure = int(row.argmax()), float(row.softmax(-1).amax())
                case Rule.COUPLED:
                    expected, sure = int(race(probs, noise.exponentials([40 + at], V))), float(row.softmax(-1).amax())
                case Rule.REJECTION:
                    uniforms = noise.uniforms(Purpose.DRAFT, 40, LEVELS)
                    expected, sure = int(draw(probs, [uniforms[at]])), float(probs.amax())
                    assert proposal.draft_probs is not None
                    torch.testing.assert_close(proposal.draft_probs[at], probs[0])
            assert token == expected
            assert proposal.confidence[at] == pytest.approx(sure, rel=1e-4)
            path.append(token)
        assert (proposal.draft_probs is None) == (rule is not Rule.REJECTION or not path)
        ended += len(path) < LEVELS
        assert len(path) == LEVELS or not Rising().allowed(path)
    assert ended, "some chains ended where nothing may follow"


@pytest.mark.skipif(not native.is_built, reason="the loop is in C")
def test_a_loop_that_looks_at_allowed_tokens_alone_drafts_the_same() -> None:
    for seed in range(10):
        logits = rows(seed).bfloat16()
        logits[2, 5:] = -torch.inf  # what the drafter cannot say
        work = asked(SamplingParams(), seed, [Rising()], DraftSpec(Shape.CHAIN, Rule.GREEDY, LEVELS, LEVELS))
        found, expected = (
            walk_constrained(own, work, CPU, with_confidence=True) for own in (looping(logits), following(logits))
        )
        assert found.token_ids == expected.token_ids
        assert found.confidence == pytest.approx(expected.confidence, rel=1e-5)


def test_a_forced_token_is_drafted_even_if_the_drafter_cannot_say_it() -> None:
    logits = torch.full((LEVELS, V), -torch.inf)
    for at, token in enumerate((3, 6, 9)):
        logits[at, token] = 1.0
    proposal = drafted(logits, SamplingParams(temperature=1.0), Rule.REJECTION, 0, [Rising()])
    assert proposal.token_ids == [3, 6, 9, 12]
    assert proposal.draft_probs is not None
    assert proposal.draft_probs[3].tolist() == [float(token == 12) for token in range(V)]


def test_distributions_of_certain_tokens_go_where_they_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of the drafter, which is there, says where that is."""
    sent = list[torch.device]()
    monkeypatch.setattr(constrained, "upload", lambda array, device: sent.append(device) or torch.from_numpy(array))
    only = Rising()
    monkeypatch.setattr(constrained, "forced_tokens", lambda rules, path, most: [3, 6, 9, 12][len(path) :][:most])
    work = asked(SamplingParams(temperature=1.0), 0, [only], DraftSpec(Shape.CHAIN, Rule.REJECTION, LEVELS, LEVELS))
    elsewhere = torch.device("cuda", 0)
    proposal = walk_constrained(following(torch.zeros(LEVELS, V)), work, elsewhere)
    assert proposal.token_ids == [3, 6, 9, 12]
    assert sent == [elsewhere]


def test_a_drafter_with_a_state_reads_forced_tokens_and_others_are_not_asked() -> None:
    for is_stateful in (True, False):
        asked_at: list[tuple[int, int]] = []

        def logits(at: int, token: int, among: Tensor | None, asked_at: list[tuple[int, int]] = asked_at) -> Tensor:
            asked_at.append((at, token))
            return columns(torch.zeros(1, V).index_fill(1, torch.tensor([3, 6, 9]), 1.0), among)

        work = asked(SamplingParams(), 0, [Rising()], DraftSpec(Shape.CHAIN, Rule.GREEDY, LEVELS, LEVELS))
        assert walk_constrained(Following(logits, V, is_stateful), work, CPU).token_ids == [3, 6, 9, 12]
        assert asked_at == [(0, 0), (1, 3), (2, 6), (3, 9)][: 3 + is_stateful]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_node_of_a_tree_is_allowed_and_the_best_paths_are_there(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    for seed in range(10):
        logits = rows(seed)
        tree = grown(logits, params, seed, 12)
        assert len(tree.token_ids) == 12
        assert tree.parents is not None
        paths: list[list[int]] = [[]]
        for token, parent in zip(tree.token_ids, tree.parents, strict=True):
            paths.append([*paths[parent], token])
            assert token in Rising().allowed(paths[parent])
        assert len(set(map(tuple, paths))) == 13
        greedy = drafted(logits, params, Rule.COUPLED if temperature else Rule.GREEDY, seed, [Rising()]).token_ids
        assert max(len(path) for path in paths if path == greedy[: len(path)]) >= 2


def test_small_trees_are_the_beginnings_of_larger_ones() -> None:
    logits = rows(3)

    def nodes(count: int) -> set[tuple[int, ...]]:
        tree = grown(logits, SamplingParams(), 3, count)
        assert tree.parents is not None
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.token_ids, tree.parents, strict=True):
            paths.append((*paths[parent], token))
        return set(paths[1:])

    assert [len(nodes(count)) for count in (0, 1, 5)] == [0, 1, 5]
    assert nodes(3) < nodes(7) < nodes(15)


def test_choices_under_a_mask_are_the_largest_allowed_logits() -> None:
    for seed in range(20):
        logits = rows(seed).round()  # with ties
        paths: list[tuple[int, ...]] = [(), (1,), (2, 5), (3, 6, 9), (19,), (3, 6, 9, 12, 15, 18)]
        best = logits.argmax(dim=-1).tolist()
        for row, path, top in zip(logits, paths, best, strict=True):
            expected = int(masked(row, path).argmax()) if Rising().allowed(path) else top
            assert allowed_choice([Rising()], row, top, path) == expected
            assert allowed_choice([Rising()], row.bfloat16(), top, path) == expected


def test_rows_behind_a_forbidden_token_stay_as_they_are() -> None:
    logits = rows(0)
    got = apply_rules([Rising()], logits, [(), (5,), (5, 6), (3,), (17,), (1, 1)])
    assert [bool(same.all()) for same in got == logits] == [False, True, True, False, True, True]


def test_forced_tokens_end_where_there_is_a_choice() -> None:
    rule = Rising()
    assert forced_tokens([rule], [], 5) == []
    rule.take(9)
    assert forced_tokens([rule], [], 5) == [12]
    assert forced_tokens([rule], [], 0) == []
    assert forced_tokens([], [], 5) == []
    assert forced_tokens([Rising()], [3, 6, 9], 5) == [12]
