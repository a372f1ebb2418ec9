"""Run small passes in static buffers, so that a GPU launches each as one CUDA graph.

A pass is padded to a *bucket*: a number of segments, of rows and of parts of keys. All its inputs except weights and K/V are
in one buffer on the device, which one copy from the host refills. The padding rows form a separate segment, on a page that
belongs to no request. So a bucket always launches the same operations on the same memory. They are captured at its first use,
or in advance, and replayed afterwards. On a CPU the function is called instead of a replay.

A GPU library chooses a matmul kernel by its number of rows, and kernels round differently. So a small number of requests has
the same number of rows in every pass, however few tokens each verifies.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from volley.memory.batch import RaggedBatch, Segment, made_up_tokens, token_order
from volley.memory.device import reserved_bytes
from volley.memory.kernels import launching
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import KVStore
from volley.memory.tiles import PART, TiledBatch, Tiling, most_parts, origin_array, segment_arrays, tile_array
from volley.memory.upload import refill, upload_together

MOST_ROWS = 256
"""Most rows of a pass. With more, compute takes longer than reading the weights, and launch overhead hardly matters."""
MOST_SEGMENTS = 64
FREE_ROWS = 128
"""Number of rows up to which a pass takes about as long as with one row, so that padding is free."""
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows of a request
_ALIKE = 2**-3  # relative difference of outputs: two runs of one token differ by less, two tokens by more
_SIZE = 2**20  # 32-bit numbers in the buffer; most are page ids
_ALIGNED = 4  # parts of the buffer are aligned to 16 bytes

Forward = Callable[[RaggedBatch, Tensor], Sequence[Tensor]]
"""Call ``forward(batch, rows [R])`` for tensors ``[R, ...]`` or ``[T, ...]``, always of the same number and types."""


class Bucket(NamedTuple):
    segments: int
    rows: int
    parts: int
    """Number of parts of keys, each with a separate program."""
    has_feedback: bool = False
    """True if segments may have self-conditioning input."""

    @classmethod
    def of(cls, lengths: Sequence[int], least: int = 1, *, has_feedback: bool = False) -> Self | None:
        """Return the smallest bucket, of one part, for segments of ``lengths``; ``None`` if there are too many rows or
        segments.

        As long as padding is free, it holds ``least`` rows of each segment.
        """
        segments = 1 << (len(lengths) - 1).bit_length()
        wanted = max(sum(lengths), segments * least if segments * least <= FREE_ROWS else 0)
        rows = next((segments * size for size in _SIZES if segments * size >= wanted), MOST_ROWS + 1)
        return cls(segments, rows, 1, has_feedback) if segments <= MOST_SEGMENTS and rows <= MOST_ROWS else None


@dataclass(slots=True)
class _Input:
    """Parts of a buffer, laid out equally on the host and on the device."""

    sources: Tensor
    """Token ids ``[2 · rows]``: those of the host, then those that are only on the device."""
    order: Tensor
    """Index in ``sources`` of each token, ``[rows]``."""
    positions: Tensor
    origins: Tensor
    """Window origins ``[rows]``, as ``positions``; see :class:`TiledBatch`."""
    slots: Tensor
    """Slots ``[rows]`` to which K/V are written."""
    chosen: Tensor
    """Rows ``[rows]`` whose outputs are wanted."""
    feedback_flags: Tensor
    """Flags ``[rows]``: 1 for rows with self-conditioning input, else 0."""
    segments: Tensor
    tiles: list[Tensor]
    """Tiles, one array for each tiling. ``segments``, ``tiles`` and ``cells`` are those of a :class:`TiledBatch`."""
    cells: Tensor
    """Rest of the buffer."""

    @classmethod
    def of(cls, buffer: Tensor, bucket: Bucket, tilings: Sequence[Tiling]) -> Self:
        """Divide an int32 ``buffer`` for the passes of a bucket."""
        rows, at = bucket.rows, 0

        def part(size: int) -> Tensor:
            nonlocal at
            start, at = at, at + -(-size // _ALIGNED) * _ALIGNED
            return buffer[start : start + size]

        sources = part(4 * rows).view(torch.int64)
        order, positions, origins, slots, chosen = (part(2 * rows).view(torch.int64) for _ in range(5))
        feedback_flags = part(rows)
        segments = part(7 * (bucket.segments + 2)).view(-1, 7)
        tiles = [part(4 * num_tiles(bucket, tiling)).view(-1, 4) for tiling in tilings]
        return cls(
            sources, order, positions, origins, slots, chosen, feedback_flags, segments, tiles, cells=buffer[at:]
        )


def num_tiles(bucket: Bucket, tiling: Tiling) -> int:
    """Return the most tiles that segments of a bucket can have, the padding segment included."""
    return (bucket.rows + (bucket.segments + 1) * (tiling.tokens - 1)) // tiling.tokens


class StaticPasses:
    """Small passes of one model over one store."""

    @torch.inference_mode()
    def __init__(
        self,
        forward: Forward,
        scratch: BlockTable,
        device: torch.device,
        least: int = 1,
        feedback: Tensor | None = None,
    ) -> None:
        """Prepare passes of ``forward``. ``scratch`` is a page of the store that no request has. A pass over one token shows
        which plans the layers read.

        Buckets hold at least ``least`` rows of each request (:meth:`Bucket.of`). ``feedback [MOST_ROWS, H]`` is the buffer for
        self-conditioning inputs.
        """
        self._forward, self._scratch, self.device, self._least = forward, scratch, device, least
        self._feedback = feedback
        batch, rows = RaggedBatch.on_device([Segment(scratch, 0, 1)], [0], [0], device)
        outputs = forward(batch, rows)
        self.tilings = [plan for plan in batch.plans if isinstance(plan, Tiling)]
        self.can_be_captured = batch.plans.keys() == {"write", *self.tilings}
        """True if the attention kernel, which reads static buffers, does all attention."""
        self._buffer = torch.zeros(_SIZE, dtype=torch.int32, device=device)
        self._outputs = [torch.zeros(MOST_ROWS, *x.shape[1:], dtype=x.dtype, device=device) for x in outputs]
        self._batch = batch
        self.num_runs = 0
        """Number of passes so far. The outputs of a pass are valid until the next."""
        self._inputs: dict[Bucket, _Input] = {}
        self._replays: dict[Bucket, Callable[[], object]] = {}
        self.num_graphs = 0
        """Number of buckets that have been captured."""
        self.is_refused = False
        """True if a bucket could not be captured. Such a bucket is launched operation by operation."""
        self._captured_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device: static buffers, and the memory of graphs for intermediate values."""
        fixed = [self._buffer, *self._outputs, *([] if self._feedback is None else [self._feedback])]
        return sum(own.nbytes for own in fixed) + self._captured_bytes

    @torch.inference_mode()
    def __call__(
        self,
        segments: Sequence[Segment],
        token_ids: Sequence[int],
        rows: Sequence[int],
        on_device: Mapping[int, Tensor] | None = None,
        moved: Tensor | None = None,
        *,
        may_capture: bool = True,
    ) -> tuple[RaggedBatch, list[Tensor]] | None:
        """Run a pass. Return its batch and outputs; ``None`` if it is too large, or not captured yet and ``may_capture`` is
        False.

        The arguments are those of :meth:`RaggedBatch.on_device`. Outputs have all rows of the bucket, real ones first, and are
        valid until the next pass. If only the device knows where the segments begin, they must be chains of one length. Each
        then begins ``moved [n]`` tokens later than it says: at most its length, and within its table's pages.
        """
        if moved is not None and self.device.type == "cpu":  # attention reads the segments there
            segments = [replace(own, start=own.start + by) for own, by in zip(segments, moved.tolist(), strict=True)]
            moved = None
        has_feedback = any(segment.feedback is not None for segment in segments)
        bucket = Bucket.of([segment.length for segment in segments], self._least, has_feedback=has_feedback)
        if bucket is None:
            return None
        static = self._inputs.get(bucket)
        if static is None:
            if not may_capture:
                return None
            static = self._inputs[bucket] = _Input.of(self._buffer, bucket, self.tilings)
        self._batch = self._filled_up(segments, static)
        margin = 0 if moved is None else segments[0].length
        host, parts = self._described(bucket, static, token_ids, rows, on_device or {}, margin)
        with_parts = bucket._replace(parts=parts)
        if len(host) > len(self._buffer) or not (with_parts in self._replays or may_capture):
            return None
        refill(self._buffer, host)
        if on_device:
            each = list(on_device.values())
            runs = each[0] if len(each) == 1 else torch.cat(each)
            static.sources[bucket.rows : bucket.rows + len(runs)].copy_(runs)
        if moved is not None:
            self._move(static, segments, moved)
        if has_feedback:
            self._write_feedback(segments)
        self._replay(with_parts, static)
        batch = RaggedBatch(list(segments), static.sources[: len(token_ids)], static.positions[: len(token_ids)])
        return batch, [output[: bucket.rows] for output in self._outputs]

    @torch.inference_mode()
    def repeats(self) -> bool:
        """Return True if a replay gives the output that its operations give when launched one by one, for another token.

        It does not if a library launches some operations on a stream that is not captured.
        """
        segments, bucket = [Segment(self._scratch, 0, 1)], Bucket.of([1], self._least)
        assert bucket is not None
        for token in (1, 0):  # padding rows have token 0 as well, so K/V do not depend on which row is written last
            self(segments, [token], [0])
        found = [output[0].clone() for output in self._outputs]
        self._run(self._inputs[bucket], has_feedback=False)
        return all(_are_alike(own, output[0]) for own, output in zip(found, self._outputs, strict=True))

    def _move(self, static: _Input, segments: Sequence[Segment], moved: Tensor) -> None:
        """Shift the segments in the buffer by ``moved``. Lower bounds of keys may stay, because the kernel applies windows
        exactly."""
        count, length = len(segments), segments[0].length
        reachable = np.stack([own.table.slot_array(own.start, own.start + 2 * length) for own in segments])
        slots, inside = upload_together([reachable, np.arange(length)], self.device)
        by = moved[:, None]
        static.slots[: count * length].view(count, length).copy_(slots.gather(1, by + inside))
        for places in (static.positions, static.origins):
            places[: count * length].view(count, length).add_(by)
        static.segments[:count, 1].add_(moved)
        for tiles, tiling in zip(static.tiles, self.tilings, strict=True):
            each = -(-length // tiling.tokens)
            tiles[: count * each].view(count, each, 4)[:, :, 3].add_(by)

    def _write_feedback(self, segments: Sequence[Segment]) -> None:
        assert self._feedback is not None
        end = 0
        for segment in segments:
            end += segment.length
            if segment.feedback is not None:
                self._feedback[end - len(segment.feedback) : end].copy_(segment.feedback)

    def made_up(
        self, lengths: Sequence[int], context: int, *, causal: bool, has_feedback: bool = False
    ) -> Callable[[], Tensor] | None:
        """Return a pass over made-up text that returns its first output; ``None`` if it is too large.

        Segments of ``lengths`` come after ``context`` tokens each, and have self-conditioning input if ``has_feedback``.
        All of them are on the scratch page.
        """
        if Bucket.of(lengths, self._least) is None:
            return None
        segments = [Segment(self._scratch_table(context + length), context, length, causal) for length in lengths]
        if has_feedback:
            assert self._feedback is not None
            segments = [replace(own, feedback=self._feedback[: own.length]) for own in segments]
        token_ids = made_up_tokens(sum(lengths))

        def run() -> Tensor:
            found = self(segments, token_ids, range(len(token_ids)))
            assert found is not None, "made-up text has few pages"
            return found[1][0]

        return run

    def warm_up(
        self, requests: int, rows: int, reach: int, *, causal: bool, least: int = 1, has_feedback: bool = False
    ) -> None:
        """Run, and so capture, the buckets of up to ``requests`` with ``least`` to ``rows`` rows each.

        Their context has up to ``reach`` tokens. ``has_feedback`` selects the buckets with self-conditioning input.
        """
        rows = min(rows, MOST_ROWS)
        counts = [1 << i for i in range((min(requests, MOST_SEGMENTS) - 1).bit_length() + 1)]
        most = next(size for size in _SIZES if size >= rows)
        sizes = [size for size in _SIZES if least <= size <= most]
        spans = [min(PART << i, reach) for i in range((-(-reach // PART) - 1).bit_length() + 1)]
        buckets = {Bucket.of([size] * count, self._least): [size] * count for count in counts for size in sizes}
        for lengths in buckets.values():
            for span in spans:
                if self.is_refused:
                    return
                run = self.made_up(lengths, max(0, span - lengths[0]), causal=causal, has_feedback=has_feedback)
                if run is not None:
                    run()

    def _scratch_table(self, num_tokens: int) -> BlockTable:
        """Return a table for ``num_tokens``, all of whose pages are the scratch page."""
        size = self._scratch.page_size
        return BlockTable(size, self._scratch.pages * -(-num_tokens // size))

    def _filled_up(self, segments: Sequence[Segment], static: _Input) -> RaggedBatch:
        missing = len(static.positions) - sum(segment.length for segment in segments)
        more = [Segment(self._scratch_table(missing), 0, missing)] if missing else []
        return RaggedBatch([*segments, *more], static.sources[: len(static.positions)], static.positions)

    def _described(
        self,
        bucket: Bucket,
        static: _Input,
        token_ids: Sequence[int],
        rows: Sequence[int],
        on_device: Mapping[int, Tensor],
        margin: int,
    ) -> tuple[Tensor, int]:
        """Fill a host buffer for the batch. Return it, and the number of parts that hold its keys and ``margin`` more."""
        segments, parts = self._batch.segments, 1
        described, cells = segment_arrays(self._batch) if self.tilings else (None, np.zeros(0, dtype=np.int32))
        buffer = torch.zeros(len(self._buffer) - len(static.cells) + len(cells), dtype=torch.int32)
        host = _Input.of(buffer, bucket, self.tilings)
        _put(host.sources, token_ids)
        _put(host.order, token_order(bucket.rows, on_device))
        _put(host.positions, np.concatenate([segment.positions() for segment in segments]))
        _put(host.origins, origin_array(segments, symmetric=any(tiling.symmetric for tiling in self.tilings)))
        _put(host.feedback_flags, np.concatenate([_feedback_flags(segment) for segment in segments]))
        _put(host.slots, np.concatenate([own.table.slot_array(own.start, own.end) for own in segments]))
        _put(host.chosen, rows)
        if described is not None:
            _put(host.segments, described)
            _put(host.cells, cells)
        for tiles, tiling in zip(host.tiles, self.tilings, strict=True):
            own = tile_array(segments, tiling)
            tiles[:, 0] = bucket.segments + 1  # a segment without tokens
            _put(tiles, own)
            if launching.leaves_idle(len(tiles) * tiling.kv_heads, self.device):
                parts = max(parts, most_parts(own + np.array([0, 0, 0, margin])))
        return buffer, 1 << (parts - 1).bit_length()

    def _replay(self, bucket: Bucket, static: _Input) -> None:
        self._batch.plans["write"] = static.slots
        for tiles, tiling in zip(static.tiles, self.tilings, strict=True):
            plan = TiledBatch(tiles, static.segments, static.cells, static.positions, static.origins, bucket.parts)
            self._batch.plans[tiling] = plan
        if bucket not in self._replays:
            run, before = partial(self._run, static, has_feedback=bucket.has_feedback), reserved_bytes(self.device)
            graph = launching.capture(run, self.device)
            self._replays[bucket] = graph or run
            self.num_graphs += graph is not None
            self.is_refused |= graph is None
            self._captured_bytes += max(0, reserved_bytes(self.device) - before)
        self._replays[bucket]()
        self.num_runs += 1

    def _run(self, static: _Input, *, has_feedback: bool) -> None:
        self._batch.token_ids = static.sources.index_select(0, static.order)
        if has_feedback:
            assert self._feedback is not None
            self._batch.static_feedback = static.feedback_flags != 0, self._feedback[: len(static.feedback_flags)]
        for kept, output in zip(self._outputs, self._forward(self._batch, static.chosen), strict=True):
            kept[: len(output)].copy_(output)


def static_passes(
    forward: Forward,
    store: KVStore,
    page_size: int,
    device: torch.device,
    least: int = 1,
    feedback: Tensor | None = None,
) -> StaticPasses | None:
    """Make the small passes over ``store``, whose last page belongs to no request; ``None`` if a GPU cannot capture them.

    They hold at least ``least`` rows of each request, and self-conditioning inputs if ``feedback`` is given.
    """
    scratch = BlockTable(page_size, [store.num_slots // page_size - 1])
    passes = StaticPasses(forward, scratch, device, least, feedback)
    if device.type == "cpu":
        return passes
    if not passes.can_be_captured:
        return None
    is_alike = passes.repeats()
    if passes.is_refused:  # a warning said so
        return None
    if not is_alike:
        warnings.warn(
            "a CUDA graph computes other values than its operations; these are launched one by one", stacklevel=2
        )
        return None
    return passes


def _are_alike(found: Tensor, expected: Tensor) -> bool:
    """Return True if two outputs are equal up to rounding. Their means are ignored, because a constant offset of logits
    changes nothing.

    Logits of tokens that are not drafted are −∞ in both.
    """
    here = expected.isfinite()
    numbers = [torch.where(here, values.float(), 0.0) for values in (found, expected)]
    own, other = (torch.where(here, values - values.sum() / here.sum().clamp_min(1), 0.0) for values in numbers)
    return bool((found.isfinite() == here).all() and (own - other).norm() <= _ALIKE * other.norm())


def _feedback_flags(segment: Segment) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return flags of the tokens of a segment that have self-conditioning input."""
    count = 0 if segment.feedback is None else len(segment.feedback)
    return np.repeat(np.array((0, 1), dtype=np.int32), (segment.length - count, count))


def _put(part: Tensor, values: Any) -> None:
    """Write ``values`` to the beginning of a part on the host; the rest stays 0."""
    part.numpy()[: len(values)] = values
