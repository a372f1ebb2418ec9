"""Each kind of drafter gets its model and its proposer."""

from pathlib import Path

import pytest

from tests import eagle
from tests.tiny import Pair
from volley import Engine
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.eagle_model import EagleModel
from volley.proposers.block import BlockProposer
from volley.proposers.eagle import EagleProposer


@pytest.mark.slow
def test_a_drafter_is_driven_by_what_it_is(pair: Pair, tmp_path: Path) -> None:
    block = Engine(pair.target, pair.drafter)
    assert isinstance(block.proposer, BlockProposer)
    assert block.proposer.model is block.draft_model
    chain = Engine(pair.target, load_drafter(eagle.checkpoint(tmp_path), pair.target, "bf16"))
    assert isinstance(chain.proposer, EagleProposer)
    assert isinstance(chain.draft_model, EagleModel)
    assert chain.proposer.model is chain.draft_model
    assert chain.block_size <= 8
