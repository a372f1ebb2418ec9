"""Define the ragged batch, the input of every forward pass: runs of tokens of many requests, laid end to end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.memory.kv_cache import BlockTable
from volley.memory.upload import upload, upload_together


@dataclass(slots=True)
class Segment:
    """A run of tokens of one request, at consecutive positions ``[start, start + length)`` unless it is a tree.

    The segment's own keys and values are written into ``table`` before it attends. A causal token at position p sees positions
    ``≤ p``; a bidirectional token sees the whole segment and everything before it.

    ``parents [length - 1]`` makes a causal segment a tree: token i follows token ``parents[i - 1] < i``, and sees its
    ancestors, itself and everything before the segment. Its K/V are at index ``start + i`` of the table, as in a chain, but
    its position is ``start`` plus its depth. The last ``canvas`` tokens of a tree form a chain and see each other; under a
    window, they all see what the first of them sees.

    ``groups`` divides a causal segment into runs of tokens, with sizes adding up to ``length``. A token sees its whole group
    and everything before it; under a window, it sees its group and what the group's first token would see causally. Groups of
    one token are causal attention. Equal groups are the block-causal attention of block-diffusion models. A last group after
    groups of one is a canvas.

    ``feedback [n, H]`` is the self-conditioning input of the last n tokens (``models/targets/diffusion_gemma.py``).
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

    def positions(self) -> NDArray[np.int64]:
        """Return the positions ``[length]`` of the segment's tokens."""
        if self.parents is None:
            return np.arange(self.start, self.end)
        assert len(self.parents) == self.length - 1, "a tree has a parent for every token but the first"
        positions = [self.start]
        for parent in self.parents:
            positions.append(positions[parent] + 1)
        return np.array(positions)

    def origins(self) -> NDArray[np.int64]:
        """Return the positions ``[length]`` from which the window of each token of a chain or a tree is counted."""
        origins = self.positions()
        if self.canvas:
            origins[-self.canvas :] = origins[-self.canvas]
        return origins

    def spans(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first position of each token's group, and the one after it, ``[length]`` each. Without groups a token is
        alone."""
        sizes = np.ones(self.length, dtype=np.int64) if self.groups is None else np.array(self.groups)
        assert sizes.sum() == self.length, "groups divide the whole segment"
        ends = self.start + sizes.cumsum()
        return np.repeat(ends - sizes, sizes), np.repeat(ends, sizes)

    def ancestors(self) -> NDArray[np.bool_]:
        """Return whether token j is an ancestor of token i, or i itself: ``[length, length]``. In a chain all earlier tokens
        are ancestors.

        All tokens of a canvas have the ancestors of its last token.
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
    """Segments of many requests laid end to end: the input of every forward pass of target and drafter.

    ``token_ids`` and ``positions`` are ``[T]``; segment i owns rows ``offsets[i] : offsets[i + 1]``.
    """

    def __init__(self, segments: list[Segment], token_ids: Tensor, positions: Tensor | None = None) -> None:
        """Make a batch. ``positions`` follow from the segments if they are not given."""
        self.segments = segments
        self.token_ids = token_ids
        self.offsets = [0]
        for segment in segments:
            self.offsets.append(self.offsets[-1] + segment.length)
        assert self.offsets[-1] == len(token_ids), "token_ids must hold exactly the segments' tokens"
        if positions is None:
            positions = upload(np.concatenate([segment.positions() for segment in segments]), token_ids.device)
        self.positions = positions
        self.static_feedback: tuple[Tensor, Tensor] | None = None
        """Self-conditioning input in static buffers, instead of the segments' ``feedback``: which tokens have it ``[T]``
        (boolean), and its values ``[T, H]``."""
        self.plans: dict[object, object] = {}
        """Plans of the attention backend, computed once for this batch and used in every layer."""

    @classmethod
    def on_device(
        cls,
        segments: list[Segment],
        token_ids: Sequence[int],
        rows: Sequence[int],
        device: torch.device,
        on_device: Mapping[int, Tensor] | None = None,
    ) -> tuple[Self, Tensor]:
        """Make a batch of ``token_ids [T]``, and indices of some of its ``rows``, in one copy to ``device``.

        ``on_device`` holds runs of tokens that are only on the device, by the row at which each begins. ``token_ids`` is
        ignored there.
        """
        positions = np.concatenate([segment.positions() for segment in segments])
        arrays = [np.array(token_ids, dtype=np.int64), positions, np.array(rows, dtype=np.int64)]
        if not on_device:
            tokens, places, chosen = upload_together(arrays, device)
            return cls(segments, tokens, places), chosen
        tokens, places, chosen, order = upload_together([*arrays, token_order(len(token_ids), on_device)], device)
        return cls(segments, torch.cat([tokens, *on_device.values()]).index_select(0, order), places), chosen

    def __len__(self) -> int:
        return len(self.token_ids)

    def follow(self, before: Self | None) -> None:
        """Reuse the plans of an earlier pass with the same layout, as a canvas has until it ends.

        The layout is always recorded, because tables change later.
        """
        layout = self.layout
        if before is not None and layout == before.layout:
            self.plans = before.plans

    @cached_property
    def layout(self) -> list[tuple[object, ...]]:
        """Location of the segments, and what their tokens see."""
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
    """Make a text for timing passes. Its token ids are small, as in every vocabulary, and varied, so that it uses many
    experts."""
    return [number % 16 for number in range(count)]


def token_order(num_tokens: int, on_device: Mapping[int, Tensor]) -> NDArray[np.int64]:
    """Return the index ``[num_tokens]`` of each token of a batch in the host's tokens followed by the runs of ``on_device``."""
    order, known = np.arange(num_tokens), num_tokens
    for row, run in on_device.items():
        order[row : row + len(run)] = range(known, known := known + len(run))
    return order
