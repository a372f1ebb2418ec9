"""Made-up requests for policies that are tested without an engine."""

from collections.abc import Sequence

from volley.decode.work import Rule
from volley.policies.base import View


def views(
    limits: Sequence[int],
    rules: Sequence[Rule] | None = None,
    found: Sequence[list[float]] | None = None,
    **options: int,
) -> list[View]:
    """Requests 0, 1, …, greedy unless ``rules`` say otherwise; ``options`` are fields of every view."""
    count = len(limits)
    rows = zip(limits, rules or [Rule.GREEDY] * count, found or [[] for _ in range(count)], strict=True)
    return [View(i, rule, limit, limit, lookup_confidence=own, **options) for i, (limit, rule, own) in enumerate(rows)]
