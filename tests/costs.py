"""Made-up costs, so that what a policy decides does not depend on how fast this machine is today."""

import pytest

from volley.engine.runner import Runner
from volley.policies.cost import PassCost
from volley.policies.ledger import Ledger
from volley.proposers.block import BlockProposer
from volley.proposers.eagle import EagleProposer


def settle(monkeypatch: pytest.MonkeyPatch, *, draft: float = 0.1, token: float = 0.1) -> None:
    """A target pass takes 1 and ``token`` for each token, a draft pass ``draft``, whatever the clock says."""
    monkeypatch.setattr(Runner, "seconds", lambda self, tokens, requests: 1 + token * tokens)
    for proposer in (BlockProposer, EagleProposer):
        monkeypatch.setattr(proposer, "seconds", lambda self, tokens, requests: draft)
    monkeypatch.setattr(PassCost, "observe", lambda *_: None)
    monkeypatch.setattr(Ledger, "is_spent", False)  # it goes by the clock
