"""Features of accepted tokens that wait to be projected into a drafter's K/V, many tokens at once."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from volley.memory.upload import upload, upload_together

Write = Callable[[Tensor, Tensor, slice | Tensor], object]
"""Write K/V: ``write(features [T, taps · H], positions [T], kv_slots [T])``."""
Indices = NDArray[np.int64]


class KeptRun:
    """Consecutive tokens of one request, ``[start, end)``. Each step extends the run until it is closed."""

    __slots__ = ("end", "kv_slots", "start")

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.kv_slots: Indices = np.empty(0, dtype=np.int64)
        """K/V slots of the run's last tokens, set when it is closed; earlier tokens have lost their slots."""


_FEW = 256  # tokens for which the buffer is kept when it is empty


class Backlog:
    """Buffer of features. Each step appends its features; :meth:`write` assigns rows to tokens.

    Features are copied into one tensor. On a CPU, one allocation for each step would leave gaps in the heap that are too small
    for the next logits.

    A run is closed while its request still owns the K/V slots. If a slot changes its owner, the last owner closes last, and its
    K/V remain in the slot.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._buffer: Tensor | None = None  # the first _num_tokens rows are features
        self._runs: list[KeptRun] = []  # of each request in each step
        self._counts: list[int] = []  # tokens that each request added to its run
        self._closed: list[KeptRun] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        """Number of tokens in the buffer."""
        return self._num_tokens

    def add(self, features: Tensor, runs: Sequence[KeptRun], counts: Sequence[int]) -> None:
        """Append ``features [T, taps · H]``: the next ``counts[i]`` tokens of ``runs[i]``, one run after the other."""
        buffer, first, end = self._buffer, self._num_tokens, self._num_tokens + len(features)
        if buffer is None or end > len(buffer):
            before, buffer = buffer, features.new_empty(max(_FEW, end), features.shape[1])
            if before is not None:
                buffer[:first] = before[:first]
            self._buffer = buffer
        buffer[first:end] = features
        self._runs += runs
        self._counts += counts
        self._num_tokens = end
        for run, count in zip(runs, counts, strict=True):
            run.end += count

    def close(self, run: KeptRun, kv_slots: Indices) -> None:
        """Close a run and set the K/V slots of its last tokens, all different. A closed run must not be extended."""
        run.kv_slots = kv_slots
        self._closed.append(run)

    def write(self) -> None:
        """Write the K/V of the whole buffer. All runs must be closed."""
        runs, counts, closed, buffer, total = self._runs, self._counts, self._closed, self._buffer, self._num_tokens
        self._runs, self._counts, self._closed, self._num_tokens = [], [], [], 0
        if not closed or buffer is None:
            return
        if len(buffer) > _FEW:
            self._buffer = None
        rows, positions, kv_slots = _places(runs, counts, closed)
        features, own = buffer[:total], np.flatnonzero(_is_last(kv_slots))
        own = own[np.argsort(rows[own])]
        if not len(own):
            return
        rows, positions, kv_slots = rows[own], positions[own], kv_slots[own]
        if len(rows) < len(features):
            features = features[upload(rows, features.device)]
        if kv_slots[-1] - kv_slots[0] == len(kv_slots) - 1 and (np.diff(kv_slots) == 1).all():
            where = slice(int(kv_slots[0]), int(kv_slots[-1]) + 1)
            self._write(features, upload(positions, features.device), where)
        else:
            places, indices = upload_together([positions, kv_slots], features.device)
            self._write(features, places, indices)


def _places(
    runs: Sequence[KeptRun], counts: Sequence[int], closed: Sequence[KeptRun]
) -> tuple[Indices, Indices, Indices]:
    """Return row, position and K/V slot of every token that has a slot, run by run in the order of ``closed``.

    Rows are in the order in which they were added: ``counts[i]`` rows are the next tokens of ``runs[i]``.
    """
    numbers = {run: number for number, run in enumerate(closed)}
    order = np.argsort(np.repeat([numbers[run] for run in runs], counts), kind="stable")
    rows, positions, end = list[Indices](), list[Indices](), 0
    for run in closed:
        end += run.end - run.start
        rows.append(order[end - len(run.kv_slots) : end])
        positions.append(np.arange(run.end - len(run.kv_slots), run.end))
    return np.concatenate(rows), np.concatenate(positions), np.concatenate([run.kv_slots for run in closed])


def _is_last(kv_slots: Indices) -> NDArray[np.bool_]:
    """Return a mask of the slots that do not occur again later in the array."""
    last = np.zeros(len(kv_slots), dtype=bool)
    last[len(kv_slots) - 1 - np.unique(kv_slots[::-1], return_index=True)[1]] = True
    return last
