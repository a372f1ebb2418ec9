"""How well the drafter drafts on held-out rows: teacher-forced, and the real τ by decoding with volley's own engine."""

from collections.abc import Sequence
from typing import Any

import torch

from volley.engine.engine import Engine
from volley.models.drafter import Drafter
from volley.train.data import TrainingData
from volley.train.documents import split_batches
from volley.train.features import FeatureSource
from volley.train.losses import accepted_prefix
from volley.train.options import TrainConfig
from volley.train.step import StepFunction
from volley.types import SamplingParams


class HeldOut:
    """The held-out rows of a run, and the two measurements on them."""

    def __init__(
        self, config: TrainConfig, data: TrainingData, step_function: StepFunction, features: FeatureSource
    ) -> None:
        self.config = config
        self.documents = data.held_out
        self.prompts = data.prompts
        self.step_function = step_function
        self.features = features

    @torch.no_grad()
    def teacher_forced(self) -> dict[str, Any]:
        """Loss, τ and accuracy per slot given the true tokens; nothing where no row is held out."""
        held = self.documents
        if not held:
            return {}
        anchors = {index: self.step_function.draw_anchors(document, index, -1) for index, document in enumerate(held)}
        order = sorted(anchors, key=lambda index: len(held[index]))
        loss = weight = 0.0
        rights, valids = [], []
        for batch in split_batches(order, [len(document) for document in held], self.config.tokens_per_batch):
            for part in self.step_function.split_passes(batch, anchors):
                chosen, rows = [held[index] for index in part], [anchors[index] for index in part]
                result = self.step_function(chosen, rows, self.features(chosen, part))
                loss += result.loss.item()
                weight += self.step_function.total_weight(chosen, rows)
                rights.append(result.correct.cpu())
                valids.append(result.valid.cpu())
        tau, accuracy = accepted_prefix(torch.cat(rights), torch.cat(valids))
        return {"loss": loss / weight, "tau": float(tau), "accuracy": [round(x, 4) for x in accuracy.tolist()]}

    def decoded(self, drafter: Drafter) -> dict[str, Any]:
        """The real τ; nothing where there is no prompt."""
        if not self.prompts:
            return {}
        target = self.step_function.target
        found = evaluate_tau(
            drafter,
            self.config.target,
            self.prompts,
            max_tokens=self.config.eval_max_tokens,
            dtype=target.dtype,
            device=str(target.device),
        )
        return {"decoded": found}


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
