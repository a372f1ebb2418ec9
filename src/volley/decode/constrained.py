"""Drafts under constraints: made token by token, each row masked for the tokens before it.

The target's rows get the same masks (``decode/rules.py``). So every token of a draft is one that the target may choose, and for
speculative sampling q is the distribution that a token was really drawn from, given the tokens before it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volley.decode.rules import TokenRule, apply_rules, constraints, only_token
from volley.decode.sampling import Purpose, best_tokens, confidences, draft_temperature, draw, race, token_probs
from volley.decode.tree import CANDIDATES, coupled_logits, expand_freely
from volley.decode.work import Rule, Work
from volley.types import Proposal

Following = Callable[[int, int], Tensor]
"""``following(position, token)``: the drafter's logits ``[1, V]`` of a position after a token."""


def walk_constrained(following: Following, work: Work[Any], *, with_confidence: bool = False) -> Proposal:
    """A chain under all rules of the work's request. It is shorter where nothing may follow.

    Whether it ends at a position depends only on the tokens before, as speculative sampling demands.
    """
    request, ask = work.request, work.ask
    rules, params, noise, first = request.rules, request.params, request.noise, request.length
    tokens: list[int] = []
    distributions: list[Tensor] = []
    confidence: list[float] = []
    uniforms = noise.uniforms(Purpose.DRAFT, first, ask.positions)
    for position in range(ask.positions):
        logits = following(position, tokens[-1] if tokens else request.anchor)
        row = _row(logits, rules, tokens)
        if row is None:
            break
        if ask.rule is Rule.GREEDY:
            token = best_tokens(row)[0]
        else:
            probs = token_probs(row, params, draft_temperature(params))
            if ask.rule is Rule.MATCH:
                token = int(race(probs, noise.exponentials([first + position], row.shape[-1])))
            else:
                token = int(draw(probs, [uniforms[position]]))
                distributions.append(probs)
        if with_confidence:
            confidence += distributions[-1].amax(dim=-1).tolist() if distributions else confidences(row)
        tokens.append(token)
    return Proposal(tokens, torch.cat(distributions) if distributions else None, confidence=confidence)


def grow_constrained(following: Following, work: Work[Any]) -> Proposal:
    """A tree under all rules of the work's request, of at most so many nodes as are asked for."""
    request, ask = work.request, work.ask
    rules, params = request.rules, request.params
    temperature = draft_temperature(params) or 1.0

    def children(path: list[int]) -> list[tuple[int, float]]:
        row = _row(following(len(path), path[-1] if path else request.anchor), rules, path)
        if row is None:
            return []
        scores, tokens = coupled_logits(row, params, request.noise, request.length + len(path))[0].topk(
            min(CANDIDATES, row.shape[-1])
        )
        costs = -(scores.float() / temperature).log_softmax(dim=-1)
        return [(t, cost) for t, cost in zip(tokens.tolist(), costs.tolist(), strict=True) if cost < float("inf")]

    return expand_freely(children, ask.size, ask.positions)


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
