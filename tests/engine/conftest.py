"""Policies weigh modelled costs here, not this machine's: no test reads a clock, and goodput, the default, drafts.

The scheduler's clock stands too, so that prompts never hold drafts up and share their passes; ``test_scheduler`` moves it.
"""

from functools import partial

import pytest

from tests.costs import settle
from volley.engine.scheduler import Scheduler


@pytest.fixture(autouse=True)
def _modelled_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch, token=0.01)


@pytest.fixture(autouse=True)
def _standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volley.engine.core.Scheduler", partial(Scheduler, clock=lambda: 0.0))
