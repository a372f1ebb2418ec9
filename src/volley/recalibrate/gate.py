"""Whether one drafter is better than another on recent traffic, by more than the error of saying so.

Drafters of one shape take equally long for a cycle, so tokens a second are in proportion to τ. Both are judged on the same
answers, which neither was trained on. The error is that of a ratio of sums over answers, paired.

No client decides alone. Answers are chosen in turn from all clients, and nobody's weigh more than those of all others together. A
gain must hold without any one of them; where there are few answers of others, these must not lose by it. A drafter that served
before takes over again as soon as it is surely better without any one client.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from volley.recalibrate.replay import Replayed
from volley.recalibrate.reservoir import Entry

RECENT_ROWS = 48
"""Answers that decide, at most; a gain on the newest of them is enough, so that a shift of the traffic is followed soon."""
NEWEST_ROWS = 16
LEAST_ROWS = 8
"""Fewer decide nothing."""
OTHERS = 6
"""Answers of other clients from which on a gain must hold for these alone; of fewer it must not be below 0."""
ERRORS = 2.0
"""Standard errors that a gain must exceed, over many answers (:func:`_errors`)."""
SURE_ERRORS = 3.0
"""The same where a part of the answers brings a former drafter back: that is looked at again and again."""
LEAST_GAIN = 0.01
RECENT_SECONDS = 86_400


@dataclass(frozen=True)
class Judgement:
    """``gain`` is the candidate's τ over the other's, minus 1; ``error`` its standard error."""

    gain: float
    error: float
    tau: float
    """The candidate's."""
    tau_before: float
    rows: int
    reason: str
    """Why it is not better; empty if it is."""

    @property
    def is_better(self) -> bool:
        return not self.reason

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_better": self.is_better}


def choose_recent(found: Sequence[Entry], trained_until: Collection[int], most: int = RECENT_ROWS) -> list[Entry]:
    """The newest answers, in turn from each client, that no drafter in question was trained on, oldest first.

    They are of the last day, or the last ``LEAST_ROWS`` where that has fewer. ``trained_until`` are the numbers of the last
    answers that their trainings could see; what is held out they never saw.
    """
    seen = max(trained_until, default=-1)
    newest = max((entry.seconds for entry in found), default=0)
    unseen = [entry for entry in found if entry.held_out or entry.number > seen]
    of_client: dict[str, list[Entry]] = defaultdict(list)
    for index, entry in enumerate(unseen):
        if entry.seconds > newest - RECENT_SECONDS or index >= len(unseen) - LEAST_ROWS:
            of_client[entry.client].append(entry)
    chosen: list[Entry] = []
    while of_client and len(chosen) < most:
        for client in list(of_client):
            chosen.append(of_client[client].pop())
            if not of_client[client]:
                del of_client[client]
    return sorted(chosen[:most], key=lambda entry: entry.number)


def judge(replayed: Sequence[Replayed], candidate: int, before: int) -> Judgement:
    """Drafter ``candidate`` against ``before``, by their places in ``Replayed.cycles``."""
    weights = _weights(replayed)
    gain, error = _ratio(replayed, weights, candidate, before)
    tokens = sum(row.tokens for row in replayed)
    taus = [tokens / max(1e-9, sum(row.cycles[drafter] for row in replayed)) for drafter in (candidate, before)]
    reason = _why_not(replayed, weights, candidate, before)
    return Judgement(gain, error, taus[0], taus[1], len(replayed), reason)


def judge_shift(replayed: Sequence[Replayed], newest: Collection[int], candidate: int, before: int) -> Judgement:
    """The judgement on the ``newest`` answers, by their numbers, if they let the candidate through; otherwise on all.

    All of them let nothing through that does worse on the newest.
    """
    late = judge([row for row in replayed if row.row.entry.number in newest], candidate, before)
    if late.is_better:
        return late
    found = judge(replayed, candidate, before)
    if found.is_better and late.gain <= 0:
        return replace(found, reason=f"on the newest answers the gain is {late.gain:+.1%}")
    return found


def judge_former(replayed: Sequence[Replayed], newest: Collection[int], former: int, now: int) -> Judgement:
    """Whether a drafter of before takes over again: as :func:`judge_shift` says, or where it is surely better without one client.

    So a client that a candidate suits does not keep it in use against all others. The judgement is on these then.
    """
    found = judge_shift(replayed, newest, former, now)
    for others in [] if found.is_better else _without_each(replayed):
        gain, error = _ratio(others, _weights(others), former, now)
        if len(others) >= OTHERS and gain > max(LEAST_GAIN, error * _errors(len(others), SURE_ERRORS)):
            return replace(judge(others, former, now), reason="")
    return found


def _why_not(replayed: Sequence[Replayed], weights: Sequence[float], candidate: int, before: int) -> str:
    if len(replayed) < LEAST_ROWS:
        return f"{len(replayed)} answers to judge on, {LEAST_ROWS} are needed"
    gain, error = _ratio(replayed, weights, candidate, before)
    error *= _errors(len(replayed))
    if gain <= max(LEAST_GAIN, error):
        return f"a gain of {gain:+.1%} is not more than its error (± {error:.1%})"
    for others in _without_each(replayed):
        gain, error = _ratio(others, _weights(others), candidate, before)
        if len(others) < OTHERS:
            if gain < 0:
                return f"without one client the gain is {gain:+.1%}, in {len(others)} answers"
            continue
        error *= _errors(len(others))
        if gain <= error:
            return f"without one client the gain is {gain:+.1%} (± {error:.1%})"
    return ""


def _without_each(replayed: Sequence[Replayed]) -> Iterator[list[Replayed]]:
    """The answers of all others than one client, for each client; nothing where there is only one."""
    for client in sorted({row.row.entry.client for row in replayed}):
        if others := [row for row in replayed if row.row.entry.client != client]:
            yield others


def _errors(rows: int, z: float = ERRORS) -> float:
    """Standard errors that are exceeded as seldom as ``z`` over many answers: Student's quantile, by Cornish and Fisher."""
    freedom = max(1, rows - 1)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _weights(replayed: Sequence[Replayed]) -> list[float]:
    """1, but less for a client that has more tokens than all others together, if these have enough answers."""
    tokens: dict[str, int] = defaultdict(int)
    for row in replayed:
        tokens[row.row.entry.client] += row.tokens
    if not tokens:
        return []
    most = max(tokens, key=tokens.__getitem__)
    others = sum(tokens.values()) - tokens[most]
    enough = sum(row.row.entry.client != most for row in replayed) >= OTHERS
    share = min(1.0, others / tokens[most]) if enough else 1.0
    return [share if row.row.entry.client == most else 1.0 for row in replayed]


def _ratio(replayed: Iterable[Replayed], weights: Iterable[float], candidate: int, before: int) -> tuple[float, float]:
    """Σ cycles of ``before`` over Σ cycles of ``candidate``, minus 1, and its standard error over answers."""
    pairs = [
        (weight * row.cycles[before], weight * row.cycles[candidate])
        for row, weight in zip(replayed, weights, strict=True)
    ]
    above, below = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    if below == 0:
        return 0.0, float("inf")
    ratio, count = above / below, len(pairs)
    if count < 2:
        return ratio - 1, float("inf")
    spread = sum((x - ratio * y) ** 2 for x, y in pairs)
    return ratio - 1, (count / (count - 1) * spread) ** 0.5 / below
