"""Which draft window a training finds to be enough, and prompts that it cannot decode."""

import pytest
import torch

from tests.conftest import TinyPair
from volley.models.drafters.drafter import Drafter
from volley.train.evaluate import choose_window, evaluate_tau

BLOCKS, SLOTS, LONGEST = 400, 5, 600
ANCHORS = torch.linspace(1, LONGEST - 1, BLOCKS).long()


def right(shares: float) -> torch.Tensor:
    """Which slots are right: the first ones of each block, so many that τ is ``1 + SLOTS · shares`` on average."""
    count = torch.arange(BLOCKS * SLOTS).view(BLOCKS, SLOTS) % SLOTS
    return count < torch.rand(BLOCKS, 1, generator=torch.Generator().manual_seed(0)) * 2 * shares * SLOTS


@pytest.mark.parametrize(
    ("narrow", "wide", "found"),
    [(0.5, 0.5, 128), (0.4, 0.5, 256), (0.4, 0.4, LONGEST)],
    ids=["the narrowest is enough", "a wider one is", "none is"],
)
def test_the_narrowest_window_that_keeps_tau(narrow: float, wide: float, found: int) -> None:
    valid = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
    within = {size: right(share)[size < ANCHORS] for size, share in ((256, wide), (128, narrow))}
    assert choose_window(right(0.5), within, valid, ANCHORS, LONGEST) == found


def test_a_window_is_judged_by_blocks_that_have_more_context() -> None:
    """The window loses where the context is longer, however many short contexts it keeps whole."""
    valid = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
    whole = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
    cut = whole[ANCHORS > 500]
    assert choose_window(whole, {500: ~cut}, valid, ANCHORS, LONGEST) == LONGEST
    assert choose_window(whole, {500: cut}, valid, ANCHORS, LONGEST) == 500
    few = valid & (ANCHORS <= 128)[:, None]
    assert choose_window(whole, {128: whole[ANCHORS > 128]}, few, ANCHORS, LONGEST) == LONGEST, (
        "no block shows that it is enough"
    )


def test_prompts_that_fit_in_no_engine_are_told_of(tiny_pair: TinyPair) -> None:
    drafter, target = Drafter.from_pretrained(tiny_pair.drafter, torch.float32), str(tiny_pair.target)
    with pytest.warns(UserWarning, match="no held-out prompt leaves 8 of the 1024 tokens .* give shorter prompts"):
        found = evaluate_tau(drafter, target, [[5] * 1020], max_tokens=8, dtype=torch.float32, device="cpu")
    assert found["cycles"] == 0
