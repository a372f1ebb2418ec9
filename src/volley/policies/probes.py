"""Schedule probes: a plan that is not the best is tried now and then, so that no plan is judged by old measurements."""

WORTHWHILE = 1.03
"""Factor by which the expected rate of drafting must exceed that of plain decoding, because it is the best of several rough
estimates."""
_APART = 32  # least number of cycles between two probes of a plan
_LOSS = 0.0025  # share of the time that the probes of a plan may lose


def cycles_between(rate: float, seconds: float, best_rate: float, best_seconds: float) -> int:
    """Return the number of cycles between two probes of a plan that makes ``rate`` tokens per second in cycles of ``seconds``."""
    lost = max(0.0, 1 - rate / best_rate) * seconds / best_seconds
    return _APART + int(lost / _LOSS)
