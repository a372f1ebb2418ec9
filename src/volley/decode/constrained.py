"""Drafts under constraints: made token by token, each row masked for the tokens before it.

The target's rows get the same masks (``decode/rules.py``). So every token of a draft is one that the target may choose, and for
speculative sampling q is the distribution that a token was really drawn from, given the tokens before it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from volley.decode.sampling import draft_temperature
from volley.decode.rules import TokenRule, apply_rules, constraints, only_token
from volley.decode.sampling import Purpose, best_tokens, confidences, draw, race, token_probs
from volley.decode.tree import CANDIDATES, coupled_logits, expand_freely
from volley.decode.walk import Block
from volley.decode.work import Rule
from volley.types import Proposal, SamplingParams

Following = Callable[[int, int], Tensor]
"""``following(position, token)``: the drafter's logits ``[1, V]`` of a position after a token."""


def walk_constrained(
    following: Following,
    rules: Sequence[TokenRule],
    block: Block,
    params: SamplingParams,
    rule: Rule,
    *,
    with_confidence: bool = False,
) -> Proposal:
    """A chain under all ``rules`` for verification by ``rule``. It is shorter where nothing may follow.

    Whether it ends at a position depends only on the tokens before, as speculative sampling demands.
    """
    tokens: list[int] = []
    distributions: list[Tensor] = []
    confidence: list[float] = []
    uniforms = block.noise.uniforms(Purpose.DRAFT, block.first, block.positions)
    for position in range(block.positions):
        logits = following(position, tokens[-1] if tokens else block.anchor)
        row = _row(logits, rules, tokens)
        if row is None:
            break
        if rule is Rule.GREEDY:
            token = best_tokens(row)[0]
        else:
            probs = token_probs(row, params, draft_temperature(params))
            if rule is Rule.MATCH:
                token = int(race(probs, block.noise.exponentials([block.first + position], row.shape[-1])))
            else:
                token = int(draw(probs, [uniforms[position]]))
                distributions.append(probs)
        if with_confidence:
            confidence += distributions[-1].amax(dim=-1).tolist() if distributions else confidences(row)
        tokens.append(token)
    return Proposal(tokens, torch.cat(distributions) if distributions else None, confidence=confidence)


def grow_constrained(
    following: Following, rules: Sequence[TokenRule], block: Block, params: SamplingParams, num_nodes: int
) -> Proposal:
    """A tree of at most ``num_nodes`` nodes under all ``rules``."""
    temperature = draft_temperature(params) or 1.0

    def children(path: list[int]) -> list[tuple[int, float]]:
        row = _row(following(len(path), path[-1] if path else block.anchor), rules, path)
        if row is None:
            return []
        scores, tokens = coupled_logits(row, params, block.noise, block.first + len(path))[0].topk(
            min(CANDIDATES, row.shape[-1])
        )
        costs = -(scores.float() / temperature).log_softmax(dim=-1)
        return [(t, cost) for t, cost in zip(tokens.tolist(), costs.tolist(), strict=True) if cost < float("inf")]

    return expand_freely(children, num_nodes, block.positions)


def _row(logits: Tensor, rules: Sequence[TokenRule], path: Sequence[int]) -> Tensor | None:
    """``logits [1, V]`` under ``rules`` after ``path``, or ``None`` where no token can be drafted.

    A forced token has the only logit, so it is drafted even where the drafter's head does not cover it.
    """
    for constraint in constraints(rules):
        mask = constraint.mask(path)
        if mask is None:
            return None
        if (token := only_token(mask)) is not None:
            return torch.full_like(logits, -torch.inf, dtype=torch.float32).index_fill_(
                -1, torch.tensor([token], device=logits.device), 0.0
            )
    row = apply_rules(rules, logits, [path])
    return row if bool(row.amax() > -torch.inf) else None
