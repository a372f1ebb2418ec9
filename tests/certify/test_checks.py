"""A check that cannot judge neither passes nor fails."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from volley.certify.certificate import Certificate
from volley.certify.checks import (
    PENALTY,
    TIE,
    Check,
    Questions,
    check_greedy,
    check_penalties,
    check_prefix_cache,
    check_seeds,
    greedy_params,
    tie_of,
)
from volley.certify.subject import Reply
from volley.params import SamplingParams


def reply(tokens: str, *top: dict[str, float]) -> Reply:
    rows = (*top, *({token: -0.1, "~": -9.0} for token in tokens[len(top) :]))
    return Reply(tuple(tokens), tokens, "stop", tuple(dict(row) for row in rows))


def questions_of(subject: Any, prompts: Sequence[str] = ("x",), plain: Any = None, **options: Any) -> Questions:
    return Questions(subject, plain, prompts, prompts, lambda asked, _: list(asked), greedy_params(8), **options)


class Repeating:
    """Says one thing without penalties, and another with them."""

    def __init__(self, plain: Reply, penalised: str) -> None:
        self.plain, self.penalised = plain, reply(penalised)

    def ask(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams], concurrency: int = 1
    ) -> list[Reply]:
        assert isinstance(params, SamplingParams)
        return [self.penalised if params.presence_penalty else self.plain for _ in prompts]

    def forget(self) -> None:
        """Nothing is kept."""


REPEATS = reply("aba", {"a": -0.1, "b": -3.0}, {"b": -0.1, "c": -3.0}, {"a": -0.1, "c": -0.1 - PENALTY, "~": -9.0})
"""The second "a" gives way to "c"."""


@pytest.mark.parametrize(
    ("prompt", "plain", "penalised", "outcome"),
    [
        ("xyz", REPEATS, "abc", "passed"),
        ("xyz", REPEATS, "aba", "FAILED"),
        ("xyz", REPEATS, "ab", "FAILED"),
        ("xyz", REPEATS, "acc", "FAILED"),
        ("xbz", REPEATS, "acc", "not judged"),  # a server that counts the prompt's tokens too
        ("xyz", reply("abc"), "abc", "not judged"),  # nothing comes twice
    ],
)
def test_penalties_are_judged_where_it_is_known_what_they_change(
    prompt: str, plain: Reply, penalised: str, outcome: str
) -> None:
    subject = Repeating(plain, penalised)
    found = check_penalties(questions_of(subject, [prompt]))
    assert found.outcome == outcome
    assert ("give more prompts" in found.detail) == (plain is not REPEATS or prompt == "xbz")


class Seeded:
    """Draws letters by seed; ``again`` is what the second time of asking draws, of the first ``tipped`` prompts."""

    sure = -0.7

    def __init__(self, again: str, other: str, tipped: int = 1) -> None:
        same = "abcdefghijklmnopqrst"
        self.texts = iter([[same] * 12, [again] * tipped + [same] * (12 - tipped), [other] * 12])

    def ask(self, prompts: Sequence[Any], params: Any, concurrency: int = 1) -> list[Reply]:
        texts = next(self.texts)[: len(prompts)]
        return [reply(text, *({letter: self.sure, "~": -9.0} for letter in text)) for text in texts]


@pytest.mark.parametrize(
    ("again", "other", "tipped", "exact", "outcome"),
    [
        ("abcdefghijklmnopqrst", "zbcd", 0, True, "passed"),
        ("abcdefghijklmnopqrsz", "zbcd", 1, True, "FAILED"),
        ("abcdefghijklmnopqrsz", "zbcd", 12, False, "passed"),  # rounding may tip a draw
        ("abcdefghijklmzopqrst", "abcdefghijzl", 3, False, "passed"),  # as chance has it, in few answers more often
        ("abcdefghijzlmnopqrst", "abcdefghijzl", 12, False, "FAILED"),  # but as seldom as that
        ("abcdefghijklmnopqrst", "abcdefghijklmnopqrst", 0, False, "FAILED"),  # the seed changes nothing
    ],
)
def test_a_seed_gives_an_answer_again_but_for_rounding(
    again: str, other: str, tipped: int, exact: bool, outcome: str
) -> None:
    questions = questions_of(Seeded(again, other, tipped), ["x"] * 12, exact=exact)
    assert check_seeds(questions).outcome == outcome


def test_seeds_of_few_answers_that_rounding_may_tip_are_not_judged() -> None:
    """Three answers that all part would prove nothing."""
    subject = Seeded("abcdefghijzlmnopqrst", "abcdefghijzl", 3)
    assert check_seeds(questions_of(subject, ["x"] * 3)).outcome == "not judged"


def test_seeds_of_answers_that_are_all_but_certain_are_not_judged() -> None:
    subject = Seeded("abcdefghijklmnopqrst", "abcdefghijklmnopqrst")
    subject.sure = -0.001
    assert check_seeds(questions_of(subject)).outcome == "not judged"


class Caching:
    """Answers alike, and says how much of each second prompt it has found in its cache."""

    def __init__(self, cached: int | None, warm: str = "abc") -> None:
        self.cached, self.warm = cached, warm

    def ask(self, prompts: Sequence[Any], params: Any, concurrency: int = 1) -> list[Reply]:
        answers = [("abc", None if self.cached is None else 0), (self.warm, self.cached)]
        return [replace(reply(answers[i % 2][0]), cached=answers[i % 2][1]) for i, _ in enumerate(prompts)]

    def forget(self) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize(
    ("cached", "warm", "outcome", "told"),
    [
        (32, "abc", "passed", 64),
        (0, "abc", "not judged", 0),
        (None, "abc", "passed", "not reported"),
        (32, "abd", "FAILED", 64),
        (0, "abd", "FAILED", 0),
    ],
)
def test_a_prefix_cache_is_judged_where_it_was_of_use(
    cached: int | None, warm: str, outcome: str, told: int | str
) -> None:
    found = check_prefix_cache(questions_of(Caching(cached, warm), ["x", "y"]))
    assert (found.outcome, found.facts["cached_tokens"]) == (outcome, told)


def in_steps(*steps: float) -> list[Reply]:
    """Replies whose logits move in these steps in turn."""
    rng = Random(0)
    tops = [{"a": -0.3, "b": -0.3 - steps[i % len(steps)] * rng.randrange(1, 30), "~": -9.123} for i in range(200)]
    return [reply("a" * 200, *tops)]


@pytest.mark.parametrize(
    ("steps", "tie"), [((0.25,), 0.5), ((0.125,), 0.25), ((0.25, 0.125), 0.5), ((0.0625,), TIE), ((0.0317,), TIE)]
)
def test_ties_are_as_wide_as_the_steps_of_a_servers_logits(steps: tuple[float, ...], tie: float) -> None:
    assert tie_of(in_steps(*steps)) == tie
    rng = Random(1)
    assert tie_of([reply("a" * 200, *({"a": -0.1, "b": -0.1 - 5 * rng.random()} for _ in range(200)))]) == TIE
    assert tie_of([]) == TIE


@pytest.mark.parametrize(("gap", "outcome"), [(0.5, "passed"), (0.75, "FAILED")])
def test_a_fault_beyond_the_rounding_of_a_server_is_found(gap: float, outcome: str) -> None:
    subject = Repeating(reply("ab", {"a": -0.1, "b": -3.0}, {"b": -0.7 - gap, "c": -0.7}), "ab")
    assert check_greedy(questions_of(subject, tie=tie_of(in_steps(0.25)))).outcome == outcome


@pytest.mark.parametrize(("likeliest", "outcome"), [(-0.72, "passed"), (-0.3, "FAILED")])
def test_with_one_log_probability_a_token_that_leaves_no_room_for_another_is_no_tie(
    likeliest: float, outcome: str
) -> None:
    mine, plain = (Repeating(Reply((token,), token, "stop", ({token: likeliest},)), "") for token in "ab")
    assert check_greedy(questions_of(mine, plain=plain)).outcome == outcome


def test_a_verdict_needs_greedy_and_sampled_tokens_that_could_be_judged() -> None:
    greedy, sampled, failed = Check("greedy", True, ""), Check("sampled", True, ""), Check("n", False, "")
    unjudged = Check("sampled", True, "0 tokens", judged=False)
    verdicts = [
        Certificate({}, checks, {}).verdict
        for checks in ([greedy, sampled], [greedy, unjudged], [greedy], [greedy, sampled, failed], [greedy, failed])
    ]
    assert verdicts == ["lossless", "undecided", "undecided", "not lossless", "not lossless"]
