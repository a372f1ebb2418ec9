"""Features of tokens that stay, on their way to becoming a drafter's K/V: made late, and of many tokens at once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.memory.upload import upload, upload_together
from volley.models.adapter import Adapter

Write = Callable[[Tensor, Tensor, slice | Tensor, Adapter | None], object]
"""``write(features [T, taps · H], positions [T], kv_slots [T], adapter)``."""
Indices = NDArray[np.signedinteger[Any]]


class KeptRun(NamedTuple):
    """Tokens of one request at positions ``[start, end)``, and where their K/V belong."""

    start: int
    end: int
    kv_slots: slice | Tensor


class _Waiting(NamedTuple):
    features: Tensor
    runs: Sequence[KeptRun]
    adapter: Adapter | None


class Backlog:
    """Written in the order in which it was added, so a slot that changed hands ends with what its last owner put there."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: list[_Waiting] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        """Tokens."""
        return self._num_tokens

    def add(self, features: Tensor, runs: Sequence[KeptRun], adapter: Adapter | None) -> None:
        """``features [T, taps · H]`` of the tokens of ``runs``, one after the other; no two of them are for one slot."""
        self._waiting.append(_Waiting(features, runs, adapter))
        self._num_tokens += len(features)

    def write(self) -> None:
        """Write all of it, in one product for each adapter."""
        waiting, self._waiting, self._num_tokens = self._waiting, [], 0
        if len(waiting) == 1 and len(waiting[0].runs) == 1 and isinstance(waiting[0].runs[0].kv_slots, slice):
            features, ((start, end, where),), adapter = waiting[0]
            self._write(features, upload(np.arange(start, end), features.device), where, adapter)
            return
        kv_slots = [np.concatenate([_indices(run.kv_slots) for run in own.runs]) for own in waiting]
        stays = _is_last(kv_slots) if len(waiting) > 1 else [np.ones(len(slots), dtype=bool) for slots in kv_slots]
        for adapter in dict.fromkeys(own.adapter for own in waiting):
            members = [index for index, own in enumerate(waiting) if own.adapter is adapter]
            features = (
                torch.cat([waiting[i].features for i in members]) if len(members) > 1 else waiting[members[0]].features
            )
            positions = np.concatenate([np.arange(run.start, run.end) for i in members for run in waiting[i].runs])
            slots, kept = (np.concatenate([parts[i] for i in members]) for parts in (kv_slots, stays))
            if not kept.all():
                features = features[upload(np.flatnonzero(kept), features.device)]
                positions, slots = positions[kept], slots[kept]
            if len(slots):
                places, where = upload_together([positions, slots], features.device)
                self._write(features, places, where, adapter)


def _indices(kv_slots: slice | Tensor) -> Indices:
    return np.arange(kv_slots.start, kv_slots.stop) if isinstance(kv_slots, slice) else kv_slots.numpy()


def _is_last(parts: Sequence[Indices]) -> list[NDArray[np.bool_]]:
    """Of every slot in ``parts`` whether it does not come again."""
    slots = np.concatenate(parts)
    last = np.zeros(len(slots), dtype=bool)
    last[len(slots) - 1 - np.unique(slots[::-1], return_index=True)[1]] = True
    return np.split(last, np.cumsum([len(part) for part in parts])[:-1])
