"""The rules of revealing, on made-up logits."""

import pytest
import torch
from torch import Tensor

from volley.decode.canvas import Canvas, CanvasOutput, Reveal
from volley.decode.sampling import PositionNoise
from volley.params import DiffusionParams, SamplingParams

MASK = 9
GREEDY = SamplingParams()
NOISE = PositionNoise(0)


def sure(*chances: float, token: int = 1) -> Tensor:
    """Logits ``[L, 10]`` that give ``token`` such probabilities."""
    probs = torch.tensor([[(1 - chance) / 8] * 9 + [0.0] for chance in chances])
    for row, chance in enumerate(chances):
        probs[row, token] = chance
    return probs.log()


def reveal(logits: Tensor, given: list[int] | None = None, **own: object) -> Canvas:
    params = DiffusionParams(canvas_length=len(logits), **{"threshold": 0.8, **own})  # type: ignore[arg-type]
    rule = Reveal(MASK)
    canvas = rule.open(0, given or [], params, NOISE)
    rule.step(CanvasOutput(canvas, logits, GREEDY, params, NOISE))
    return canvas


@pytest.mark.parametrize(
    ("own", "revealed"),
    [
        ({}, [True, False, True, False]),
        ({"threshold": 0.95}, [False, False, True, False]),
        ({"strategy": "low_confidence_static", "max_steps": 2}, [True, False, True, False]),
        ({"strategy": "sequential", "max_steps": 2}, [True, True, False, False]),
        ({"strategy": "entropy_bounded", "entropy_bound": 0.0}, [False, False, True, False]),
        ({"strategy": "entropy_bounded", "entropy_bound": 100.0}, [True, True, True, True]),
        ({"sub_block": 2}, [True, False, False, False]),
    ],
)
def test_what_a_pass_reveals(own: dict[str, object], revealed: list[bool]) -> None:
    canvas = reveal(sure(0.85, 0.3, 0.9, 0.5), **own)
    assert canvas.revealed.tolist() == revealed
    assert canvas.tokens.tolist() == [1 if seen else MASK for seen in revealed]
    chances = [chance if seen else 0.0 for chance, seen in zip((0.85, 0.3, 0.9, 0.5), revealed, strict=True)]
    assert canvas.confidence.tolist() == pytest.approx(chances)
    assert canvas.done == all(revealed)


@pytest.mark.parametrize(
    "strategy", ["low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded"]
)
def test_a_canvas_of_given_tokens_is_done_as_it_is(strategy: str) -> None:
    canvas = reveal(sure(0.9, 0.9), [7, 8], strategy=strategy, entropy_bound=1.0)
    assert (canvas.tokens.tolist(), canvas.done) == ([7, 8], True)


def test_given_tokens_are_revealed_and_stay() -> None:
    canvas = reveal(sure(0.9, 0.9, 0.3, 0.3), [7])
    assert canvas.tokens.tolist() == [7, 1, MASK, MASK]


def test_the_mask_is_never_chosen() -> None:
    logits = sure(0.5, 0.5)
    logits[:, MASK] = 50.0
    assert reveal(logits, threshold=0.0).tokens.tolist() == [1, 1]
