"""Compute the loss and the acceptance of one training step from documents and anchors (DFlash §4.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.drafters.drafter import Drafter
from volley.train.anchors import Blocks, build_blocks, draw_anchors, draw_reveals
from volley.train.attention import ATTENTION, Layout
from volley.train.documents import Document, pad
from volley.train.features import Features, FrozenTarget
from volley.train.losses import Objective, block_loss, slot_weights
from volley.train.options import TrainConfig, filled
from volley.train.vocabulary import LossTokens

CPU_ROWS = 4096  # rows of a pass on a CPU; larger tensors get new pages each time, slower than the arithmetic
GPU_ROWS = 16384  # rows of a pass on a GPU; with five layers of an 8B model's width it keeps about 14 GiB for gradients


class BlockForward(nn.Module):
    """Runs the drafter over all blocks of a step at once. Its weights are saved."""

    def __init__(self, drafter: Drafter, attention: str) -> None:
        super().__init__()
        self.drafter = drafter
        self.attention = attention

    def forward(
        self,
        taps: Tensor,
        anchors: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        before: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Return states ``[D·A·B, H]`` for ``taps [D, S, taps·H]``, ``anchors [D, A]`` and block ``embeddings [D·A·B, H]``.

        A sequential head (``heads.py``) corrects them by the embeddings ``before [D·A·B, H]`` of the true previous tokens. A
        block sees at most ``window`` tokens of its context.
        """
        documents, length = taps.shape[:2]
        context_positions = torch.arange(length, device=taps.device).repeat(documents)
        context = self.drafter.context_kv(taps.flatten(0, 1), context_positions)
        windows, size = self.drafter.windows(window), len(positions) // anchors.numel()
        attends = {own: ATTENTION[self.attention](Layout(anchors, length, size, own), context) for own in set(windows)}

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attends[windows[layer]](layer, queries, keys, values)

        hidden: Tensor = self.drafter(embeddings, positions, attend)
        if self.drafter.head is not None and before is not None:
            hidden = self.drafter.head(hidden, before)
        return hidden


@dataclass(frozen=True)
class Slots:
    """Results of the draft positions of N blocks, ``[N, B − 1]`` each, on the CPU."""

    correct: Tensor
    valid: Tensor
    cross_entropy: Tensor
    """Cross-entropy of the labels, unweighted. D-PACE's weights shrink as it rises, so the weighted loss hardly changes."""

    @classmethod
    def none(cls, block_size: int) -> Self:
        nothing = torch.empty(0, block_size - 1)
        return cls(nothing.bool(), nothing.bool(), nothing)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        columns = zip(*((part.correct, part.valid, part.cross_entropy) for part in parts), strict=True)
        return cls(*map(torch.cat, columns))

    @property
    def mean_cross_entropy(self) -> float:
        """Return the mean over the slots to predict; 0 if there are none."""
        return float(self.cross_entropy[self.valid].sum() / self.valid.sum().clamp(min=1))


@dataclass(frozen=True)
class StepResult:
    """Result for N blocks; ``loss`` is the weighted sum."""

    loss: Tensor
    slots: Slots
    anchors: Tensor
    """Positions ``[N]`` of the blocks."""


class StepFunction:
    """Computes the loss of documents and anchors."""

    def __init__(
        self,
        config: TrainConfig,
        target: FrozenTarget,
        shape: DrafterConfig,
        model: BlockForward,
        tokens: LossTokens | None = None,
    ) -> None:
        """Take the run's parts. ``tokens`` chooses the tokens whose logits enter a training step's loss; ``None``: all."""
        self.target = target
        self.tokens = tokens
        self.model = model
        self.block_size = shape.block_size
        self.mask_token_id = shape.mask_token_id
        self.weights = slot_weights(self.block_size, filled(config.loss_decay), config.gamma)
        caps = target.softcap, shape.final_logit_softcapping
        self.objective = Objective(config.soft_targets, *caps)
        self.has_head = shape.head is not None
        self.paced = config.loss_decay == "pace"
        self.config = config
        self.rows_per_pass = config.rows_per_pass or (CPU_ROWS if target.device.type == "cpu" else GPU_ROWS)

    def draw_anchors(self, document: Document, index: int, epoch: int) -> list[int]:
        """Draw the anchors of a document, given by its index in the data. They depend only on seed, epoch and index."""
        config, seed = self.config, f"{self.config.seed}/{epoch}/{index}"
        start, length, count = document.response_start, len(document), filled(config.anchors_per_sequence)
        return draw_anchors(start, length, count, seed)

    def draw_reveals(self, anchors: Sequence[int], index: int, epoch: int) -> Tensor | None:
        """Draw which slots of the blocks at ``anchors`` hold their true token; ``None`` if no slot does in this run."""
        share = self.config.reveal
        seed = f"reveal/{self.config.seed}/{epoch}/{index}"
        return draw_reveals(len(anchors), self.block_size, share, seed) if share else None

    def split_passes(self, indices: Sequence[int], anchors: Mapping[int, Sequence[int]]) -> list[list[int]]:
        """Split documents, given by their indices, into passes of at most ``rows_per_pass`` block rows."""
        passes: list[list[int]] = []
        for index in indices:
            most = max(len(anchors[i]) for i in [*(passes[-1] if passes else ()), index])
            if not passes or most * (len(passes[-1]) + 1) * self.block_size > self.rows_per_pass:
                passes.append([])
            passes[-1].append(index)
        return passes

    def total_weight(
        self, documents: Sequence[Document], anchors: Sequence[Sequence[int]], reveals: Sequence[Tensor | None] = ()
    ) -> float:
        """Return the sum of the weights of all slots to predict, by which every process divides the step's loss."""
        sums: list[float] = [0.0, *self.weights.cumsum(0).tolist()]
        total = sum(
            sums[min(self.block_size, len(document) - anchor) - 1]
            for document, row in zip(documents, anchors, strict=True)
            for anchor in row
        )
        for document, row, own in zip(documents, anchors, reveals, strict=bool(reveals)):
            if own is not None:
                left = len(document) - torch.tensor(row)[:, None] - 1  # slots inside the response
                total -= float((own & (torch.arange(self.block_size - 1) < left)).float().sum(0) @ self.weights)
        return total

    def __call__(
        self,
        documents: Sequence[Document],
        anchors: Sequence[Sequence[int]],
        features: Features,
        scale: float = 1.0,
        measure: bool = True,
        window: int | None = None,
        reveals: Sequence[Tensor] | None = None,
    ) -> StepResult:
        """Return the loss of ``documents``, multiplied by ``scale``: 0 in a process without a share of the batch.

        With a ``window`` a block sees at most that many tokens before it. Only blocks without ``reveals`` are measured, because
        one draft pass fills them.
        """
        lengths = [len(document) for document in documents]
        blocks = build_blocks(pad(documents), lengths, anchors, self.block_size, self.mask_token_id, reveals)
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.target.dtype == torch.bfloat16):
            states = self.states(blocks, features, window)
        return self._loss(blocks, states.to(self.target.dtype), features.final, scale, measure)

    def states(self, blocks: Blocks, features: Features, window: int | None) -> Tensor:
        """Return the drafter's final states ``[D·A·B, H]``."""
        device = self.target.device
        with torch.no_grad():
            embeddings = self.target.embed(blocks.token_ids.flatten().to(device))
            before = self._before(blocks) if self.has_head else None
        taps, positions = features.taps.to(device), blocks.positions.flatten().to(device)
        states: Tensor = self.model(taps, blocks.anchors.to(device), embeddings, positions, before, window)
        return states

    def _before(self, blocks: Blocks) -> Tensor:
        """Return the embedding of the token before each block token, for the sequential head.

        The anchor's own row predicts nothing, and gets the anchor's embedding.
        """
        anchor = blocks.token_ids[..., :1]
        token_ids = torch.cat([anchor, anchor, blocks.labels[..., :-1]], dim=-1).flatten().to(self.target.device)
        return self.target.embed(token_ids)

    def _loss(self, blocks: Blocks, states: Tensor, final: Tensor | None, scale: float, measure: bool) -> StepResult:
        device = states.device
        valid = blocks.valid.to(device)
        slots = states.view(*blocks.token_ids.shape, -1)[:, :, 1:]
        document, block, slot = valid.nonzero(as_tuple=True)
        weights = self.weights.to(device)[slot] * scale
        if final is not None:
            source = blocks.positions.to(device)[document, block, slot]  # slot k = index k − 1 predicts a + k
            final = final.to(device)[document, source]
        head, labels = self.target.head, blocks.labels.to(device)[valid]
        if self.tokens is not None and torch.is_grad_enabled() and not measure:
            head, labels = self.tokens(head, labels, slots.shape[-1])
        loss, cross_entropy, correct = block_loss(
            slots[valid],
            head,
            labels,
            weights,
            self.objective,
            final=final,
            blocks=slot if self.paced else None,
            measure=measure,
        )
        every = torch.zeros(valid.shape, device=device)
        right = torch.zeros_like(valid)
        every[valid], right[valid] = cross_entropy, correct
        valid = valid & ~blocks.revealed.to(device).any(-1, keepdim=True)
        return StepResult(
            loss, Slots(*(each.flatten(0, 1).cpu() for each in (right, valid, every))), blocks.anchors.flatten()
        )
