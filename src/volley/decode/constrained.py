"""Draft under constraints: token by token, with each row masked for the tokens before it.

The target's rows get the same masks (``decode/rules.py``). So a draft has only tokens that the target may choose. For
rejection sampling, q is exactly the distribution that each token was drawn from, given the tokens before it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from volley.decode.rules import Bits, Constraint, TokenRule, apply_rules, constraints, few_tokens, forced_tokens
from volley.decode.sampling import Purpose, confidences, draft_temperature, draw, race, token_probs
from volley.decode.tree import CANDIDATES, coupled_logits, expand_freely
from volley.decode.work import Proposal, Rule, Work
from volley.memory.upload import upload


class Following(NamedTuple):
    """A drafter's logits for the positions of a block, one after another."""

    logits: Callable[[int, int, Tensor | None], Tensor]
    """Call ``logits(position, token, among)`` for the logits after a token: ``[1, V]`` of all tokens, or ``[1, n]`` of the
    tokens ``among [n]``."""
    vocab_size: int
    is_stateful: bool
    """True if the drafter must be called at every position, because it reads all tokens."""
    best: Callable[[int, int, Bits], tuple[int, float] | None] | None = None
    """Call ``best(position, token, allowed)``, a faster path for the most likely allowed token after a token, and its
    probability among the allowed tokens. It returns ``None`` if none can be drafted."""


def walk_constrained(
    following: Following, work: Work[Any], device: torch.device, *, with_confidence: bool = False
) -> Proposal:
    """Draft a chain under all rules of the work's request, to be verified on ``device``. The chain ends early if no token may
    follow.

    Forced tokens are drafted without the drafter, even if its head lacks them. The length of the chain depends only on the
    tokens before its end, as rejection sampling requires.
    """
    request, spec = work.request, work.spec
    rules, params, noise, first = request.rules, request.params, request.noise, request.length
    tokens: list[int] = []
    distributions: list[Tensor | int] = []
    confidence: list[float] = []
    uniforms = noise.uniforms(Purpose.DRAFT, first, spec.positions)
    while (position := len(tokens)) < spec.positions:
        if forced := forced_tokens(rules, tokens, spec.positions - position):
            confidence += [1.0] * len(forced)
            distributions += forced
            for token in forced:
                if following.is_stateful:
                    following.logits(len(tokens), tokens[-1] if tokens else request.anchor, torch.tensor([token]))
                tokens.append(token)
            continue
        if spec.rule is Rule.GREEDY:
            chosen = _best(following, request.anchor, rules, tokens, with_confidence=with_confidence)
            if chosen is None:
                break
            token, sure = chosen
        else:
            found = _row(following, request.anchor, rules, tokens)
            if found is None:
                break
            row, among = found
            probs = token_probs(row, params, draft_temperature(params))
            if spec.rule is Rule.COUPLED:
                exponentials = noise.exponentials([first + position], following.vocab_size, probs.device)
                place = int(race(probs, columns(exponentials, among)))
            else:
                place = int(draw(probs, [uniforms[position]]))
                distributions.append(_widened(probs, among, following.vocab_size, 0.0))
            if with_confidence:
                sure = float(probs.amax() if spec.rule is Rule.REJECTION else confidences(row))
            token = place if among is None else int(among[place])
        if with_confidence:
            confidence.append(sure)
        tokens.append(token)
    probs_of_draft = _stacked(distributions, following.vocab_size) if spec.rule is Rule.REJECTION and tokens else None
    if probs_of_draft is not None and probs_of_draft.device != device:  # all tokens were forced, or rows were read
        probs_of_draft = upload(probs_of_draft.numpy(), device)
    return Proposal(tokens, probs_of_draft, confidence=confidence if with_confidence else [])


def _best(
    following: Following, anchor: int, rules: Sequence[TokenRule], path: Sequence[int], *, with_confidence: bool
) -> tuple[int, float] | None:
    """Return the most likely token after ``path`` under ``rules``, the first of equal ones, with its probability if asked for.

    ``None`` if no token can be drafted.
    """
    if following.best is not None and len(rules) == 1 and isinstance(rules[0], Constraint):
        mask = rules[0].mask(path)
        return None if mask is None else following.best(len(path), path[-1] if path else anchor, mask)
    found = _row(following, anchor, rules, path)
    if found is None:
        return None
    row, among = found
    logits = row[0].float().cpu().numpy()
    place = int(logits.argmax())
    sure = 1 / float(np.exp(logits - logits[place]).sum()) if with_confidence else 0.0
    return place if among is None else int(among[place]), sure


def _stacked(distributions: Sequence[Tensor | int], size: int) -> Tensor:
    """Stack distributions ``[1, size]``, or tokens that are certain, as rows ``[k, size]``."""
    like = next((own for own in distributions if isinstance(own, Tensor)), torch.empty(1, size))
    sure = torch.eye(1, dtype=like.dtype, device=like.device)
    return torch.cat(
        [own if isinstance(own, Tensor) else _widened(sure, torch.tensor([own]), size, 0.0) for own in distributions]
    )


def grow_constrained(following: Following, work: Work[Any]) -> Proposal:
    """Draft a tree under all rules of the work's request, within the work's draft spec."""
    request, spec = work.request, work.spec
    rules, params = request.rules, request.params
    temperature = draft_temperature(params) or 1.0

    def children(path: list[int]) -> list[tuple[int, float]]:
        if (found := _row(following, request.anchor, rules, path)) is None:
            return []
        row = _widened(*found, following.vocab_size, -torch.inf)
        scores, tokens = coupled_logits(row, params, request.noise, [request.length + len(path)])[0].topk(
            min(CANDIDATES, row.shape[-1])
        )
        costs = -(scores.float() / temperature).log_softmax(dim=-1)
        return [(t, cost) for t, cost in zip(tokens.tolist(), costs.tolist(), strict=True) if cost < float("inf")]

    return expand_freely(children, spec.size, spec.positions)


def columns(row: Tensor, among: Tensor | None) -> Tensor:
    """Return the entries of a row ``[1, V]`` for the tokens ``among [n]``, or for all."""
    return row if among is None else row[:, among.to(row.device)]


def _row(
    following: Following, anchor: int, rules: Sequence[TokenRule], path: Sequence[int]
) -> tuple[Tensor, Tensor | None] | None:
    """Return the drafter's row after ``path`` under ``rules``: ``[1, V]`` and ``None``, or, if few tokens are allowed, ``[1,
    n]`` and these tokens.

    The result is ``None`` if no token can be drafted.
    """
    masks = [constraint.mask(path) for constraint in constraints(rules)]
    if any(mask is None for mask in masks):
        return None
    few = [tokens for mask in masks if mask is not None and (tokens := few_tokens(mask)) is not None]
    among = torch.from_numpy(few[0]) if len(masks) == len(few) == 1 else None
    free = [rule for rule in rules if not isinstance(rule, Constraint)]
    before = path[-1] if path else anchor
    if among is not None and not free:
        row = following.logits(len(path), before, among).float()
    elif among is not None:
        row = columns(apply_rules(free, following.logits(len(path), before, None), [path]), among)
    else:
        row = apply_rules(rules, following.logits(len(path), before, None), [path])
    return (row, among) if bool(row.amax() > -torch.inf) else None


def _widened(row: Tensor, among: Tensor | None, size: int, others: float) -> Tensor:
    """Expand a row ``[1, n]`` over the tokens ``among`` to all tokens ``[1, V]``; the other entries are ``others``."""
    return row if among is None else row.new_full((1, size), others).index_copy_(1, among.to(row.device), row)
