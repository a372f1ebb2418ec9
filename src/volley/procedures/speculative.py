"""Decode autoregressively, plainly or speculatively. Every request is verified by the rule that is lossless for its draft."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from volley.config import DecodingConfig
from volley.decode.canvas import grouped
from volley.decode.on_device import Reading, draft_tokens
from volley.decode.rules import Constraint, allowed_choice, allowed_probs, apply_rules, constraints
from volley.decode.sampling import (
    NO_TOKEN,
    Numbers,
    PositionNoise,
    Purpose,
    draw,
    exponentials,
    if_finite,
    likeliest_finite,
    race,
    read_scores,
    scores_of,
    scores_on_device,
    token_probs,
    uniforms_of,
)
from volley.decode.verify import verify_choices, verify_speculative, verify_tree
from volley.decode.work import DraftSpec, Rule, Verdict, Work
from volley.memory.batch import Segment
from volley.memory.upload import upload, upload_indices
from volley.policies.base import View
from volley.procedures.request import Procedure, Request, Works

_SLICE = 32  # rows of a prompt's logits that become log-probabilities at once


class Speculative(Procedure):
    reads_on_device = True

    def __init__(self, config: DecodingConfig) -> None:
        self.config = config

    def view(self, request: Request, largest: int) -> View | None:
        """Return the policy's view, with the verification rule.

        If an earlier draft used the target's noise up to position p, coupled verification is kept until the text has passed p;
        otherwise the output would be biased, because the accepted count depends on that noise. Until then chains end at p.
        """
        limit = max(0, min(largest, request.remaining) - 1)
        if request.drafting_suspended or request.length < request.drafts_from or request.length == request.plain_at:
            limit = 0
        params, chain_limit, rule = request.params, limit, Rule.GREEDY
        if params.temperature > 0:
            rule = Rule.COUPLED
            if not self.config.matches(params.seed):
                bound = request.noise_used_until - request.length
                rule, chain_limit = (Rule.COUPLED, min(limit, bound)) if bound > 0 else (Rule.REJECTION, limit)
        return View(request.request_id, rule, limit, chain_limit, self.config.max_tree_nodes)

    def num_beside(self, num_drafted: int) -> int:
        """Return how many tokens verify a draft of ``num_drafted``, besides the last known token."""
        return num_drafted

    def most_drafted(self, request: Request) -> int:
        """Return the longest draft that a decoding method may make itself."""
        return request.remaining - 1

    def next_work(self, request: Request, spec: DraftSpec) -> Work[Request]:
        return Work(request, spec)

    def segment(self, work: Work[Request]) -> tuple[list[int], Segment]:
        request, proposal = work.request, work.proposal
        known = request.token_ids[request.computed : request.computed + work.num_known]
        size = work.num_known + len(proposal.token_ids)
        return known + proposal.token_ids, Segment(request.table, request.computed, size, parents=proposal.parents)

    def carry(self, segment: Segment, canvas: int) -> Segment:
        """Append a canvas of ``canvas`` tokens to ``segment``."""
        return Segment(segment.table, segment.start, segment.length + canvas, groups=(1,) * segment.length + (canvas,))

    def num_rows(self, work: Work[Request]) -> int:
        """Return the number of rows with logits: one for the next token and one per draft token, 0 if a prompt chunk ends
        before.

        A prompt whose log-probabilities are asked for needs the rows of all its tokens as well.
        """
        return max(_num_choosing(work), _num_scored(work))

    def verify(self, works: Works, logits: Tensor) -> Reading:
        """Choose tokens on the device. Reading them fills in the verdicts: the host waits once, and again for log-probabilities
        of tokens chosen in this pass.

        A draft or a canvas in the same pass may make a row non-finite: attention gives hidden tokens a weight of 0, and 0 ·
        NaN is NaN. So the tokens before that row are kept, and the next one is computed again without a draft. If that row is
        not finite either, the work is broken.
        """
        reading = Reading()
        reading.add_drafts(works)
        for work in works:
            if count := _num_scored(work):
                _score_prompt(work, logits, count, reading)
        choosing, chosen_by = [work for work in works if work.rows.stop > work.rows.start], self.choosable(logits)
        alike: dict[tuple[Any, ...], list[Work[Request]]] = {}  # works that are verified together
        for work in choosing:
            request, proposal = work.request, work.proposal
            judge, key = _judge_greedy, tuple[Any, ...]()
            if request.params.temperature > 0:
                is_matched = work.spec.rule is Rule.COUPLED or proposal.parents is not None
                judge = _match if is_matched else _compare if proposal.draft_probs is None else _sample
                key = *request.params.distribution, id(proposal.drafted)
            alike.setdefault((judge, *key), []).append(work)
        for (judge, *_), members in alike.items():
            for part in [members] if judge is _judge_greedy else _parts(members, logits):
                judge(part, chosen_by, reading)
        return reading.start(partial(_conclude, works, choosing, logits))

    def ask_next(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a causal pass whose last row predicts the token after ``token_ids``."""
        return token_ids

    def choosable(self, logits: Tensor) -> Tensor:
        """Return ``logits [R, V]`` as used for choosing tokens."""
        return logits


def coupled_rule(request: Request) -> Rule:
    """Return the rule for drafts that were made with the noise of their positions."""
    return Rule.COUPLED if request.params.temperature > 0 else Rule.GREEDY


def _parts(works: Works, logits: Tensor) -> Iterable[Works]:
    """Split works whose distributions are made together; on a CPU into few rows of a large vocabulary, to save memory."""
    if logits.device.type != "cpu":
        return [works]
    return grouped(works, lambda work: logits[work.rows])


def _num_choosing(work: Work[Request]) -> int:
    """Return how many of a work's last rows choose tokens. A prompt that is only read has one, to check that it is finite."""
    is_last = work.request.computed + work.num_known == work.request.length
    return 1 + len(work.proposal.token_ids) if is_last else 0


def _num_scored(work: Work[Request]) -> int:
    """Return how many of a work's last rows are needed to score its prompt: from the first unscored position to the end."""
    first, start = work.request.first_unscored, work.request.computed
    return 0 if first is None else max(0, start + work.num_known - max(first, start))


def _score_prompt(work: Work[Request], logits: Tensor, num_scored: int, reading: Reading) -> None:
    """Record log-probabilities of the prompt once they are read, and restrict the work's rows to those that choose tokens.

    A pass limits the number of rows, of which few are in fp32 at once.
    """
    request = work.request
    first = request.computed + work.num_known - num_scored
    following = request.token_ids[first + 1 : min(first + 1 + num_scored, request.num_prompt)]
    for at in range(0, len(following), _SLICE):
        tokens = following[at : at + _SLICE]
        rows = logits[work.rows.start + at :][: len(tokens)]
        scores = scores_on_device(rows, tokens, request.params.prompt_logprobs or 0)
        reading.add_doubles(scores, partial(_take_scores, work, len(tokens)))
    work.rows = slice(work.rows.stop - _num_choosing(work), work.rows.stop)


def _take_scores(work: Work[Request], num_tokens: int, values: list[float]) -> None:
    found = read_scores(values, num_tokens)
    work.is_broken |= any(isnan(score.logprob) for score in found)
    work.request.prompt_scores += found


def _conclude(works: Works, choosing: Works, logits: Tensor) -> None:
    """Complete the verdicts of ``works``, whose tokens have been read."""
    for work in works:
        _end_at_broken_row(work)
    _note_scores([work for work in choosing if work.request.params.logprobs], logits)


def _end_at_broken_row(work: Work[Request]) -> None:
    """Drop the token of a row that is not finite, and what the pass may have made non-finite before it."""
    request, verdict = work.request, work.verdict
    if verdict.token_ids[-1:] == [NO_TOKEN]:
        work.is_cut = True
        if work.proposal.token_ids or work.num_fused:
            path = verdict.path[:-1] if verdict.path else None
            work.verdict = Verdict(verdict.accepted - 1, verdict.token_ids[:-1], path)
            request.plain_at = request.length + len(work.verdict.token_ids)
        else:
            work.is_broken = True
    if work.is_broken or request.remaining == 0:
        work.verdict = Verdict(0, [])


def _rows(works: Works, logits: Tensor) -> list[Tensor]:
    """Return the rows of each work, under those rules of its request that are no constraints."""
    found = []
    for work in works:
        free = [rule for rule in work.request.rules if not isinstance(rule, Constraint)]
        rows = logits[work.rows]
        found.append(apply_rules(free, rows, work.proposal.paths) if free else rows)
    return found


def _judge_greedy(works: Works, logits: Tensor, reading: Reading) -> None:
    """Accept the tokens that the target would have chosen."""
    rows = _rows(works, logits)
    unruled = [work for work in works if not work.request.rules]
    together = [own for work, own in zip(works, rows, strict=True) if not work.request.rules]
    if together:
        is_all = sum(map(len, together)) == len(logits)
        _await_choices(unruled, likeliest_finite(logits if is_all else torch.cat(together)), reading)
    for work, own in zip(works, rows, strict=True):
        bound = constraints(work.request.rules)
        if bound and own.device.type != "cpu":  # there one pass over all tokens costs less than a second read
            chosen = likeliest_finite(apply_rules(bound, own, work.proposal.paths), logits[work.rows])
            reading.add(chosen, partial(_keep_choices, work))
        elif work.request.rules:
            reading.add(likeliest_finite(own, logits[work.rows]), partial(_keep_allowed, work, own))


def _keep_allowed(work: Work[Request], rows: Tensor, choices: list[int]) -> None:
    """Accept choices under constraints, which are evaluated only for the rows of accepted tokens."""
    bound, proposal = constraints(work.request.rules), work.proposal
    if not bound:
        _keep_choices(work, choices)
        return
    paths = proposal.paths

    def choose(node: int, _: int) -> int:
        best = choices[node]
        return best if best == NO_TOKEN else allowed_choice(bound, rows[node], best, paths[node])

    parents = range(len(proposal.token_ids)) if proposal.parents is None else proposal.parents
    verdict = verify_tree(choose, proposal.token_ids, parents)
    work.verdict = replace(verdict, path=None) if proposal.parents is None else verdict


def _match(works: Works, logits: Tensor, reading: Reading) -> None:
    """Draw the target's tokens with the noise of their positions, which drafts may use, and accept what agrees."""
    if logits.device.type == "cpu":  # there it pays to draw only after accepted nodes
        for work in works:
            if work.proposal.parents is not None:
                reading.add(logits.new_empty(0, dtype=torch.int64), partial(_walk, work, _rows([work], logits)[0]))
        works = [work for work in works if work.proposal.parents is None]
    if works:
        probs, places = _probs(works, logits), _places(works)
        chosen = race(probs, exponentials(places, probs.shape[-1], probs.device))
        _await_choices(works, if_finite(chosen, probs), reading)


def _compare(works: Works, logits: Tensor, reading: Reading) -> None:
    """Draw the target's tokens and accept what agrees. The draft does not use the noise, so one uniform per row is enough."""
    probs = _probs(works, logits)
    _await_choices(works, if_finite(draw(probs, _uniforms(works)), probs), reading)


def _await_choices(works: Works, chosen: Tensor, reading: Reading) -> None:
    """Compare each draft with the tokens ``chosen`` in its rows, once these are read."""
    start = reading.add(chosen, partial(_keep_all, works))
    for work in works:
        work.choices = start
        start += len(work.proposal.token_ids) + 1


def _keep_all(works: Works, choices: list[int]) -> None:
    start = 0
    for work in works:
        _keep_choices(work, choices[start : (start := start + len(work.proposal.token_ids) + 1)])


def _keep_choices(work: Work[Request], choices: list[int]) -> None:
    proposal = work.proposal
    if proposal.parents is None:
        work.verdict = verify_choices(choices, proposal.token_ids)
    else:
        work.verdict = verify_tree(lambda node, _: choices[node], proposal.token_ids, proposal.parents)


def _sample(works: Works, logits: Tensor, reading: Reading) -> None:
    """Verify by rejection sampling, for requests with equal sampling parameters, by the distributions of their drafts."""
    probs, sizes = _probs(works, logits), [len(work.proposal.token_ids) for work in works]
    drawn_from = [work.proposal.draft_probs for work in works if work.proposal.draft_probs is not None]
    accepting = uniforms_of([(work.request.noise, work.request.length) for work in works], sizes, Purpose.ACCEPT)
    draft, drafted = draft_tokens(works, probs.device), works[0].proposal.drafted
    judged = verify_speculative(probs, torch.cat(drawn_from), draft, sizes, accepting, drafted)
    of_rows = upload(np.array(_uniforms(works)), probs.device)
    bonus = if_finite(draw(judged.weights, of_rows.index_select(0, judged.rows)), judged.weights)
    start = reading.add(torch.cat([judged.kept, bonus]), partial(_keep_first, works))
    for place, work in enumerate(works, start):
        work.kept, work.choices = place, place + len(works)


def _keep_first(works: Works, values: list[int]) -> None:
    """Accept the counted tokens of each draft, and then its bonus token."""
    for work, kept, bonus in zip(works, values[: len(works)], values[len(works) :], strict=True):
        work.verdict = Verdict(kept, [*work.proposal.token_ids[:kept], bonus])


def _probs(works: Works, logits: Tensor) -> Tensor:
    """Return the distributions of all rows, under the rules of each request."""
    params, rows = works[0].request.params, _rows(works, logits)
    each = [constraints(work.request.rules) for work in works]
    if not any(each):
        return token_probs(rows[0] if len(rows) == 1 else torch.cat(rows), params)
    parts = [
        allowed_probs(bound, own, work.proposal.paths, params)
        for work, bound, own in zip(works, each, rows, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _places(works: Works) -> list[tuple[PositionNoise, int]]:
    """Return for each row the noise that chooses its token, and the position."""
    return [(work.request.noise, work.request.length + len(path)) for work in works for path in work.proposal.paths]


def _uniforms(works: Works) -> Numbers:
    """Return the uniform of each row's position."""
    places = _places(works)
    return uniforms_of(places, [1] * len(places), Purpose.TARGET)


def _walk(work: Work[Request], rows: Tensor, _: list[int]) -> None:
    """Verify a tree by coupled sampling, and draw only after the nodes that are reached."""
    request, paths = work.request, work.proposal.paths
    bound = constraints(request.rules)

    def choose(node: int, depth: int) -> int:
        probs = allowed_probs(bound, rows[node : node + 1], [paths[node]], request.params)
        noise = request.noise.exponentials([request.length + depth], probs.shape[-1], probs.device)
        return int(if_finite(race(probs, noise), probs))

    assert work.proposal.parents is not None
    work.verdict = verify_tree(choose, work.proposal.token_ids, work.proposal.parents)


def _note_scores(works: Works, logits: Tensor) -> None:
    """Record log-probabilities of the chosen tokens, under the target's unmodified distribution."""
    works = [work for work in works if work.verdict.token_ids]
    if not works:
        return
    nodes = [(0, *(range(1, 1 + own.accepted) if own.path is None else own.path)) for own in (w.verdict for w in works)]
    nodes = [own[: len(work.verdict.token_ids)] for work, own in zip(works, nodes, strict=True)]
    rows = [work.rows.start + node for work, own in zip(works, nodes, strict=True) for node in own]
    tokens = [token for work in works for token in work.verdict.token_ids]
    kept = logits.index_select(0, upload_indices(rows, logits.device))
    scores = iter(scores_of(kept, tokens, max(work.request.params.top_logprobs for work in works)))
    for work in works:
        own, count = islice(scores, len(work.verdict.token_ids)), work.request.params.top_logprobs
        work.scores = [score._replace(likeliest=score.likeliest[:count]) for score in own]
