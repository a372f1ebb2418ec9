"""Autoregressive decoding, plain or speculative: every request is verified by the rule that is lossless for its draft."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from volley.config import DecodingConfig
from volley.decode.late import read_choices
from volley.decode.rules import allowed_choices, allowed_probs, apply_rules, constraints, paths_of
from volley.decode.sampling import (
    PositionNoise,
    Purpose,
    best_tokens,
    draw,
    logprobs_of,
    race,
    ranks_of,
    token_probs,
)
from volley.decode.verify import kept_rows, verify_choices, verify_speculative, verify_tree
from volley.decode.work import Ask, Rule, Work
from volley.memory.batch import Segment
from volley.policies.base import View
from volley.procedures.request import Procedure, Request

_SLICE = 32  # rows of a prompt's logits that are turned into log-probabilities at once

Works = Sequence[Work[Request]]


class Speculative(Procedure):
    reads_late = True

    def __init__(self, config: DecodingConfig) -> None:
        self.config = config

    def view(self, request: Request, largest: int) -> View:
        """A sampled request leaves matching only behind the last position whose noise a draft has known.

        How far that draft was right depends on the noise, so these positions must be sampled with it; until then chains draft no
        further.
        """
        limit = max(0, min(largest, request.remaining) - 1)
        params, chain_limit, rule = request.params, limit, Rule.GREEDY
        if params.temperature > 0:
            rule = Rule.MATCH
            if not self.config.matches(params.seed):
                bound = request.foreseen - request.length
                rule, chain_limit = (Rule.MATCH, min(limit, bound)) if bound > 0 else (Rule.SPECULATIVE, limit)
        return View(request.request_id, rule, limit, chain_limit, self.config.max_tree_nodes)

    def next_work(self, request: Request, ask: Ask) -> Work[Request]:
        return Work(request, ask)

    def segment(self, work: Work[Request]) -> tuple[list[int], Segment]:
        request, proposal = work.request, work.proposal
        known = request.token_ids[request.computed : request.computed + work.num_known]
        size = work.num_known + len(proposal.token_ids)
        return known + proposal.token_ids, Segment(request.table, request.computed, size, parents=proposal.parents)

    def num_rows(self, work: Work[Request]) -> int:
        """A request whose last token is computed chooses the next one; a chunk of a prompt may end before.

        A prompt whose log-probabilities are asked for needs the rows of all its tokens besides.
        """
        return max(_num_choosing(work), _num_scored(work))

    def absorb(self, works: Works, logits: Tensor) -> None:
        scored = [(work, count) for work in works if (count := _num_scored(work))]
        for work, count in scored:
            _score_prompt(work, logits, count)
        choosing = [work for work in works if work.rows.stop > work.rows.start]
        rows = [logits[work.rows] for work in choosing]
        if scored:
            read_choices(logits[:0], works)
            choices = [best_tokens(own) for own in rows]
        else:
            best = read_choices(logits, works)
            choices = [best[work.rows] for work in choosing]
        for place, work in enumerate(choosing):
            rules = work.request.rules
            if not rules:
                continue
            paths, bound = paths_of(work.proposal), constraints(rules)
            is_greedy = work.request.params.temperature == 0
            free = [rule for rule in rules if rule not in bound]
            if free:
                rows[place] = apply_rules(free, rows[place], paths)
                if is_greedy:
                    choices[place] = best_tokens(rows[place])
            if is_greedy and bound:
                choices[place] = allowed_choices(bound, rows[place], choices[place], paths)
        sampled: dict[tuple[bool, Rule, tuple[float | None, ...]], list[int]] = {}
        for place, work in enumerate(choosing):
            request, proposal = work.request, work.proposal
            if proposal.parents is not None:
                choose = _chooser(work, rows[place], choices[place])
                work.verdict = verify_tree(choose, proposal.token_ids, proposal.parents)
            elif request.params.temperature == 0:
                work.verdict = verify_choices(choices[place], [proposal.token_ids])[0]
            else:
                is_compared = proposal.draft_probs is None and len(proposal.token_ids) > 0
                sampled.setdefault((is_compared, work.ask.rule, request.params.distribution), []).append(place)
        for (is_compared, rule, _), places in sampled.items():
            verify = _compare if is_compared else _sample
            verify([choosing[place] for place in places], [rows[place] for place in places], rule)
        for work in choosing:
            if work.request.params.logprobs:
                _note_logprobs(work, logits[work.rows])


def _num_choosing(work: Work[Request]) -> int:
    """How many of a work's last rows choose tokens."""
    request = work.request
    emits = request.computed + work.num_known == request.length and request.remaining > 0
    return 1 + len(work.proposal.token_ids) if emits else 0


def _num_scored(work: Work[Request]) -> int:
    """How many of a work's last rows are needed to score its prompt: from the first unscored position to the end."""
    first, start = work.request.first_unscored, work.request.computed
    return 0 if first is None else max(0, start + work.num_known - max(first, start))


def _score_prompt(work: Work[Request], logits: Tensor, num_scored: int) -> None:
    """Note log-probabilities of the prompt, and leave the work the rows that choose tokens.

    The pass bounds how many rows there are; in fp32 there are few at once.
    """
    request = work.request
    first = request.computed + work.num_known - num_scored
    following = request.token_ids[first + 1 : min(first + 1 + num_scored, request.num_prompt)]
    for at in range(0, len(following), _SLICE):
        tokens = following[at : at + _SLICE]
        rows = logits[work.rows.start + at :][: len(tokens)]
        chosen, likeliest = logprobs_of(rows, tokens, request.params.prompt_logprobs or 0)
        request.prompt_logprobs += chosen
        request.prompt_ranks += ranks_of(rows, tokens)
        if request.params.prompt_logprobs:
            request.prompt_top_logprobs += likeliest
    work.rows = slice(work.rows.stop - _num_choosing(work), work.rows.stop)


def _compare(works: Works, rows: list[Tensor], rule: Rule) -> None:
    """Draw the target's own tokens and keep the draft while it agrees; all requests sample alike."""
    probs = _probs(works, rows)
    choices = _drawn(probs, _positions(works), rule)
    for work, verdict in zip(works, verify_choices(choices, _drafts(works)), strict=True):
        work.verdict = verdict


def _sample(works: Works, rows: list[Tensor], rule: Rule) -> None:
    """Speculative sampling for requests that sample alike; one without a draft just draws its token."""
    positions = _positions(works)

    def choose(weights: Tensor, rows: list[int]) -> list[int]:
        return _drawn(weights, [positions[row] for row in rows], rule)

    uniforms = [
        work.request.noise.uniforms(Purpose.ACCEPT, work.request.length, len(work.proposal.token_ids)) for work in works
    ]
    probs = _probs(works, rows)
    draft_probs = [probs[:0] if work.proposal.draft_probs is None else work.proposal.draft_probs for work in works]
    verdicts = verify_speculative(probs, draft_probs, _drafts(works), uniforms, choose)
    for work, verdict in zip(works, verdicts, strict=True):
        work.verdict = verdict


def _probs(works: Works, rows: list[Tensor]) -> Tensor:
    """The distributions of all rows, under the constraints of each request."""
    params = works[0].request.params
    each = [constraints(work.request.rules) for work in works]
    if not any(each):
        return token_probs(torch.cat(rows), params)
    parts = [
        allowed_probs(bound, own, paths_of(work.proposal), params)
        for work, bound, own in zip(works, each, rows, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _drafts(works: Works) -> list[list[int]]:
    return [work.proposal.token_ids for work in works]


def _positions(works: Works) -> list[tuple[PositionNoise, int]]:
    """Whose noise chooses the token of each row, and at which position."""
    return [
        (work.request.noise, work.request.length + i) for work in works for i in range(len(work.proposal.token_ids) + 1)
    ]


def _drawn(weights: Tensor, positions: list[tuple[PositionNoise, int]], rule: Rule) -> list[int]:
    """A token of each of ``weights [R, V]``; matching needs the noise that drafts may know, else one uniform is cheaper."""
    if rule is Rule.MATCH:
        chosen = race(weights, torch.cat([noise.exponentials([at], weights.shape[-1]) for noise, at in positions]))
    else:
        chosen = draw(weights, [noise.uniforms(Purpose.TARGET, at, 1)[0] for noise, at in positions])
    tokens: list[int] = chosen.tolist()
    return tokens


def _chooser(work: Work[Request], rows: Tensor, best: list[int]) -> Callable[[int, int], int]:
    """The target's own choice after a node of a tree, for ``verify_tree``."""
    request, paths = work.request, paths_of(work.proposal)
    bound = constraints(request.rules)

    def choose(node: int, depth: int) -> int:
        if request.params.temperature == 0:
            return best[node]
        probs = allowed_probs(bound, rows[node : node + 1], [paths[node]], request.params)
        return _drawn(probs, [(request.noise, request.length + depth)], Rule.MATCH)[0]

    return choose


def _note_logprobs(work: Work[Request], logits: Tensor) -> None:
    """Of the tokens chosen, under the target's unmodified distribution."""
    rows = logits[kept_rows(1, work.verdict)]
    work.logprobs, work.top_logprobs = logprobs_of(rows, work.verdict.token_ids, work.request.params.top_logprobs)
