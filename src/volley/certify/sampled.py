"""Tests of sampled output against the target's distribution, token by token.

With an engine the distribution is known: the target scores each answer, and ``reference.py`` applies the request's parameters to
its logits. With a server only the log-probabilities at temperature 1 are known.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from volley.bench.run import without_drafter
from volley.certify.checks import Check, tie_between
from volley.certify.options import POWER, CertifyConfig
from volley.certify.reference import distribution, penalised
from volley.certify.statistics import LEAST_ANSWERS, Deviations, mean_difference, sum_p, two_sample_p
from volley.certify.subject import Reply, Subject, unchosen
from volley.config import DecodingConfig
from volley.decode.on_device import Reading
from volley.decode.sampling import without
from volley.decode.work import NO_DRAFT, Phase, Proposal, Verdict, Work
from volley.engine.engine import Engine
from volley.memory.batch import Segment
from volley.params import SamplingParams
from volley.procedures.request import Request
from volley.procedures.speculative import Speculative

AT_ONCE = 16
LEAST_BONUS = 100
MOST_ROUNDS = 200
"""Maximum rounds of all prompts that a server is asked, because few of its tokens may be judgeable."""


@dataclass
class Sampled:
    """Deviations of all tokens, and of bonus tokens, which follow a fully accepted draft."""

    every: Deviations
    bonus: Deviations


@dataclass(frozen=True)
class Way:
    """Configuration for decoding sampled requests."""

    name: str
    params: SamplingParams
    decoding: dict[str, Any] = field(default_factory=dict)
    """Changed settings of the engine."""


class Scoring(Speculative):
    """Decoding method that records the target's logits for every prompt token, without drafts."""

    def __init__(self, config: DecodingConfig) -> None:
        super().__init__(config)
        self.logits: dict[int, list[Tensor]] = {}

    def num_rows(self, work: Work[Request]) -> int:
        return work.num_known

    def verify(self, works: Sequence[Work[Request]], logits: Tensor) -> Reading:
        for work in works:
            request, rows = work.request, logits[work.rows].float().cpu()
            self.logits.setdefault(request.request_id, []).append(rows.clone())
            if request.computed + work.num_known == request.length:
                work.verdict = Verdict(0, [int(rows[-1].argmax())])
        return Reading()


class ScoringInPlace(Scoring):
    """Scoring for targets whose row i predicts token i: each token is followed by a mask, which attends to the tokens before
    it."""

    def __init__(self, config: DecodingConfig, mask_token_id: int) -> None:
        super().__init__(config)
        self.mask_token_id = mask_token_id

    def read(self, request: Request, num_tokens: int) -> Work[Request]:
        return Work(request, replace(NO_DRAFT, size=num_tokens), Phase.PREFILL, num_tokens)

    def segment(self, work: Work[Request]) -> tuple[list[int], Segment]:
        tokens, segment = super().segment(work)
        parents = (*range(len(tokens) - 1), *range(len(tokens)))
        return tokens + [self.mask_token_id] * len(tokens), replace(segment, length=2 * len(tokens), parents=parents)

    def verify(self, works: Sequence[Work[Request]], logits: Tensor) -> Reading:
        return super().verify(works, without(logits, self.mask_token_id))


def _scoring(engine: Engine) -> Scoring:
    mask = unchosen(engine)
    return Scoring(engine.config) if mask is None else ScoringInPlace(engine.config, mask)


def ways(engine: Engine, tokens: int) -> list[Way]:
    """Return the ways in which an engine can decode sampled requests. ``tokens`` is the longest answer."""
    at_one = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
    found = [
        Way("sampled", at_one),
        Way("sampled at T = 0.6", replace(at_one, temperature=0.6)),
        Way("sampled with top_p, top_k and penalties", replace(at_one, top_p=0.9, top_k=20, presence_penalty=0.5)),
    ]
    if engine.core.proposer is not None and engine.core.proposer.can_grow_trees:
        found.append(Way("sampled trees", at_one, {"tree_nodes": 2 * engine.core.proposer.block_size}))
    return found


def check_way(engine: Engine, prompts: Sequence[list[int]], way: Way, config: CertifyConfig, tests: int) -> list[Check]:
    """Sample enough tokens, score them, and test all of them and the bonus tokens."""
    return verdicts(way, draw_way(engine, prompts, way, config.sample_size(tests), config.seed), config, tests)


def draw_way(engine: Engine, prompts: Sequence[list[int]], way: Way, wanted: int, seed: int) -> Sampled:
    """Return at least ``wanted`` scored tokens of sampled answers."""
    before = engine.config
    settings = {
        "policy": None,
        "block_size": engine.core.proposer.block_size if engine.core.proposer else 1,
        **way.decoding,
    }
    engine.reconfigure(replace(before, **settings))
    # Draw separate noise for each way, whatever the seed of ``random``: the tests must not share tokens.
    found = Sampled(Deviations(Random(f"{seed}/{way.name}")), Deviations(Random(f"{seed}/{way.name}/bonus")))
    scorer = without_drafter(engine)
    try:
        while found.every.count < wanted:
            batch = [prompts[index % len(prompts)] for index in range(AT_ONCE)]
            for request, bonus in _draw(engine, batch, way.params):
                _compare(scorer, request, way.params, bonus, found)
    finally:
        engine.reconfigure(before)
    return found


def _draw(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[tuple[Request, set[int]]]:
    """Return finished requests, each with the indices of its bonus tokens."""
    bonus: dict[int, set[int]] = {}
    seen: dict[int, int] = {}

    def listen(request: Request, proposal: Proposal, verdict: Verdict) -> None:
        place = seen.get(request.request_id, 0) + len(verdict.token_ids)
        seen[request.request_id] = place
        if proposal.token_ids and proposal.parents is None and verdict.accepted == len(proposal.token_ids):
            bonus.setdefault(request.request_id, set()).add(place - 1)

    engine.on_verified.append(listen)
    try:
        requests = [engine.add_request(prompt, params) for prompt in prompts]
        while any(request.finish_reason is None for request in requests):
            engine.step()
    finally:
        engine.on_verified.remove(listen)
    return [(request, bonus.get(request.request_id, set())) for request in requests]


def _compare(scorer: Engine, request: Request, params: SamplingParams, bonus: set[int], found: Sampled) -> None:
    prompt, output = request.token_ids[: request.num_prompt], request.token_ids[request.num_prompt :]
    logits = score(scorer, [*prompt, *output[:-1]])[len(prompt) - 1 :]
    tie = tie_between(scorer.target.dtype)
    for index, token in enumerate(output):
        row = logits[index]
        if params.is_penalised:
            row = penalised(row, params, prompt, output[:index])
        probs = distribution(row, params)
        if float(probs[token]) == 0:
            found.every.impossible += not _reaches(row, token, params, tie)
            continue
        found.every.add(probs, token)
        if index in bonus:
            found.bonus.add(probs, token)


def _reaches(logits: Tensor, token: int, params: SamplingParams, tie: float) -> bool:
    """Return whether the token may be drawn, given that rounding moves logits at the edge of a truncation by up to ``tie``.

    In the worst case all tokens up to it are too low by ``tie`` and the likelier ones too high.
    """
    worst = logits + 2 * tie * (logits <= logits[token])
    return float(distribution(worst, params)[token]) > 0


def score(engine: Engine, token_ids: Sequence[int]) -> Tensor:
    """Return the target's logits ``[T, V]`` for the token after each token."""
    engine.reset_prefix_cache()
    procedure = _scoring(engine)
    request = engine.add_request(list(token_ids), SamplingParams(max_tokens=1), procedure=procedure)
    while request.finish_reason is None:
        engine.step()
    engine.reset_prefix_cache()
    return torch.cat(procedure.logits[request.request_id])


def verdicts(way: Way, found: Sampled, config: CertifyConfig, tests: int) -> list[Check]:
    """Return the checks of all tokens and, if there are enough, of bonus tokens. ``tests`` share the certificate's alpha."""
    checks = []
    for name, deviations in ((way.name, found.every), (f"{way.name}: bonus", found.bonus)):
        if not deviations.count:
            continue
        if deviations is found.bonus and deviations.count < LEAST_BONUS:
            few = f"{deviations.count} tokens behind whole drafts, too few"
            checks.append(Check(name, True, few, sample=deviations.count, judged=False))
            continue
        test, p_value = min(deviations.p_values().items(), key=lambda pair: pair[1])
        passed = p_value >= config.alpha / tests
        what = {
            "support": f"{deviations.impossible} tokens that cannot be drawn",
            "likeliest": f"the likeliest token came {100 * deviations.shift:+.2f} points from expected",
            "rank": "tokens lie elsewhere in their distributions than chance puts them",
        }[test]
        detail = (
            f"{deviations.count} tokens; {what}"
            if not passed
            else f"{deviations.count} tokens from the target's distribution"
        )
        facts = {"finds": config.bias if deviations is found.every else None, "power": POWER, "shift": deviations.shift}
        checks.append(Check(name, passed, detail, p_value, deviations.count, facts))
    return checks


def check_server(
    subject: Subject,
    plain: Subject | None,
    prompts: Callable[[int], list[Any]],
    params: SamplingParams,
    config: CertifyConfig,
    tests: int,
) -> list[Check]:
    """Check a server's tokens sampled at T = 1 against its log-probabilities, and those at T = 0.6 against plain decoding's."""
    wanted, deviations = config.sample_size(tests), _Hits()
    number = 0
    while deviations.count < wanted and number < MOST_ROUNDS:
        number += 1
        for reply in subject.ask(prompts(number), replace(params, temperature=1.0), 8):
            deviations.take(reply)
    p_value = deviations.p_value()
    shift = f"the likeliest token came {100 * deviations.shift:+.2f} points from expected"
    is_enough = deviations.count >= wanted
    detail = f"{deviations.count} tokens{'' if is_enough else f' of {wanted} wanted could be judged'}; {shift}"
    facts = {"finds": config.bias, "power": POWER} if is_enough else {}
    passed = p_value >= config.alpha / tests
    judged = is_enough or not passed
    checks = [Check("sampled", passed, detail, p_value, deviations.count, facts, judged=judged)]
    if plain is not None:
        checks.append(_check_cooler(subject, plain, prompts, params, config, tests))
    return checks


def _check_cooler(
    subject: Subject,
    plain: Subject,
    prompts: Callable[[int], list[Any]],
    params: SamplingParams,
    config: CertifyConfig,
    tests: int,
) -> Check:
    """Compare the share of likeliest tokens at T = 0.6 with plain decoding's. The spread determines which bias this can find."""
    wanted, asked = config.sample_size(tests), len(prompts(0))
    rounds = max(-(-LEAST_ANSWERS // asked), -(-wanted // (params.max_tokens * asked)))
    means: list[list[float]] = [[], []]
    for side, who in enumerate((subject, plain)):
        for again in range(max(rounds, MOST_ROUNDS)):
            if again >= rounds and len(means[side]) >= LEAST_ANSWERS:
                break
            for reply in who.ask(prompts(again), replace(params, temperature=0.6), 8):
                means[side] += _mean_hits(reply)
    p_value, is_enough = two_sample_p(*means), min(map(len, means)) >= LEAST_ANSWERS
    detail = f"{len(means[0])} answers against {len(means[1])} of plain decoding"
    facts: dict[str, Any] = {}
    if is_enough:
        shift, error = mean_difference(*means)
        finds = config.errors_found(tests) * error
        facts = {"finds": finds, "power": POWER, "shift": shift}
        detail += f"; the likeliest token came {100 * shift:+.2f} points more often, {100 * finds:.1f} would be found"
    passed = p_value >= config.alpha / tests
    return Check("sampled at T = 0.6", passed, detail, p_value, len(means[0]), facts, judged=is_enough)


@dataclass
class _Hits:
    """Count of likeliest tokens among a server's tokens, and the expected count."""

    count: int = 0
    excess: float = 0.0
    variance: float = 0.0

    def take(self, reply: Reply) -> None:
        for token, found in zip(reply.tokens, reply.likeliest, strict=False):
            if found is None:
                continue
            chance = math.exp(found[1])
            self.count += 1
            self.excess += (token == found[0]) - chance
            self.variance += chance * (1 - chance)

    @property
    def shift(self) -> float:
        return self.excess / max(1, self.count)

    def p_value(self) -> float:
        return sum_p(self.excess, self.variance) if self.variance else 1.0


def _mean_hits(reply: Reply) -> list[float]:
    """Return the share of an answer's tokens that were the likeliest, or nothing if none can be judged."""
    hits = [token == found[0] for token, found in zip(reply.tokens, reply.likeliest, strict=False) if found]
    return [sum(hits) / len(hits)] if hits else []
