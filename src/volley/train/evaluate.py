"""Evaluate a drafter on held-out rows: teacher-forced, and by the real τ of decoding with volley's engine."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from volley.engine.capacity import beside_others
from volley.engine.chains import accepted_lengths, mean_length, shares
from volley.engine.engine import Engine
from volley.memory.device import give_back
from volley.models.drafters.drafter import Drafter
from volley.models.targets.target import Target
from volley.params import SamplingParams
from volley.train.data import TrainingData
from volley.train.documents import Document, split_batches
from volley.train.features import Features, FeatureSource
from volley.train.losses import accepted_prefix
from volley.train.options import TrainConfig, filled
from volley.train.step import Slots, StepFunction

WINDOWS = (128, 256, 512, 1024, 2048, 4096)
"""Draft windows that are tried."""
ENOUGH = 0.99
"""Share of the τ of the whole context that a window must keep."""
FEWEST_BLOCKS = 32


class HeldOut:
    """Held-out rows of a run, with both measurements on them."""

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        step_function: StepFunction,
        features: FeatureSource,
        serving: Target | None = None,
    ) -> None:
        """Prepare measurements. ``serving`` is the target that decodes; without it each measurement loads one."""
        self.config = config
        self.documents = data.held_out
        self.longest = max(data.lengths)
        self.prompts = data.prompts
        self.step_function = step_function
        self.features = features
        self.serving = serving

    @torch.no_grad()
    def teacher_forced(self) -> dict[str, Any]:
        """Return loss, cross-entropy, τ, accuracy per slot and the draft window, given the true tokens; empty without rows."""
        held = self.documents
        if not held:
            return {}
        anchors = {index: self.step_function.draw_anchors(document, index, -1) for index, document in enumerate(held)}
        order = sorted(anchors, key=lambda index: len(held[index]))
        loss = weight = 0.0
        parts, starts = list[Slots](), list[Tensor]()
        windows = [window for window in WINDOWS if window < self.longest]
        narrowed: dict[int, list[Tensor]] = {window: [] for window in windows}
        for batch in split_batches(order, [len(document) for document in held], filled(self.config.tokens_per_batch)):
            for part in self.step_function.split_passes(batch, anchors):
                chosen, rows = [held[index] for index in part], [anchors[index] for index in part]
                features = self.features(chosen, part)
                result = self.step_function(chosen, rows, features)
                loss += result.loss.item()
                weight += self.step_function.total_weight(chosen, rows)
                parts.append(result.slots)
                starts.append(result.anchors.cpu())
                for window, found in narrowed.items():
                    found.append(self._narrowed(chosen, rows, features, window))
        slots = Slots.join(parts)
        tau, accuracy = accepted_prefix(slots.correct, slots.valid)
        within = {window: torch.cat(found) for window, found in narrowed.items()}
        return {
            "loss": loss / weight,
            "cross_entropy": slots.mean_cross_entropy,
            "tau": float(tau),
            "accuracy": [round(x, 4) for x in accuracy.tolist()],
            "draft_window": choose_window(slots.correct, within, slots.valid, torch.cat(starts), self.longest),
        }

    def _narrowed(
        self, documents: Sequence[Document], anchors: Sequence[Sequence[int]], features: Features, window: int
    ) -> Tensor:
        """Return which slots ``[n, B − 1]`` are right with ``window`` tokens of context, for the n blocks with more context."""
        cut = [[anchor for anchor in row if anchor > window] for row in anchors]
        some = [index for index, row in enumerate(cut) if row]
        if not some:
            return torch.zeros(0, self.step_function.block_size - 1, dtype=torch.bool)
        final = None if features.final is None else features.final[some]
        own = Features(features.taps[some], final)
        result = self.step_function([documents[i] for i in some], [cut[i] for i in some], own, window=window)
        return result.slots.correct[result.anchors.cpu() > window]

    def decoded(self, drafter: Drafter) -> dict[str, Any]:
        """Return the real τ; empty without prompts."""
        if not self.prompts:
            return {}
        target = self.step_function.target
        found = evaluate_tau(
            drafter,
            self.serving or self.config.target,
            self.prompts,
            max_tokens=self.config.eval_max_tokens,
            dtype=target.dtype,
            device=str(target.device),
        )
        return {"decoded": found} if found["cycles"] else {}


def choose_window(right: Tensor, within: Mapping[int, Tensor], valid: Tensor, anchors: Tensor, longest: int) -> int:
    """Return the narrowest draft window that keeps ``ENOUGH`` of τ; at most ``longest``, the longest context in training.

    ``right`` and ``valid`` ``[N, B − 1]`` are the slots of blocks at ``anchors [N]`` that see their whole context.
    ``within[window]`` are the right slots under a window, of the blocks with more context. A window is judged by these blocks.
    """
    for window, narrowed in sorted(within.items()):
        cut = anchors > window
        if int((valid.any(-1) & cut).sum()) < FEWEST_BLOCKS:
            break
        whole, kept = (accepted_prefix(correct, valid[cut])[0] for correct in (right[cut], narrowed))
        if kept >= ENOUGH * whole:
            return window
    return longest


def evaluate_tau(
    drafter: Drafter,
    target: str | Target,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int,
    dtype: torch.dtype,
    device: str,
) -> dict[str, Any]:
    """Decode ``prompts`` greedily. Return the mean τ over all cycles, and the share of cycles that accepted each slot.

    ``target`` must not be the training's, which keeps its dense attention. ``drafter`` does not change. Prompts that do not fit
    in the engine are left out.
    """
    copy = Drafter(drafter.config)
    copy.load_state_dict(drafter.state_dict())
    place = torch.device(device)
    sizes = beside_others(place)
    engine = Engine.from_pretrained(target, drafter=copy, dtype=dtype, device=place, capacity=sizes, policy="fixed")
    engine.procedures.write_causally()
    most = engine.snapshot().max_tokens
    fitting = [prompt for prompt in prompts if len(prompt) + max_tokens <= most]
    if prompts and not fitting:
        told = f"no held-out prompt leaves {max_tokens} of the {most} tokens that an engine holds beside the training"
        warnings.warn(f"{told}, so the real τ is not measured; give shorter prompts", stacklevel=2)
    lengths = accepted_lengths(engine, fitting, SamplingParams(max_tokens=max_tokens))
    del engine, copy
    give_back(place)
    by_slot = shares(lengths, drafter.config.block_size)
    return {"tau": mean_length(lengths), "cycles": len(lengths), "acceptance_per_slot": by_slot}
