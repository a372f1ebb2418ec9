"""Test of whether one drafter is significantly better than another on recent traffic.

Drafters of one shape need the same time per cycle, so tokens per second are proportional to τ. Both are judged on the same
answers, which neither was trained on. The error is that of a paired ratio of sums over answers.

No client decides alone. Answers are chosen from all clients in turn, and no client's answers weigh more than those of all others
together. A gain must hold without any one client; if there are few answers of others, they must not lose by it. A former drafter
returns as soon as it is significantly better without any one client.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from volley.recalibrate.replay import Replayed
from volley.recalibrate.reservoir import Entry

RECENT_ROWS = 48
"""Maximum number of answers that decide. A gain on the newest of them suffices, so that a shift of the traffic is followed
soon."""
NEWEST_ROWS = 16
LEAST_ROWS = 8
"""Minimum number of answers that decide."""
OTHERS = 6
"""Number of other clients' answers from which a gain must hold for them alone; with fewer it must not be negative."""
ERRORS = 2.0
"""Standard errors that a gain must exceed over many answers (:func:`_errors`)."""
SURE_ERRORS = 3.0
"""Standard errors for the return of a former drafter on part of the answers, which is tested repeatedly."""
LEAST_GAIN = 0.01
RECENT_SECONDS = 86_400


@dataclass(frozen=True)
class Judgement:
    """Comparison of two drafters. ``gain`` is the candidate's τ over the other's, minus 1; ``error`` is its standard error."""

    gain: float
    error: float
    tau: float
    """Candidate's τ."""
    tau_before: float
    rows: int
    reason: str
    """Reason why it is not better; empty if it is."""

    @property
    def is_better(self) -> bool:
        return not self.reason

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_better": self.is_better}


def choose_recent(found: Sequence[Entry], trained_until: Collection[int], most: int = RECENT_ROWS) -> list[Entry]:
    """Return the newest answers, from each client in turn, that no drafter in question was trained on, oldest first.

    They are from the last day, or the last ``LEAST_ROWS`` if that day has fewer. ``trained_until`` holds the numbers of the last
    answers that the trainings could see; held-out answers were never seen.
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
    """Compare drafter ``candidate`` with ``before``, given their indices in ``Replayed.cycles``."""
    weights = _weights(replayed)
    gain, error = _ratio(replayed, weights, candidate, before)
    tokens = sum(row.tokens for row in replayed)
    taus = [tokens / max(1e-9, sum(row.cycles[drafter] for row in replayed)) for drafter in (candidate, before)]
    reason = _why_not(replayed, weights, candidate, before)
    return Judgement(gain, error, taus[0], taus[1], len(replayed), reason)


def judge_shift(replayed: Sequence[Replayed], newest: Collection[int], candidate: int, before: int) -> Judgement:
    """Return the judgement on the ``newest`` answers, given by number, if they accept the candidate; otherwise on all answers.

    A candidate that does worse on the newest answers is never accepted.
    """
    late = judge([row for row in replayed if row.row.entry.number in newest], candidate, before)
    if late.is_better:
        return late
    found = judge(replayed, candidate, before)
    if found.is_better and late.gain <= 0:
        return replace(found, reason=f"on the newest answers the gain is {late.gain:+.1%}")
    return found


def judge_former(replayed: Sequence[Replayed], newest: Collection[int], former: int, now: int) -> Judgement:
    """Judge whether a former drafter returns: by :func:`judge_shift`, or if it is significantly better without one client.

    A client that a candidate suits thus cannot keep it in use against all others. The judgement is then on the others' answers.
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
    """Yield the answers without one client, for each client; nothing if there is only one."""
    for client in sorted({row.row.entry.client for row in replayed}):
        if others := [row for row in replayed if row.row.entry.client != client]:
            yield others


def _errors(rows: int, z: float = ERRORS) -> float:
    """Return the bound that few answers exceed as rarely as many exceed ``z``: Student's quantile, by Cornish and Fisher."""
    freedom = max(1, rows - 1)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _weights(replayed: Sequence[Replayed]) -> list[float]:
    """Return weights of 1, or less for a client with more tokens than all others together, if these have enough answers."""
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
    """Return Σ cycles of ``before`` over Σ cycles of ``candidate``, minus 1, and its standard error over answers."""
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
