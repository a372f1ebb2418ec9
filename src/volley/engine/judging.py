"""What of each draft survives: from the target's logits to verdicts, every request by the verifier that is lossless for it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from volley.decode.processors import preceding, process
from volley.decode.sampling import Purpose, best_tokens, chosen_logprobs, draw, race, token_probs, top_logprobs
from volley.decode.verify import verify_choices, verify_speculative, verify_tree
from volley.engine.request import Request
from volley.engine.scheduler import Scheduled
from volley.types import Proposal, Verdict


def judge(plan: Sequence[Scheduled], proposals: Sequence[Proposal], logits: Tensor) -> list[Verdict]:
    """A verdict for every scheduled request; an empty one where nothing is emitted."""
    best = best_tokens(logits)
    verdicts = [Verdict(0, [])] * len(plan)
    own: dict[int, Tensor] = {}  # by place in the plan, the rows that choose its tokens
    sampled: dict[tuple[object, ...], list[int]] = {}
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
        elif proposal.draft_probs is None and proposal.token_ids:
            choices = _choices(request, own[place])
            verdicts[place] = verify_choices(choices, [proposal.token_ids])[0]
        else:
            sampled.setdefault((request.is_coupled, request.params.law), []).append(place)
    for places in sampled.values():
        found = _judge_sampled(
            [plan[i].request for i in places], [proposals[i] for i in places], [own[i] for i in places]
        )
        for place, verdict in zip(places, found, strict=True):
            verdicts[place] = verdict
    row = 0
    for place, judged in own.items():
        if plan[place].request.params.logprobs:
            verdict = verdicts[place]
            _note_logprobs(plan[place].request, logits[row : row + len(judged)][kept_rows(1, verdict)], verdict)
        row += len(judged)
    return verdicts


def _judge_sampled(requests: list[Request], proposals: list[Proposal], logits: list[Tensor]) -> list[Verdict]:
    """Speculative sampling for requests that sample alike; one without a draft just draws its token.

    Requests that may also be verified by matching draw it with the noise that is matched; a uniform costs far less.
    """
    sizes = [len(proposal.token_ids) for proposal in proposals]
    positions = [
        (request.noise, len(request.token_ids) + i)
        for request, size in zip(requests, sizes, strict=True)
        for i in range(size + 1)
    ]

    def choose(weights: Tensor, rows: list[int]) -> list[int]:
        where = [positions[row] for row in rows]
        if requests[0].is_coupled:
            noise = [noise.exponentials([position], weights.shape[-1]) for noise, position in where]
            chosen = race(weights, torch.cat(noise))
        else:
            chosen = draw(weights, [noise.uniforms(Purpose.TARGET, position, 1)[0] for noise, position in where])
        tokens: list[int] = chosen.tolist()
        return tokens

    uniforms = [
        request.noise.uniforms(Purpose.ACCEPT, len(request.token_ids), size)
        for request, size in zip(requests, sizes, strict=True)
    ]
    probs = token_probs(torch.cat(logits), requests[0].params)
    laws = [probs[:0] if proposal.draft_probs is None else proposal.draft_probs for proposal in proposals]
    return verify_speculative(probs, laws, [proposal.token_ids for proposal in proposals], uniforms, choose)


def _chooser(request: Request, logits: Tensor, best: list[int]) -> Callable[[int, int], int]:
    """The target's own choice after a node of a tree, for ``verify_tree``."""

    def choose(node: int, depth: int) -> int:
        if request.params.temperature == 0:
            return best[node]
        probs = token_probs(logits[node : node + 1], request.params)
        noise = request.noise.exponentials([len(request.token_ids) + depth], logits.shape[-1])
        return int(race(probs, noise))

    return choose


def _choices(request: Request, logits: Tensor) -> list[int]:
    """What the target itself would sample in each of ``logits [k + 1, V]``, with the noise of its position."""
    probs = token_probs(logits, request.params)
    first = len(request.token_ids)
    noise = request.noise.exponentials(range(first, first + len(logits)), logits.shape[-1])
    chosen: list[int] = race(probs, noise).tolist()
    return chosen


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
