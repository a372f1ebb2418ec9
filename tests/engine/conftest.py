"""Policies weigh modelled costs here, not this machine's: no test reads a clock, and goodput, the default, drafts."""

import pytest

from tests.costs import settle


@pytest.fixture(autouse=True)
def _modelled_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch, token=0.01)
