"""What of a draft survives: verifiers, each exactly lossless, each a pure function over ragged rows.

A request with k draft tokens owns k + 1 consecutive rows of target distributions. Row i is that of the token after the anchor and
i draft tokens. Losslessness conditions are in each docstring; a verifier must not be used outside its own.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, islice

import numpy as np
import torch
from torch import Tensor

from volley.types import Verdict

Draw = Callable[[Tensor, list[int]], list[int]]
"""``draw(weights [n, V], rows)`` samples one token from each of ``weights``, which need not add up to 1; ``rows`` says whose row
each is."""


def verify_choices(choices: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[Verdict]:
    """Keep draft tokens while they are what the target chose itself; the first other choice is the bonus.

    ``choices`` holds one token a row. With ``choices = argmax`` this is greedy verification. With choices *sampled* from
    the target's distribution it is sample-and-match, lossless for any draft whatsoever: what is emitted is always the choice. A
    draft that knows the noise of the choices (``propose_coupled``) needs that noise to belong to positions: a position
    must be chosen with the same noise again after a rejection before it, or where a draft fails would bias what follows.
    """
    verdicts, row = [], 0
    for draft in drafts:
        mine, accepted = choices[row : row + len(draft) + 1], 0
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
    path, emitted = list[int](), [choose(0, 0)]
    while (node := children.get((path[-1] if path else 0, emitted[-1]))) is not None:
        path.append(node)
        emitted.append(choose(node, len(path)))
    return Verdict(len(path), emitted, tuple(path))


def verify_speculative(
    target_probs: Tensor,
    draft_probs: Sequence[Tensor],
    drafts: Sequence[Sequence[int]],
    uniforms: Sequence[Sequence[float]],
    draw: Draw,
) -> list[Verdict]:
    """Block verification (Sun et al. 2024, arXiv 2403.10444): keep the longest beginning of a draft that may be kept, then draw
    the token behind it from what the target has left over.

    The first i tokens of a draft have the level ``l_i = min(1, l_{i−1} · p(d_i) / q(d_i))``, ``l_0 = 1``. All k are kept with
    probability ``l_k``; otherwise the first i, if nothing longer is, with ``s_i / (s_i + 1 − l_i)``, where ``s_i`` is the sum of
    ``(l_i · p − q)⁺`` over the tokens that may follow, one of which is then drawn in proportion to it. On average no fewer are
    kept than by judging one token after the other with ``min(1, p / q)``.

    Lossless only if ``draft_probs[i] [k, V]`` is the distribution that each token of ``drafts[i]`` was drawn from, given the
    tokens before it, after temperature and truncation, and if no noise of the draft or of ``uniforms[i] [k]`` serves another
    cycle: what came behind the kept tokens had a say. A rule that ends a draft may look at the tokens before. ``target_probs`` is
    ``[R, V]``.
    """
    sizes = [len(draft) for draft in drafts]
    starts = np.cumsum([0, *(size + 1 for size in sizes)]).tolist()
    rows = [start + i for start, size in zip(starts, sizes, strict=False) for i in range(size)]
    tokens = [token for draft in drafts for token in draft]
    distributions = torch.cat(list(draft_probs)) if tokens else target_probs[:0]
    ratios = (target_probs[rows, tokens].double() / distributions[range(len(tokens)), tokens].double()).tolist()
    upcoming = iter(ratios)
    levels = [
        list(accumulate(islice(upcoming, size), lambda level, ratio: min(1.0, level * ratio), initial=1.0))
        for size in sizes
    ]
    before = torch.tensor([level for own in levels for level in own[:-1]], dtype=target_probs.dtype)
    surplus = target_probs[rows].mul_(before[:, None].to(target_probs.device)).sub_(distributions).clamp_min_(0)
    masses = surplus.sum(dim=-1).tolist()

    accepted, cut, behind = [], [], []  # drafts that were cut, and the rows of what is left over there
    for index, (size, own) in enumerate(zip(sizes, levels, strict=True)):
        first = starts[index] - index  # the first token's row among those of all draft tokens
        kept = _kept(own, masses[first : first + size], uniforms[index])
        accepted.append(kept)
        if kept < size and masses[first + kept] > 0:
            cut.append(index)
            behind.append(first + kept)
    final_rows = [start + kept for start, kept in zip(starts, accepted, strict=False)]
    finals = target_probs[final_rows]
    if cut:
        finals[cut] = surplus[behind]
    bonus = draw(finals, final_rows)
    return [Verdict(kept, [*draft[:kept], token]) for kept, draft, token in zip(accepted, drafts, bonus, strict=True)]


def _kept(levels: Sequence[float], masses: Sequence[float], uniforms: Sequence[float]) -> int:
    """How many tokens of a draft are kept; ``masses`` are ``s_0 … s_{k−1}``."""
    for count in range(len(uniforms), 0, -1):
        level = chance = levels[count]
        if count < len(masses):
            chance = masses[count] / (masses[count] + 1 - level) if masses[count] > 0 else 0.0
        if uniforms[count - 1] < chance:
            return count
    return 0


def kept_rows(num_known: int, verdict: Verdict, start: int = 0, skip: int = 0) -> slice | Tensor:
    """Rows of a segment from ``start`` that stay: its known tokens and what was accepted, without the first ``skip``."""
    if verdict.path is None:
        return slice(start + skip, start + num_known + verdict.accepted)
    assert num_known == 1, "a tree's root is the anchor"
    return torch.tensor([start, *(start + node for node in verdict.path)][skip:])
