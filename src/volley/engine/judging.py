"""What of each draft survives: from the target's logits to verdicts, every request by the verifier that is lossless for it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from volley.decode.processors import preceding, process
from volley.decode.sampling import (
    PositionNoise,
    Purpose,
    best_tokens,
    chosen_logprobs,
    draw,
    race,
    token_probs,
    top_logprobs,
)
from volley.decode.verify import verify_choices, verify_speculative, verify_tree
from volley.engine.request import Request
from volley.engine.scheduler import Scheduled
from volley.types import Proposal, Verdict


def judge(plan: Sequence[Scheduled], proposals: Sequence[Proposal], logits: Tensor) -> list[Verdict]:
    """A verdict for every scheduled request; an empty one where nothing is emitted."""
    best = best_tokens(logits)
    verdicts = [Verdict(0, [])] * len(plan)
    own: dict[int, Tensor] = {}  # by place in the plan, the rows that choose its tokens
    sampled: dict[tuple[bool, bool, tuple[float | None, ...]], list[int]] = {}
    row = 0
    for place, (scheduled, proposal) in enumerate(zip(plan, proposals, strict=True)):
        if not scheduled.emits:
            continue
        rows = slice(row, row + 1 + len(proposal.token_ids))
        row = rows.stop
        request, own[place], choices = scheduled.request, logits[rows], best[rows]
        if request.counts is not None:
            own[place] = process(own[place], request.params, request.counts, preceding(proposal))
            choices = best_tokens(own[place])
        if proposal.parents is not None:
            choose = _chooser(request, own[place], choices)
            verdicts[place] = verify_tree(choose, proposal.token_ids, proposal.parents)
        elif request.params.temperature == 0:
            verdicts[place] = verify_choices(choices, [proposal.token_ids])[0]
        else:
            is_matched = proposal.draft_probs is None and len(proposal.token_ids) > 0
            sampled.setdefault((is_matched, request.is_coupled, request.params.law), []).append(place)
    for (is_matched, *_), places in sampled.items():
        verify = _match if is_matched else _sample
        found = verify([plan[i].request for i in places], [proposals[i] for i in places], [own[i] for i in places])
        for place, verdict in zip(places, found, strict=True):
            verdicts[place] = verdict
    row = 0
    for place, judged in own.items():
        if plan[place].request.params.logprobs:
            verdict = verdicts[place]
            _note_logprobs(plan[place].request, logits[row : row + len(judged)][kept_rows(1, verdict)], verdict)
        row += len(judged)
    return verdicts


def _match(requests: list[Request], proposals: list[Proposal], logits: list[Tensor]) -> list[Verdict]:
    """Sample-and-match for requests that sample alike."""
    probs = token_probs(torch.cat(logits), requests[0].params)
    choices = _drawn(probs, _positions(requests, proposals), is_coupled=requests[0].is_coupled)
    return verify_choices(choices, [proposal.token_ids for proposal in proposals])


def _sample(requests: list[Request], proposals: list[Proposal], logits: list[Tensor]) -> list[Verdict]:
    """Speculative sampling for requests that sample alike; one without a draft just draws its token."""
    positions = _positions(requests, proposals)

    def choose(weights: Tensor, rows: list[int]) -> list[int]:
        return _drawn(weights, [positions[row] for row in rows], is_coupled=requests[0].is_coupled)

    uniforms = [
        request.noise.uniforms(Purpose.ACCEPT, len(request.token_ids), len(proposal.token_ids))
        for request, proposal in zip(requests, proposals, strict=True)
    ]
    probs = token_probs(torch.cat(logits), requests[0].params)
    laws = [probs[:0] if proposal.draft_probs is None else proposal.draft_probs for proposal in proposals]
    return verify_speculative(probs, laws, [proposal.token_ids for proposal in proposals], uniforms, choose)


def _positions(requests: list[Request], proposals: list[Proposal]) -> list[tuple[PositionNoise, int]]:
    """Whose noise chooses the token of each row, and at which position."""
    return [
        (request.noise, len(request.token_ids) + i)
        for request, proposal in zip(requests, proposals, strict=True)
        for i in range(len(proposal.token_ids) + 1)
    ]


def _drawn(weights: Tensor, positions: list[tuple[PositionNoise, int]], *, is_coupled: bool) -> list[int]:
    """A token of each of ``weights [R, V]``.

    Requests that may also be verified by matching draw it with the noise that is matched; a uniform costs far less.
    """
    if is_coupled:
        chosen = race(weights, torch.cat([noise.exponentials([at], weights.shape[-1]) for noise, at in positions]))
    else:
        chosen = draw(weights, [noise.uniforms(Purpose.TARGET, at, 1)[0] for noise, at in positions])
    tokens: list[int] = chosen.tolist()
    return tokens


def _chooser(request: Request, logits: Tensor, best: list[int]) -> Callable[[int, int], int]:
    """The target's own choice after a node of a tree, for ``verify_tree``."""

    def choose(node: int, depth: int) -> int:
        if request.params.temperature == 0:
            return best[node]
        probs = token_probs(logits[node : node + 1], request.params)
        return _drawn(probs, [(request.noise, len(request.token_ids) + depth)], is_coupled=True)[0]

    return choose


def kept_rows(num_known: int, verdict: Verdict, start: int = 0, skip: int = 0) -> slice | Tensor:
    """Rows of a segment from ``start`` that stay: its known tokens and what was accepted, without the first ``skip``."""
    if verdict.path is None:
        return slice(start + skip, start + num_known + verdict.accepted)
    assert num_known == 1, "a tree's root is the anchor"
    return torch.tensor([start, *(start + node for node in verdict.path)][skip:])


def _note_logprobs(request: Request, logits: Tensor, verdict: Verdict) -> None:
    """``logits`` are those of the rows that chose the verdict's tokens."""
    request.logprobs += chosen_logprobs(logits, verdict.token_ids)
    if request.params.top_logprobs:
        request.top_logprobs += top_logprobs(logits, request.params.top_logprobs)
