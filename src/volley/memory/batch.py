"""The ragged batch, which is the input of every forward pass: runs of tokens of many requests, laid end to end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.memory.kv_cache import BlockTable
from volley.memory.upload import upload_together


@dataclass(slots=True)
class Segment:
    """A run of tokens of one request, at consecutive positions ``[start, start + length)`` unless it is a tree.

    The segment's own keys and values are written into ``table`` before it attends. A causal token at position p sees
    positions ``≤ p``; a bidirectional one sees the whole segment and everything before it.

    ``parents [length - 1]`` makes a causal segment a tree: token i follows token ``parents[i - 1] < i``, and sees its
    ancestors, itself and everything before the segment. Its K/V lie at index ``start + i`` of the table, as in a chain,
    but its position is ``start`` plus its depth. The last ``canvas`` tokens of a tree, each of which follows the one before,
    see each other; under a window, what the first of them sees there.

    ``groups`` divides a causal segment into runs of tokens, sizes adding up to ``length``. A token sees its whole group and
    everything before it; under a window, what the group's first token would see causally, and its group. Groups of one are
    causal attention, equal groups the block-causal attention of block-diffusion models, and a last group behind groups of one is
    a canvas. ``feedback [n, H]`` goes with the last n tokens, which a model with self-conditioning denoises
    (``models/targets/diffusion_gemma.py``).
    """

    table: BlockTable
    start: int
    length: int
    causal: bool = True
    parents: tuple[int, ...] | None = None
    canvas: int = 0
    groups: tuple[int, ...] | None = None
    feedback: Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    def positions(self) -> Tensor:
        """Positions ``[length]`` of the segment's tokens."""
        if self.parents is None:
            return torch.arange(self.start, self.end)
        assert len(self.parents) == self.length - 1, "a tree has a parent for every token but the first"
        positions = [self.start]
        for parent in self.parents:
            positions.append(positions[parent] + 1)
        return torch.tensor(positions)

    def origins(self) -> Tensor:
        """Positions ``[length]`` from which the window of each token of a chain or a tree is counted."""
        origins = self.positions()
        if self.canvas:
            origins[-self.canvas :] = origins[-self.canvas].clone()
        return origins

    def ancestors(self) -> NDArray[np.bool_]:
        """Whether token j is an ancestor of token i, or i itself: ``[length, length]``. Ancestors in a chain are all before.

        All of a canvas have those of its last token.
        """
        if self.parents is None:
            return np.tri(self.length, dtype=np.bool_)
        seen = np.eye(self.length, dtype=np.bool_)
        for token, parent in enumerate(self.parents, start=1):
            seen[token] |= seen[parent]
        if self.canvas:
            seen[-self.canvas :] = seen[-1]
        return seen


class RaggedBatch:
    """Segments of many requests laid end to end: the input of every forward pass, of target and drafter alike.

    ``token_ids`` and ``positions`` are ``[T]``; segment i owns rows ``offsets[i] : offsets[i + 1]``.
    """

    def __init__(self, segments: list[Segment], token_ids: Tensor, positions: Tensor | None = None) -> None:
        """``positions`` are known from the segments; :meth:`on_device` has them already."""
        self.segments = segments
        self.token_ids = token_ids
        self.offsets = [0]
        for segment in segments:
            self.offsets.append(self.offsets[-1] + segment.length)
        assert self.offsets[-1] == len(token_ids), "token_ids must hold exactly the segments' tokens"
        if positions is None:
            positions = torch.cat([segment.positions() for segment in segments]).to(token_ids.device)
        self.positions = positions
        self.told: tuple[Tensor, Tensor] | None = None
        """In fixed memory, in place of the segments' ``feedback``: which tokens have some ``[T]``, boolean, and it ``[T, H]``."""
        self.plans: dict[object, object] = {}
        """What the attention backend worked out once for this batch and uses again in every layer."""

    @classmethod
    def on_device(
        cls,
        segments: list[Segment],
        token_ids: Sequence[int],
        rows: Sequence[int],
        device: torch.device,
        late: Mapping[int, Tensor] | None = None,
    ) -> tuple[Self, Tensor]:
        """A batch of ``token_ids [T]``, and indices of some of its ``rows``: all of it goes to ``device`` in one copy.

        ``late`` are runs of tokens that only the device knows, by the row at which each begins. What ``token_ids`` has there is
        ignored.
        """
        positions = torch.cat([segment.positions() for segment in segments]).numpy()
        arrays = [np.array(token_ids, dtype=np.int64), positions, np.array(rows, dtype=np.int64)]
        if not late:
            tokens, places, chosen = upload_together(arrays, device)
            return cls(segments, tokens, places), chosen
        tokens, places, chosen, order = upload_together([*arrays, late_order(len(token_ids), late)], device)
        return cls(segments, torch.cat([tokens, *late.values()]).index_select(0, order), places), chosen

    def __len__(self) -> int:
        return len(self.token_ids)

    def follow(self, before: Self | None) -> None:
        """Take over the plans of an earlier pass whose segments lay as these do: a canvas stays where it is until it ends.

        The layout is noted even if there is none: tables change.
        """
        layout = self.layout
        if before is not None and layout == before.layout:
            self.plans = before.plans

    @cached_property
    def layout(self) -> list[tuple[object, ...]]:
        """Where the segments lie, and what their tokens see."""
        return [
            (
                table.page_size,
                table.first,
                tuple(table.pages),
                own.start,
                own.length,
                own.causal,
                own.groups,
                own.parents,
                own.canvas,
            )
            for own in self.segments
            for table in [own.table]
        ]


def made_up_tokens(count: int) -> list[int]:
    """A text to time passes with: of few tokens, which every vocabulary has, and not of one, for which few experts would do."""
    return [number % 16 for number in range(count)]


def late_order(num_tokens: int, late: Mapping[int, Tensor]) -> NDArray[np.int64]:
    """Where each token of a batch is found ``[num_tokens]``, if the runs of ``late`` are put behind the tokens of the host."""
    order, known = np.arange(num_tokens), num_tokens
    for row, run in late.items():
        order[row : row + len(run)] = range(known, known := known + len(run))
    return order
