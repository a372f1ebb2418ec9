"""Checks of a certificate that need only answers: each compares an answer with what it must be."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from volley.bench.ties import TIE_UNITS, unit_in_last_place
from volley.certify.statistics import poisson_p
from volley.certify.subject import TOP, Reply, Subject, Token
from volley.params import SamplingParams

TIE = 0.15
"""Largest gap in nats of two tokens that a bf16 target may rank either way: two units in the last place of logits up to 16."""
STEPS = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Units in the last place of bf16 logits, from logits up to 256 down to logits up to 16."""
STEP_ERROR = 2e-3
"""Rounding error, in nats, of log-probabilities as a server writes them."""
PENALTY = 1.5
TOP_P = 0.5
AT_ONCE = 8
ROUNDED_DRAWS = 0.1
"""Rate at which rounding may change a draw with the same seed, relative to the rate with another seed."""
SELDOM = 1e-4
"""Probability below which chance is not an explanation."""


def tie_between(dtype: torch.dtype) -> float:
    """Return the largest gap in nats of two tokens that a target of this data type may rank either way."""
    return max(TIE_UNITS * unit_in_last_place(16.0, dtype), 1e-3)


def tie_of(replies: Sequence[Reply]) -> float:
    """Return the largest gap in nats of two tokens that a server may rank either way, from the steps of its log-probabilities.

    bf16 logits above 16 move in larger steps than ``TIE`` allows for. The gap of the two likeliest tokens is then a multiple of
    the step. The step is the largest one that divides significantly more than half of the gaps: chance alone makes half of them
    multiples of twice the true step.
    """
    gaps = [
        gap
        for reply in replies
        for first, second in (sorted(top.values())[:-3:-1] for top in reply.top if len(top) > 1)
        if (gap := first - second) > STEP_ERROR
    ]
    enough = len(gaps) / 2 + 1.5 * math.sqrt(len(gaps))
    for step in STEPS:
        if sum(abs(gap - step * round(gap / step)) < STEP_ERROR for gap in gaps) > enough:
            return max(TIE, TIE_UNITS * step)
    return TIE


@dataclass
class Check:
    """Result of one check. ``p_value`` is ``None`` for a check without randomness.

    A check that could not be ``judged`` does not fail.
    """

    name: str
    passed: bool
    detail: str
    p_value: float | None = None
    sample: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    judged: bool = True

    @property
    def outcome(self) -> str:
        return "FAILED" if not self.passed else "passed" if self.judged else "not judged"


@dataclass(frozen=True)
class Questions:
    """Subject and prompts of the checks. ``plain`` is a subject that decodes without drafts, if there is one."""

    subject: Subject
    plain: Subject | None
    prompts: Sequence[Any]
    long_prompts: Sequence[Any]
    """Prompts followed by the start of an answer, long enough to fill whole pages of a prefix cache."""
    fresh: Callable[[Sequence[Any], int], list[Any]]
    """Function that returns prompts that no cache can contain, different for each number."""
    greedy: SamplingParams
    tie: float = TIE
    exact: bool = False
    """True if rounding never changes a draw: in fp32, or with batch-invariant logits."""

    def ask(self, params: SamplingParams | Sequence[SamplingParams]) -> list[Reply]:
        """Ask all prompts at once. Another check compares this with asking one at a time."""
        return self.subject.ask(self.prompts, params, min(AT_ONCE, len(self.prompts)))

    def part_where(self, mine: Reply, theirs: Reply) -> int | None:
        """Return the index at which two greedy answers differ without a tie, or ``None``."""
        at = next(
            (i for i, pair in enumerate(zip(mine.tokens, theirs.tokens, strict=False)) if pair[0] != pair[1]), None
        )
        if at is None:
            return None if len(mine.tokens) == len(theirs.tokens) else min(len(mine.tokens), len(theirs.tokens))
        pair = (mine.tokens[at], theirs.tokens[at])
        for reply in (theirs, mine):
            if at < len(reply.top) and all(token in reply.top[at] for token in pair):
                return None if abs(reply.top[at][pair[0]] - reply.top[at][pair[1]]) <= self.tie else at
        known = [reply.top[at] for reply in (theirs, mine) if at < len(reply.top)]
        if known and all(len(top) == 1 for top in known):  # the other token has at most the remaining probability
            likeliest = max(max(top.values()) for top in known)
            return None if likeliest <= math.log(0.5) + self.tie else at
        return at


def compare(name: str, what: str, questions: Questions, mine: Sequence[Reply], theirs: Sequence[Reply]) -> Check:
    """Compare greedy answers that must be equal."""
    parted = [(i, questions.part_where(*pair)) for i, pair in enumerate(zip(mine, theirs, strict=True))]
    wrong = [(i, at) for i, at in parted if at is not None]
    tokens = sum(len(reply.tokens) for reply in mine)
    if not wrong:
        return Check(name, True, f"{len(mine)} answers, {tokens} tokens: {what}", sample=tokens)
    index, at = wrong[0]
    shown = [repr(reply.tokens[at]) if at < len(reply.tokens) else "the end" for reply in (mine[index], theirs[index])]
    detail = f"{len(wrong)} of {len(mine)} answers differ; the first at token {at}: {shown[0]}, not {shown[1]}"
    return Check(name, False, detail, sample=tokens, facts={"prompt": index, "token": at})


def check_greedy(questions: Questions) -> Check:
    """Check greedy answers, asked one at a time and uncached, against plain decoding or the server's own log-probabilities."""
    questions.subject.forget()
    mine = questions.subject.ask(questions.prompts, questions.greedy)
    if questions.plain is not None:
        theirs = questions.plain.ask(questions.prompts, questions.greedy)
        return compare("greedy", "as plain decoding's, except at ties", questions, mine, theirs)
    return _most_probable("greedy", questions, mine)


def _most_probable(name: str, questions: Questions, replies: Sequence[Reply]) -> Check:
    tokens = sum(bool(top) for reply in replies for top in reply.top)
    if not tokens:
        return Check(name, True, "the server returns no log-probabilities of the likeliest tokens", judged=False)
    for index, reply in enumerate(replies):
        for at, (token, top) in enumerate(zip(reply.tokens, reply.top, strict=False)):
            if top and top.get(token, -math.inf) < max(top.values()) - questions.tie:
                return Check(
                    name, False, f"token {at} of answer {index} ({token!r}) is not the likeliest", sample=tokens
                )
    return Check(name, True, f"{len(replies)} answers, {tokens} tokens: each the likeliest, or tied", sample=tokens)


def check_prefix_cache(questions: Questions) -> Check:
    """Ask each long prompt uncached, then cached. The check is not judged if the cache is known to have found nothing."""
    prompts = questions.fresh(questions.long_prompts, 1)
    questions.subject.forget()
    replies = questions.subject.ask([prompt for prompt in prompts for _ in range(2)], questions.greedy)
    cold, warm = replies[::2], replies[1::2]
    check = compare("prefix cache", "the same warm as cold", questions, warm, cold)
    cached = [reply.cached for reply in warm if reply.cached is not None]
    check.facts["cached_tokens"] = sum(cached) if cached else "not reported"
    if check.passed and cached and not sum(cached):
        check.judged, check.detail = False, "no prompt was found in the cache the second time"
    elif check.passed:
        found = f"{sum(cached)} tokens of prompts" if cached else "how much is not reported"
        check.detail += f"; from the cache: {found}"
    return check


def check_concurrency(questions: Questions, concurrency: int) -> Check:
    """Ask prompts one at a time and then at once, and compare the answers."""
    prompts = questions.fresh([questions.prompts[i % len(questions.prompts)] for i in range(concurrency)], 2)
    different = {str(prompt): prompt for prompt in prompts}
    questions.subject.forget()
    answers = questions.subject.ask(list(different.values()), questions.greedy)
    replies = dict(zip(different, answers, strict=True))
    alone = [replies[str(prompt)] for prompt in prompts]
    questions.subject.forget()
    together = questions.subject.ask(prompts, questions.greedy, concurrency)
    return compare(f"concurrency {concurrency}", "the same at once as alone", questions, together, alone)


def check_narrow(questions: Questions, name: str, **narrow: Any) -> Check:
    """Check that sampling from the likeliest token alone equals greedy decoding."""
    params = replace(questions.greedy, temperature=1.0, **narrow)
    sampled = questions.ask(params)
    greedy = questions.ask(questions.greedy)
    return compare(name, "as greedy where one token is left", questions, sampled, greedy)


def check_top_p(questions: Questions) -> Check:
    """Check that every sampled token is among the likeliest ones that make up ``TOP_P``."""
    narrow = check_narrow(questions, "top_p", top_p=1e-6)
    if not narrow.passed:
        return narrow
    replies = questions.ask(replace(questions.greedy, temperature=1.0, top_p=TOP_P))
    tokens = sum(len(reply.top) for reply in replies)
    for reply in replies:
        for token, top in zip(reply.tokens, reply.top, strict=False):
            own = top.get(token, min(top.values(), default=0.0))
            before = sum(math.exp(value) for value in top.values() if value > own)
            if before > TOP_P + 0.05:
                return Check(
                    "top_p", False, f"{token!r} was drawn behind {before:.0%} of the probability", sample=tokens
                )
    return Check("top_p", True, f"{tokens} tokens within the likeliest {TOP_P:.0%}", sample=tokens)


def check_stop(questions: Questions) -> Check:
    """Check that an answer ends before the stop text and is otherwise unchanged."""
    (whole,) = questions.subject.ask(questions.prompts[:1], questions.greedy)
    middle = whole.text[len(whole.text) // 2 :].strip()[:4]
    if not middle:
        return Check("stop", True, "the answer is too short to be stopped", judged=False)
    (cut,) = questions.subject.ask(questions.prompts[:1], replace(questions.greedy, stop=(middle,)))
    expected = whole.text.split(middle)[0]
    passed = cut.text == expected
    return Check(
        "stop", passed, "the text before it" if passed else f"{cut.text[-20:]!r} instead of {expected[-20:]!r}"
    )


def check_seeds(questions: Questions) -> Check:
    """Check that a seed repeats its answer and another seed changes it."""
    params = [replace(questions.greedy, temperature=1.0, seed=seed) for seed in range(len(questions.prompts))]
    first = questions.ask(params)
    again = questions.ask(params)
    other = questions.ask([replace(one, seed=10**6 + i) for i, one in enumerate(params)])
    repeated = sum(a.tokens == b.tokens for a, b in zip(first, again, strict=True))
    (parted, compared), (differs, others) = _parted(first, again), _parted(first, other)
    if not parted and not differs and _chance_alike(first) > SELDOM:
        return Check("seeds", True, "the answers are so sure that another seed need not change one", judged=False)
    share = differs / max(1, others)
    passed, could_fail = differs > 0 and parted == 0, True
    if differs and not questions.exact:
        passed = poisson_p(parted, ROUNDED_DRAWS * share * compared) > SELDOM
        could_fail = poisson_p(differs, ROUNDED_DRAWS * differs) <= SELDOM  # if seeds had no effect
    often = _often(parted / max(1, compared)), _often(share)
    detail = f"{repeated} of {len(first)} answers came again; they part {often[0]} with the same seed, {often[1]} with another"
    return Check("seeds", passed, detail, judged=could_fail or not passed)


def _chance_alike(replies: Sequence[Reply]) -> float:
    """Return the probability that all of these answers are drawn again, by their own log-probabilities."""
    chances = [sum(math.exp(2 * value) for value in top.values()) for reply in replies for top in reply.top if top]
    return math.prod(min(1.0, chance) for chance in chances)


def _parted(mine: Sequence[Reply], theirs: Sequence[Reply]) -> tuple[int, int]:
    """Return the number of differing tokens, and the number of tokens compared: those that follow equal tokens."""
    parted = compared = 0
    for one, other in zip(mine, theirs, strict=True):
        pairs = list(zip_longest(one.tokens, other.tokens))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        parted += at is not None
        compared += len(pairs) if at is None else at + 1
    return parted, compared


def _often(share: float) -> str:
    return f"once in {1 / share:.0f} tokens" if share else "never"


def check_penalties(questions: Questions) -> Check:
    """Check that a penalty changes the next token if the answer's own log-probabilities say so.

    Some servers count the prompt's tokens too. If the answer then avoids a word of its prompt earlier, it is not judged.
    """
    plain = questions.ask(questions.greedy)
    params = replace(questions.greedy, presence_penalty=PENALTY, frequency_penalty=PENALTY)
    judged = 0
    for prompt, before, after in zip(questions.prompts, plain, questions.ask(params), strict=True):
        found = _first_change(before, questions.tie)
        if found is None:
            continue
        at, token = found
        parted = next((i for i in range(at) if after.tokens[i : i + 1] != before.tokens[i : i + 1]), at)
        if parted < at and isinstance(prompt, str) and str(before.tokens[parted]) in prompt:
            continue
        judged += 1
        if parted < at or after.tokens[at : at + 1] == before.tokens[at : at + 1] or at >= len(after.tokens):
            want = token if parted == at else before.tokens[parted]
            got = after.tokens[parted] if parted < len(after.tokens) else "the end"
            return Check(
                "penalties", False, f"token {parted} should be {want!r} after penalties and is {got!r}", sample=judged
            )
    if not judged:
        return Check(
            "penalties",
            True,
            f"of none of {len(plain)} answers is it known where penalties change it; give more prompts, or longer answers",
            judged=False,
        )
    return Check("penalties", True, f"{judged} answers change where penalties make them", sample=judged)


def _first_change(reply: Reply, tie: float) -> tuple[int, Token] | None:
    """Return the first index at which penalties change a greedy answer and the token there, or ``None`` if they never do or a
    tie comes first."""
    counts: dict[Token, int] = {}
    for at, (token, top) in enumerate(zip(reply.tokens, reply.top, strict=False)):
        values = {t: v - PENALTY * (counts.get(t, 0) + (t in counts)) for t, v in top.items()}
        ranked = sorted(values, key=lambda t: values[t], reverse=True)
        if len(ranked) < 2 or values[ranked[0]] - max(values[ranked[1]], min(top.values())) <= tie:
            return None  # a tie, or an unlisted token may be the likeliest
        if ranked[0] != token:
            return at, ranked[0]
        counts[token] = counts.get(token, 0) + 1
    return None


def greedy_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, logprobs=True, top_logprobs=TOP)
