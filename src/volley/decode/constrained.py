"""Drafts under constraints: made token by token, each row masked for the tokens before it.

The target's rows get the same masks (``decode/rules.py``). So every token of a draft is one that the target may choose, and for
speculative sampling q is the distribution that a token was really drawn from, given the tokens before it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volley.decode.rules import Constraint, TokenRule, apply_rules, constraints, few_tokens
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
        found = _row(logits, rules, tokens)
        if found is None:
            break
        row, among = found
        if ask.rule is Rule.GREEDY:
            place = best_tokens(row)[0]
        else:
            probs = token_probs(row, params, draft_temperature(params))
            if ask.rule is Rule.MATCH:
                exponentials = noise.exponentials([first + position], logits.shape[-1])
                place = int(race(probs, exponentials if among is None else exponentials[:, among]))
            else:
                place = int(draw(probs, [uniforms[position]]))
                distributions.append(_widened(probs, among, logits.shape[-1], 0.0))
        if with_confidence:
            confidence += probs.amax(dim=-1).tolist() if ask.rule is Rule.SPECULATIVE else confidences(row)
        tokens.append(place if among is None else int(among[place]))
    return Proposal(tokens, torch.cat(distributions) if distributions else None, confidence=confidence)


def grow_constrained(following: Following, work: Work[Any]) -> Proposal:
    """A tree under all rules of the work's request, of at most so many nodes as are asked for."""
    request, ask = work.request, work.ask
    rules, params = request.rules, request.params
    temperature = draft_temperature(params) or 1.0

    def children(path: list[int]) -> list[tuple[int, float]]:
        logits = following(len(path), path[-1] if path else request.anchor)
        if (found := _row(logits, rules, path)) is None:
            return []
        row = _widened(*found, logits.shape[-1], -torch.inf)
        scores, tokens = coupled_logits(row, params, request.noise, request.length + len(path))[0].topk(
            min(CANDIDATES, row.shape[-1])
        )
        costs = -(scores.float() / temperature).log_softmax(dim=-1)
        return [(t, cost) for t, cost in zip(tokens.tolist(), costs.tolist(), strict=True) if cost < float("inf")]

    return expand_freely(children, ask.size, ask.positions)


def _row(logits: Tensor, rules: Sequence[TokenRule], path: Sequence[int]) -> tuple[Tensor, Tensor | None] | None:
    """``logits [1, V]`` under ``rules`` after ``path``; of few allowed tokens ``[n]`` only theirs, ``[1, n]``, and the tokens.

    ``None`` where no token can be drafted. A forced token is drafted even where the drafter's head does not cover it.
    """
    masks = [constraint.mask(path) for constraint in constraints(rules)]
    if any(mask is None for mask in masks):
        return None
    few = [tokens for mask in masks if mask is not None and (tokens := few_tokens(mask)) is not None]
    if (forced := next((tokens for tokens in few if len(tokens) == 1), None)) is not None:
        return torch.zeros(1, 1), torch.from_numpy(forced)
    if len(masks) == len(few) == 1:
        among = torch.from_numpy(few[0])
        free = [rule for rule in rules if not isinstance(rule, Constraint)]
        row = (apply_rules(free, logits, [path]) if free else logits)[:, among.to(logits.device)].float()
    else:
        among, row = None, apply_rules(rules, logits, [path])
    return (row, among) if bool(row.amax() > -torch.inf) else None


def _widened(row: Tensor, among: Tensor | None, size: int, others: float) -> Tensor:
    """A row ``[1, n]`` of few tokens as one of all ``[1, V]``, in which all others have the value ``others``."""
    return row if among is None else row.new_full((1, size), others).index_copy_(1, among.to(row.device), row)
