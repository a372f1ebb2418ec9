"""The context that the blocks of a training step see."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests.tiny import drafter_config, random_drafter
from volley.train.features import FrozenTarget
from volley.train.options import TrainConfig
from volley.train.step import BlockForward, StepFunction

LENGTH, WINDOW, BLOCK = 12, 3, 4
ANCHOR = 10
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("types", [(SLIDING, SLIDING), (FULL, SLIDING), (SLIDING, FULL), (FULL, FULL)])
@pytest.mark.parametrize("bound", [None, 5])
def test_each_layer_has_its_own_window(types: tuple[str, ...], bound: int | None) -> None:
    """Context reaches a block through the layers that see it, and through no other."""
    drafter = random_drafter(layer_types=types, sliding_window=WINDOW if SLIDING in types else None, block_size=BLOCK)
    forward = BlockForward(drafter, "sdpa")
    torch.manual_seed(0)
    taps = torch.randn(1, LENGTH, drafter.fc.in_features)
    embeddings, positions = torch.randn(BLOCK, drafter.config.hidden_size), torch.arange(ANCHOR, ANCHOR + BLOCK)

    def states(of: torch.Tensor) -> torch.Tensor:
        return forward(of, torch.tensor([[ANCHOR]]), embeddings, positions, window=bound)

    base, seen = states(taps), set()
    for position in range(LENGTH):
        other = taps.clone()
        other[0, position] += 1.0
        if not torch.equal(states(other), base):
            seen.add(position)
    reach = max(min(own or LENGTH, bound or LENGTH) for own in (WINDOW if kind == SLIDING else None for kind in types))
    assert seen == set(range(max(0, ANCHOR - reach), ANCHOR))


def test_the_loss_caps_what_the_drafter_caps() -> None:
    shape, target = (
        drafter_config(final_logit_softcapping=3.0),
        SimpleNamespace(softcap=5.0, device=torch.device("cpu")),
    )
    config = TrainConfig(target="target", data=("data",), out="out", loss_decay="decay")
    own = StepFunction(config, cast(FrozenTarget, target), shape, BlockForward(random_drafter(), "sdpa"))
    assert (own.objective.softcap, own.objective.draft_softcap) == (5.0, 3.0)
