"""Run recurrent layers over a ragged batch: compute their outputs, and the states after any token.

A segment that may be cut is *open*: the pass keeps intermediate values. Once the verdict says which tokens stay,
:meth:`RecurrentPass.write` computes the states after them. A segment with *marks* stays as a whole and may be long. It is
computed in pieces, and states are kept only at its marks. Both write states only after the pass.

The first token of a segment always stays, so a segment of one token cannot be cut. On a CPU such a segment is *settled*: each
layer advances its states at once, while they are in the cache. If the pass fails, its requests must restart.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley import native
from volley.errors import UnsupportedModelError
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.recurrence import Run, Trace, advance, scan
from volley.memory.recurrent_store import RecurrentLayout, RecurrentStore, read_slots
from volley.memory.upload import upload, upload_indices, upload_together
from volley.native.states import Moved, move_states, take_token

_PIECE = 64  # tokens of a marked segment that are computed at once


class Wanted(NamedTuple):
    """Order to write the states after token ``row`` of a segment into a slot."""

    segment: int
    row: int
    slot: int


class _OpenGroup(NamedTuple):
    """Open segments of similar lengths, computed together and padded to the longest."""

    members: list[int]
    rows: Tensor | None
    """Rows of their tokens in the batch ``[N, T]``, the batch's length for padding; ``None``: the whole batch in its order."""
    real: Tensor
    """Indices in ``N · T`` that are no padding; ``tokens`` are their rows in the batch."""
    tokens: Tensor
    ancestors: Tensor
    slots: list[int | None]


class _Move(NamedTuple):
    """Order to move the states after token ``row`` of a group's run into a slot."""

    run: int
    row: int
    slot: int


class _Settled(NamedTuple):
    """Segments of one token, whose states each layer advances in place."""

    slots: dict[int, int]
    """Slot of each segment."""
    order: NDArray[np.int64]
    """Slots in the order of the segments."""
    rows: Tensor | None
    """Rows of their tokens in the batch; ``None``: the whole batch in its order."""


class RecurrentPass:
    def __init__(
        self,
        batch: RaggedBatch,
        layout: RecurrentLayout,
        store: RecurrentStore | None = None,
        marks: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        """Prepare a pass over ``batch``. ``marks`` are rows of each segment in ascending order, its last one included; ``()``:
        an open segment.

        The states before a segment are in slot ``segment.table.state`` of ``store``; they are zero if that is ``None`` or the
        segment begins its sequence. Without a store no state can be written, and long segments are computed in pieces too.
        """
        if not all(segment.causal for segment in batch.segments):
            raise UnsupportedModelError(
                "recurrent layers read tokens from left to right and cannot compute a bidirectional segment; "
                "use a target whose layers are all attention"
            )
        self.batch, self.layout, self.store = batch, layout, store
        self.marks = list(marks or [()] * len(batch.segments))
        if store is None:
            self.marks = [(s.length - 1,) if s.length > _PIECE and s.parents is None else () for s in batch.segments]
        self._settled = self._find_settled()
        self._groups = self._make_groups()
        self._taps: dict[int, Tensor] = {}
        self._inputs: list[Tensor] = []
        self._num_rules = 0
        self._traces: list[list[Trace]] = []
        self._marked: list[dict[tuple[int, int], Tensor]] = []

    # -- called by the layers, in their order --------------------------------------------------------------------------
    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the next causal convolution, without its activation: ``inputs [T, C]``, ``weight [C, K]``; ``[T, C]`` in
        fp32."""
        width, place = weight.shape[1], len(self._inputs)
        slots = [self._slot(segment) for segment in self.batch.segments]
        if self.store is None:
            past = inputs.new_zeros(len(slots) * (width - 1), inputs.shape[1])
        else:
            past = read_slots(self.store.histories[place], slots).flatten(0, 1)
        extended = torch.cat((past.to(inputs.dtype), inputs))
        self._inputs.append(extended)
        taps = self._taps_of(width)
        outputs = torch.einsum("tkc,ck->tc", extended[taps].float(), weight.flip(1).float())
        return outputs if bias is None else outputs + bias.float()

    def scan(self, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, betas: Tensor | None) -> Tensor:
        """Compute the next linear recurrence: inputs ``[T, heads, …]`` in fp32, named as in :class:`Run`; returns ``[T, heads,
        values]``."""
        inputs = Run(queries, keys, values, decays, betas)
        outputs = torch.empty_like(values)
        traces = []
        if self._settled.slots:
            outputs = self._scan_settled(inputs, outputs)
        for group in self._groups:
            run = inputs.map(partial(_group_rows, group=group))
            own, trace = scan(run, self._states(group.slots, run), group.ancestors)
            traces.append(trace)
            own = own.transpose(1, 2).flatten(0, 1)
            if group.rows is None:
                outputs = own
            else:
                outputs.index_copy_(0, group.tokens, own.index_select(0, group.real))
        marked: dict[tuple[int, int], Tensor] = {}
        for index, marks in enumerate(self.marks):
            if marks:
                self._scan_marked(index, inputs.map(partial(self._rows_of, index=index)), outputs, marked)
        self._traces.append(traces)
        self._marked.append(marked)
        self._num_rules += 1
        return outputs

    def _scan_settled(self, inputs: Run, outputs: Tensor) -> Tensor:
        """Compute the settled segments and advance their states. Return ``outputs`` with theirs filled in."""
        assert self.store is not None
        _, slots, rows = self._settled
        run = inputs.map(lambda x: (x if rows is None else x[rows])[:, :, None])
        own = take_token(self.store.states[self._num_rules], slots, run)[:, :, 0]
        return own if rows is None else outputs.index_copy_(0, rows, own)

    def _scan_marked(self, index: int, run: Run, outputs: Tensor, marked: dict[tuple[int, int], Tensor]) -> None:
        """Compute a marked segment piece by piece: its outputs, and the states at its marks."""
        start, states = self.batch.offsets[index], self._states([self._slot(self.batch.segments[index])], run)
        first = 0
        for mark in self.marks[index]:
            while first <= mark:
                size = min(_PIECE, mark + 1 - first)
                piece = run.map(partial(torch.narrow, dim=2, start=first, length=size))
                ancestors = torch.ones(1, size, size, dtype=torch.bool, device=outputs.device).tril()
                own, trace = scan(piece, states, ancestors)
                outputs[start + first : start + first + size] = own[0].transpose(0, 1)
                states = advance(trace, ancestors, upload_indices([size - 1], outputs.device))(states)
                first += size
            marked[index, mark] = states[0]

    # -- what stays ----------------------------------------------------------------------------------------------------
    def write(self, wanted: Sequence[Wanted]) -> None:
        """Write states after tokens into slots. No slot may be one that another segment of this pass still reads."""
        assert self.store is not None, "a pass without a store keeps nothing"
        if not wanted:
            return
        self._write_histories(wanted)
        for states, marked in zip(self.store.states, self._marked, strict=True):
            found = [(marked[each.segment, each.row], each.slot) for each in wanted if self.marks[each.segment]]
            for state, slot in found:
                states[slot] = state
        for segment, _, slot in wanted:
            moved = self._settled.slots.get(segment, slot)
            if moved != slot:
                for states in self.store.states:
                    states[slot] = states[moved]
        for place, group in enumerate(self._groups):
            runs = {segment: run for run, segment in enumerate(group.members)}
            own = [_Move(runs[each.segment], each.row, each.slot) for each in wanted if each.segment in runs]
            if own and self._traces:
                self._write_group(place, own)

    def _write_histories(self, wanted: Sequence[Wanted]) -> None:
        assert self.store is not None
        device = self.batch.token_ids.device
        offsets = upload_indices([self.batch.offsets[each.segment] + each.row for each in wanted], device)
        slots = upload_indices([each.slot for each in wanted], device)
        taps: dict[int, Tensor] = {}
        for history, extended in zip(self.store.histories, self._inputs, strict=True):
            size = history.shape[1]
            if size not in taps:
                taps[size] = self._taps_of(size + 1)[offsets, :-1].flip(1)
            history.index_copy_(0, slots, extended[taps[size]].to(history.dtype))

    def _write_group(self, place: int, moves: list[_Move]) -> None:
        assert self.store is not None
        group, device = self._groups[place], self.batch.token_ids.device
        traces = [traces[place] for traces in self._traces]
        if native.is_built and device.type == "cpu":
            self._move_in_c(group, traces, moves)
            return
        runs, rows, slots = upload(np.array(moves, dtype=np.int64).T.copy(), device)
        ancestors = group.ancestors if len(group.ancestors) == 1 else group.ancestors[runs]
        before = [group.slots[move.run] for move in moves]
        for states, trace in zip(self.store.states, traces, strict=True):
            step = advance(Trace(*(x[runs] for x in trace)), ancestors, rows)
            states.index_copy_(0, slots, step(read_slots(states, before)))

    def _move_in_c(self, group: _OpenGroup, traces: list[Trace], moves: list[_Move]) -> None:
        """Move the states of all layers in one call. A slot that other moves read is written last."""
        assert self.store is not None
        moves = sorted(moves, key=lambda move: move.slot == group.slots[move.run])
        before = [group.slots[move.run] for move in moves]
        table = [
            (run, row, -1 if source is None else source, slot)
            for (run, row, slot), source in zip(moves, before, strict=True)
        ]
        seen = group.ancestors.numpy()
        stays = np.stack([seen[run if len(seen) > 1 else 0, row] for run, row, _ in moves])
        layers = [Moved(states, *trace) for states, trace in zip(self.store.states, traces, strict=True)]
        move_states(layers, np.array(table, dtype=np.int64), stays)

    # -- the batch's structure -----------------------------------------------------------------------------------------
    def _slot(self, segment: Segment) -> int | None:
        return None if segment.start == 0 or self.store is None else segment.table.state

    def _states(self, slots: list[int | None], run: Run) -> Tensor:
        """Return the states before the runs of the current recurrence."""
        if self.store is not None:
            return read_slots(self.store.states[self._num_rules], slots)
        return run.keys.new_zeros(len(slots), run.keys.shape[1], run.keys.shape[-1], run.values.shape[-1])

    def _rows_of(self, x: Tensor, index: int) -> Tensor:
        """Return one segment's rows of ``x [T, heads, …]`` as ``[1, heads, length, …]``."""
        return x[self.batch.offsets[index] : self.batch.offsets[index + 1]].transpose(0, 1)[None]

    def _find_settled(self) -> _Settled:
        slots = dict[int, int]()
        if native.is_built and self.batch.token_ids.device.type == "cpu":
            for index, segment in enumerate(self.batch.segments):
                slot = self._slot(segment)
                if segment.length == 1 and slot is not None and not self.marks[index]:
                    slots[index] = slot
        rows = None if len(slots) == len(self.batch) else torch.tensor([self.batch.offsets[index] for index in slots])
        return _Settled(slots, np.array([*slots.values()], dtype=np.int64), rows)

    def _make_groups(self) -> list[_OpenGroup]:
        alike: dict[int, list[int]] = {}
        for index, segment in enumerate(self.batch.segments):
            if not self.marks[index] and index not in self._settled.slots:
                alike.setdefault((segment.length - 1).bit_length(), []).append(index)
        return [self._make_group(members) for members in alike.values()]

    def _make_group(self, members: list[int]) -> _OpenGroup:
        segments, device = [self.batch.segments[index] for index in members], self.batch.token_ids.device
        longest = max(segment.length for segment in segments)
        rows = np.full((len(members), longest), len(self.batch))
        for row, index, segment in zip(rows, members, segments, strict=True):
            row[: segment.length] = self.batch.offsets[index] + np.arange(segment.length)
        ancestors = np.tri(longest, dtype=np.bool_)[None]
        if any(segment.parents is not None for segment in segments):
            ancestors = ancestors.repeat(len(members), axis=0)
            for seen, segment in zip(ancestors, segments, strict=True):
                seen[: segment.length, : segment.length] = segment.ancestors()
        is_batch = np.array_equal(rows.ravel(), np.arange(len(self.batch)))
        flat = rows.ravel()
        real = np.flatnonzero(flat < len(self.batch))
        places, inside, tokens = upload_together([rows, real, flat[real]], device)
        slots = [self._slot(segment) for segment in segments]
        return _OpenGroup(members, None if is_batch else places, inside, tokens, upload(ancestors, device), slots)

    def _taps_of(self, width: int) -> Tensor:
        """Return the rows that a convolution reads for each token, itself first: ``[T, width]``, in all histories followed by
        the batch."""
        if width not in self._taps:
            segments = self.batch.segments
            base = len(segments) * (width - 1)
            taps = []
            for index, segment in enumerate(segments):
                parents = np.arange(-1, segment.length - 1)
                if segment.parents is not None:
                    parents[1:] = segment.parents
                local = [np.arange(segment.length)]
                for _ in range(width - 1):
                    before = local[-1]
                    local.append(np.where(before >= 0, parents[np.maximum(before, 0)], before - 1))
                read = np.stack(local, axis=1)
                history = index * (width - 1) + (width - 1) + read
                taps.append(np.where(read >= 0, base + self.batch.offsets[index] + read, history))
            self._taps[width] = upload(np.concatenate(taps), self.batch.token_ids.device)
        return self._taps[width]


def _group_rows(x: Tensor, group: _OpenGroup) -> Tensor:
    """Return a group's rows of ``x [T, heads, …]`` as ``[N, heads, longest, …]``, with zeros for padding."""
    if group.rows is None:
        return x.view(len(group.members), -1, *x.shape[1:]).transpose(1, 2)
    return torch.cat((x, torch.zeros_like(x[:1])))[group.rows].transpose(1, 2)
