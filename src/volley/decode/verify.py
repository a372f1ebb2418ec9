"""Decide how many tokens of a draft are accepted. Each verifier is a pure function, and lossless under the conditions it
states.

A draft of k tokens has k + 1 rows of the target's distributions. Row i belongs to the token after the anchor and i draft
tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from volley.decode.sampling import Numbers
from volley.decode.work import Verdict
from volley.memory.upload import upload_together


def verify_choices(choices: Sequence[int], draft: Sequence[int]) -> Verdict:
    """Accept draft tokens while they equal the target's ``choices``, one a row; the first differing choice is the bonus token.

    With ``choices = argmax`` this is greedy verification. With choices *sampled* from the target's distribution it is coupled
    sampling, which is lossless for any draft, because only choices are emitted. If the draft uses the noise of the choices
    (``propose_coupled``), that noise must belong to positions: after a rejection, later positions must be chosen with the same
    noise again. Otherwise the position where a draft fails would bias the tokens that follow.
    """
    accepted = 0
    while accepted < len(draft) and draft[accepted] == choices[accepted]:
        accepted += 1
    return Verdict(accepted, list(choices[: accepted + 1]))


def verify_tree(choose: Callable[[int, int], int], tokens: Sequence[int], parents: Sequence[int]) -> Verdict:
    """Walk down a draft tree (see ``Proposal.parents``) along the target's choices, until no child is the choice.

    ``choose(node, depth)`` is the target's choice after ``node``, which is ``depth`` tokens after the anchor; it is called
    only for nodes that the walk reaches. The walk is lossless for any tree, under the conditions of :func:`verify_choices`.
    Accepting with ``min(1, p / q)`` would not be lossless: the tokens of a best-first tree are not drawn from q.
    """
    children = {family: node for node, family in enumerate(zip(parents, tokens, strict=True), start=1)}
    path, emitted = list[int](), [choose(0, 0)]
    while (node := children.get((path[-1] if path else 0, emitted[-1]))) is not None:
        path.append(node)
        emitted.append(choose(node, len(path)))
    return Verdict(len(path), emitted, tuple(path))


class Judged(NamedTuple):
    """Result of block verification of n drafts, on the device of the distributions."""

    kept: Tensor
    """Number of accepted tokens of each draft ``[n]``."""
    rows: Tensor
    """Row of the target's distributions for the bonus token ``[n]``."""
    weights: Tensor
    """Weights ``[n, V]`` that the bonus token is drawn from; they need not add up to 1."""


def verify_speculative(
    target_probs: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    sizes: Sequence[int],
    uniforms: Numbers,
    drafted: Tensor | None = None,
) -> Judged:
    """Accept the longest acceptable prefix of each draft by block verification (Sun et al. 2024, arXiv 2403.10444).

    The next token is drawn from the residual distribution. The host reads nothing.

    The first i tokens of a draft have the level ``l_i = min(1, l_{i−1} · p(d_i) / q(d_i))``, ``l_0 = 1``. All k are accepted
    with probability ``l_k``. Otherwise the first i are accepted, if no longer prefix is, with probability ``s_i / (s_i + 1 −
    l_i)``. Here ``s_i`` is the sum of ``(l_i · p − q)⁺`` over the possible next tokens, and the next token is drawn in
    proportion to that. On average at least as many tokens are accepted as by judging token after token with ``min(1, p / q)``.

    The result is lossless under two conditions. First, each of ``tokens [Σ k]`` was drawn from its row of ``draft_probs [Σ k,
    n]``, given the tokens before it, after temperature and truncation; the rows cover the tokens ``drafted [n]`` or all.
    Second, no noise of the draft, or of ``uniforms [Σ k]``, is used by another cycle, because rejected tokens influence the
    accepted count. A rule that ends a draft may depend on the tokens before its end.

    A row of NaN, of the target or of the draft, counts as a distribution of the target whose only token is never drafted. So
    the draft is accepted up to that row at most; if it is, the weights are NaN.

    ``sizes [n]`` are the numbers of tokens of the drafts, and ``target_probs`` is ``[Σ (k + 1), V]``.
    """
    count, total, longest = len(sizes), sum(sizes), max(sizes)
    lengths = np.array(sizes, dtype=np.int64)
    firsts = lengths.cumsum() - lengths  # first token of each draft, among all tokens
    starts = firsts + np.arange(count)  # first row of each draft, among the target's rows
    if not total:
        none = torch.zeros(count, dtype=torch.int64, device=target_probs.device)
        return Judged(none, torch.arange(count, device=target_probs.device), target_probs)
    owner = np.arange(count).repeat(lengths)
    place = np.arange(total) - firsts[owner]
    table = np.full((count, longest), total)  # from [draft, place] to the token; missing tokens have one index more
    table[owner, place] = np.arange(total)
    arrays = [starts[owner] + place, owner * longest + place, table, lengths, firsts, starts]
    own_uniforms = np.array(uniforms, dtype=np.float64).view(np.int64)
    rows, cells, grid, lengths_, firsts_, starts_, bits = upload_together([*arrays, own_uniforms], target_probs.device)

    surplus = target_probs.index_select(0, rows)
    places = tokens[:, None] if drafted is None else (tokens[:, None] == drafted).byte().argmax(dim=1, keepdim=True)
    ratios = (surplus.gather(1, tokens[:, None]).double() / draft_probs.gather(1, places).double())[:, 0]
    levels = _levels(_table(ratios.nan_to_num(nan=0.0, posinf=1e300).log(), grid))
    before = torch.cat([torch.ones_like(levels[:, :1]), levels[:, :-1]], dim=1).flatten().index_select(0, cells)
    surplus.mul_(before.to(surplus.dtype)[:, None])
    if drafted is None:
        surplus.sub_(draft_probs)
    else:
        surplus.scatter_add_(1, drafted.expand(total, -1), draft_probs.neg())
    surplus.clamp_min_(0)
    masses = surplus.sum(dim=-1).double()
    masses = torch.where(masses.isnan(), before, masses)

    left = torch.cat([_table(masses, grid)[:, 1:], torch.zeros_like(levels[:, :1])], dim=1)  # s_1 … s_k
    number = torch.arange(1, longest + 1, device=levels.device)
    chances = torch.where(number == lengths_[:, None], levels, left / (left + 1 - levels))  # 0 / 0 keeps nothing
    keeps = (_table(bits.view(torch.float64), grid) < chances) & (number <= lengths_[:, None])
    kept = (keeps * number).amax(dim=1)
    behind = (firsts_ + kept).clamp_max(total - 1)
    is_cut = (kept < lengths_) & (masses.index_select(0, behind) > 0)
    final = starts_ + kept
    weights = torch.where(is_cut[:, None], surplus.index_select(0, behind), target_probs.index_select(0, final))
    return Judged(kept, final, weights)


def _levels(logs: Tensor) -> Tensor:
    """Compute ``l_1 … l_k`` from the log-ratios ``[n, k]``: with S their cumulative sums, ``log l_i = S_i − max(0, S_1, …,
    S_i)``."""
    sums = logs.cumsum(dim=1)
    return (sums - sums.cummax(dim=1).values.clamp_min(0)).exp()


def _table(values: Tensor, grid: Tensor) -> Tensor:
    """Arrange ``values [Σ k]`` as a table ``[n, k]`` of drafts; 0 if a draft has no token there."""
    return torch.cat([values, values.new_zeros(1)])[grid]
