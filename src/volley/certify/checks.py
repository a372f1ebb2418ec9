"""The checks of a certificate that need nothing but answers: each compares what was said with what must have been said."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from volley.bench.ties import TIE_UNITS, unit_in_last_place
from volley.certify.statistics import poisson_p
from volley.certify.subject import TOP, Reply, Subject, Token
from volley.types import SamplingParams

TIE = 0.15
"""Nats between two tokens that a target in bf16 may rank either way: two units in the last place of logits up to 16."""
STEPS = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Units in the last place of logits in bf16, from up to 256 down to up to 16."""
STEP_ERROR = 2e-3
"""Nats by which log-probabilities may be rounded as a server writes them."""
PENALTY = 1.5
TOP_P = 0.5
AT_ONCE = 8
ROUNDED_DRAWS = 0.1
"""How often a draw with a seed may come out otherwise because of rounding, as a share of how often it does with another seed."""
SELDOM = 1e-4
"""A chance that explains nothing."""


def tie_between(dtype: torch.dtype) -> float:
    """Nats between two tokens that a target of this data type may rank either way."""
    return max(TIE_UNITS * unit_in_last_place(16.0, dtype), 1e-3)


def tie_of(replies: Sequence[Reply]) -> float:
    """Nats between two tokens that a server may rank either way, by the steps in which its log-probabilities move.

    Logits in bf16 above 16 move in larger steps than ``TIE`` allows for. The gap of the two likeliest tokens is a multiple of the
    step then: of the largest step that more gaps than half are multiples of, as many are of twice the step by chance.
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
    """What was looked at and what came of it. ``p_value`` is ``None`` where nothing is left to chance.

    What could not be ``judged`` fails nothing.
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
    """Who is asked what; ``plain`` decodes without drafts, where there is such a one."""

    subject: Subject
    plain: Subject | None
    prompts: Sequence[Any]
    long_prompts: Sequence[Any]
    """The prompts, each with a beginning of an answer: long enough for whole pages of a prefix cache."""
    fresh: Callable[[Sequence[Any], int], list[Any]]
    """The prompts so that no cache can know them, different for each number."""
    greedy: SamplingParams
    tie: float = TIE
    exact: bool = False
    """Whether rounding never tips a draw: in fp32, or where logits are the same bits whatever else is in the pass."""

    def ask(self, params: SamplingParams | Sequence[SamplingParams]) -> list[Reply]:
        """The prompts at once: what that may change is a check of its own."""
        return self.subject.ask(self.prompts, params, min(AT_ONCE, len(self.prompts)))

    def part_where(self, mine: Reply, theirs: Reply) -> int | None:
        """Where two greedy answers part without a tie, or ``None``."""
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
        if known and all(len(top) == 1 for top in known):  # the other token has what is left, at most
            likeliest = max(max(top.values()) for top in known)
            return None if likeliest <= math.log(0.5) + self.tie else at
        return at


def compare(name: str, what: str, questions: Questions, mine: Sequence[Reply], theirs: Sequence[Reply]) -> Check:
    """Greedy answers that must be equal."""
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
    """Greedy answers, alone and cold, against plain decoding, or against the server's own log-probabilities."""
    questions.subject.forget()
    mine = questions.subject.ask(questions.prompts, questions.greedy)
    if questions.plain is not None:
        theirs = questions.plain.ask(questions.prompts, questions.greedy)
        return compare("greedy", "as plain decoding's, except at ties", questions, mine, theirs)
    return _most_probable("greedy", questions, mine)


def _most_probable(name: str, questions: Questions, replies: Sequence[Reply]) -> Check:
    tokens = sum(bool(top) for reply in replies for top in reply.top)
    if not tokens:
        return Check(name, True, "the server tells no log-probabilities of the likeliest tokens", judged=False)
    for index, reply in enumerate(replies):
        for at, (token, top) in enumerate(zip(reply.tokens, reply.top, strict=False)):
            if top and top.get(token, -math.inf) < max(top.values()) - questions.tie:
                return Check(
                    name, False, f"token {at} of answer {index} ({token!r}) is not the likeliest", sample=tokens
                )
    return Check(name, True, f"{len(replies)} answers, {tokens} tokens: each the likeliest, or tied", sample=tokens)


def check_prefix_cache(questions: Questions) -> Check:
    """Each long prompt cold, then warm. Not judged where the cache is known to have been of no use."""
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
    """The same prompts alone and at once."""
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
    """Sampling that leaves only the likeliest token is greedy decoding."""
    params = replace(questions.greedy, temperature=1.0, **narrow)
    sampled = questions.ask(params)
    greedy = questions.ask(questions.greedy)
    return compare(name, "as greedy where one token is left", questions, sampled, greedy)


def check_top_p(questions: Questions) -> Check:
    """No sampled token lies behind the likeliest ones that make up ``TOP_P``."""
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
    """An answer ends before the stop text, and is otherwise the same."""
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
    """A seed gives the same answer again, and another seed another one."""
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
        could_fail = poisson_p(differs, ROUNDED_DRAWS * differs) <= SELDOM  # if seeds did nothing
    often = _often(parted / max(1, compared)), _often(share)
    detail = f"{repeated} of {len(first)} answers came again; they part {often[0]} with the same seed, {often[1]} with another"
    return Check("seeds", passed, detail, judged=could_fail or not passed)


def _chance_alike(replies: Sequence[Reply]) -> float:
    """The chance that all of these answers are drawn once more, by their own log-probabilities."""
    chances = [sum(math.exp(2 * value) for value in top.values()) for reply in replies for top in reply.top if top]
    return math.prod(min(1.0, chance) for chance in chances)


def _parted(mine: Sequence[Reply], theirs: Sequence[Reply]) -> tuple[int, int]:
    """How many tokens were others, of how many with equal tokens before them."""
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
    """Where an answer's own log-probabilities say that a penalty changes the next token, it does.

    Some servers count a prompt's tokens as well: an answer of one that leaves out a word of its prompt before is not judged.
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
    """Where penalties change a greedy answer first, and to what; ``None`` where they never do or a tie comes first."""
    counts: dict[Token, int] = {}
    for at, (token, top) in enumerate(zip(reply.tokens, reply.top, strict=False)):
        values = {t: v - PENALTY * (counts.get(t, 0) + (t in counts)) for t, v in top.items()}
        ranked = sorted(values, key=lambda t: values[t], reverse=True)
        if len(ranked) < 2 or values[ranked[0]] - max(values[ranked[1]], min(top.values())) <= tie:
            return None  # a tie, or a token that is not listed may be the likeliest
        if ranked[0] != token:
            return at, ranked[0]
        counts[token] = counts.get(token, 0) + 1
    return None


def greedy_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, logprobs=True, top_logprobs=TOP)
