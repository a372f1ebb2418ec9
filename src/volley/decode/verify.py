"""What of a draft survives: verifiers, each exactly lossless, each a pure function over ragged rows.

A request with k draft tokens owns k + 1 consecutive rows of target distributions: row i is the law of the token after the
anchor and i draft tokens. Losslessness conditions are in each docstring; a verifier must not be used outside its own.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from volley.types import Verdict

Draw = Callable[[Tensor, list[int]], list[int]]
"""``draw(probs [n, V], rows)`` samples one token from each of ``probs``; ``rows`` says whose row each is."""


def verify_choices(choices: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[Verdict]:
    """Keep draft tokens while they are what the target chose itself; the first other choice is the bonus.

    ``choices`` holds one token a row. With ``choices = argmax`` this is greedy verification. With choices *sampled* from
    the target's law it is sample-and-match, lossless for any draft whatsoever: what is emitted is always the choice. A
    draft that knows the noise of the choices (``propose_coupled``) needs that noise to belong to positions: a position
    must be chosen with the same noise again after a rejection before it, or where a draft fails would bias what follows.
    """
    verdicts = []
    row = 0
    for draft in drafts:
        mine = choices[row : row + len(draft) + 1]
        accepted = 0
        while accepted < len(draft) and draft[accepted] == mine[accepted]:
            accepted += 1
        verdicts.append(Verdict(accepted, list(mine[: accepted + 1])))
        row += len(draft) + 1
    return verdicts


def verify_tree(choose: Callable[[int, int], int], tokens: Sequence[int], parents: Sequence[int]) -> Verdict:
    """Walk a draft tree (see ``Proposal.parents``): on to the child that is the target's own choice, until there is none.

    ``choose(node, depth)`` is that choice after ``node``, ``depth`` tokens after the anchor; it is asked only for nodes the
    walk reaches. Lossless for any tree, under the conditions of :func:`verify_choices`. ``min(1, p / q)`` is not: which
    tokens a best-first tree holds is no draw from q.
    """
    children = {family: node for node, family in enumerate(zip(parents, tokens, strict=True), start=1)}
    path: list[int] = []
    emitted: list[int] = []
    node: int | None = 0
    while node is not None:
        emitted.append(choose(node, len(path)))
        node = children.get((node, emitted[-1]))
        if node is not None:
            path.append(node)
    return Verdict(len(path), emitted, tuple(path))


def verify_speculative(
    target_probs: Tensor,
    draft_probs: Sequence[Tensor],
    drafts: Sequence[Sequence[int]],
    uniforms: Sequence[Tensor],
    draw: Draw,
) -> list[Verdict]:
    """Speculative sampling (Leviathan et al. 2023): accept d with ``min(1, p(d) / q(d))``, else draw from ``(p − q)⁺``.

    Lossless only if ``draft_probs[i] [k, V]`` is the law each token of ``drafts[i]`` was really drawn from given the ones
    before it, after temperature and truncation. ``target_probs`` is ``[R, V]``; ``uniforms[i]`` is ``[k]``.
    """
    sizes = [len(draft) for draft in drafts]
    starts = np.cumsum([0, *(size + 1 for size in sizes)]).tolist()
    kept = _kept(target_probs, draft_probs, drafts, uniforms, starts)
    accepted = []
    row = 0
    for size in sizes:
        accepted.append(next((i for i in range(size) if not kept[row + i]), size))
        row += size
    final_rows = [start + count for start, count in zip(starts, accepted, strict=False)]
    finals = target_probs[final_rows]
    if rejected := [i for i, size in enumerate(sizes) if accepted[i] < size]:
        residual = finals[rejected] - torch.stack([draft_probs[i][accepted[i]] for i in rejected])
        total = residual.clamp_min_(0).sum(dim=-1, keepdim=True)
        finals[rejected] = torch.where(total > 0, residual / total, finals[rejected])
    bonus = draw(finals, final_rows)
    return [
        Verdict(count, [*draft[:count], token]) for count, draft, token in zip(accepted, drafts, bonus, strict=True)
    ]


def _kept(
    target_probs: Tensor,
    draft_probs: Sequence[Tensor],
    drafts: Sequence[Sequence[int]],
    uniforms: Sequence[Tensor],
    starts: Sequence[int],
) -> list[bool]:
    """For each draft token of all requests whether ``u · q < p``."""
    tokens = [token for draft in drafts for token in draft]
    if not tokens:
        return []
    rows = [start + i for start, draft in zip(starts, drafts, strict=False) for i in range(len(draft))]
    p = target_probs[rows, tokens].double()
    q = torch.cat([law[range(len(draft)), draft] for law, draft in zip(draft_probs, drafts, strict=True)]).double()
    kept: list[bool] = (torch.cat(list(uniforms)).to(p.device) * q < p).tolist()
    return kept
