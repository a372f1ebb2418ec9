"""How well the drafter drafts: the real τ, by decoding held-out prompts with volley's own engine."""

from collections.abc import Sequence
from typing import Any

import torch

from volley.engine.engine import Engine
from volley.models.drafter import Drafter
from volley.types import SamplingParams


def evaluate_tau(
    drafter: Drafter, target: str, prompts: Sequence[list[int]], *, max_tokens: int, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Greedy decoding of ``prompts``: mean τ over all cycles, and the share of cycles that accepted each slot.

    The engine loads a target of its own: the training copy must keep its dense attention. ``drafter`` is left as it is.
    """
    copy = Drafter(drafter.config)
    copy.load_state_dict(drafter.state_dict())
    engine = Engine.from_pretrained(target, drafter=copy, dtype=dtype, device=device, policy="fixed")
    accepted: list[int] = []
    for result in engine.generate(list(prompts), SamplingParams(max_tokens=max_tokens)):
        accepted += result.stats.accepted_lengths
    at_least = [sum(length > slot for length in accepted) for slot in range(1, drafter.config.block_size)]
    return {
        "tau": sum(accepted) / max(1, len(accepted)),
        "cycles": len(accepted),
        "acceptance_per_slot": [round(count / max(1, len(accepted)), 4) for count in at_least],
    }
