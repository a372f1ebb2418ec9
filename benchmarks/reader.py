"""An inflated target whose prompts are read by the small one that it was inflated from (``benchmarks/inflate.py``).

To read 32,000 tokens takes a model of 0.6B more than an hour of one core. What it keeps of them is known without it: an inflated
target's K/V are the small one's, head after head. So the small target reads prompts, and its K/V and features are widened. All
passes of decoding are the inflated target's own, over all of its layers and of the context. Layers that inflation added get the
K/V of a layer below, which costs as much and changes nothing: what they compute is multiplied by zero.
"""

import time

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.inflate import Shape, Widening
from volley import Target
from volley.memory.batch import RaggedBatch
from volley.memory.kv_store import KVStore
from volley.memory.recurrent_pass import RecurrentPass
from volley.models.targets.rehearsal import made_up
from volley.models.targets.taps import Taps

LONGEST_DRAFT = 64  # tokens of a pass that is still decoding
CHUNK = 512  # tokens of a prompt that an engine on a CPU reads in one pass
NEVER = -1e3  # logits of tokens that the small model does not have


class ReadTarget(Target):
    """An inflated target with a reader: :meth:`read_by`. One request at a time."""

    def read_by(self, reader: Target, tapped: tuple[int, ...]) -> None:
        """``reader`` is the target that this one was inflated from, in any dtype; drafters tap its layers ``tapped``."""
        sizes = {name: getattr(self.model.config, name) for name in Shape.__dataclass_fields__}
        self._states = Widening(reader.model.config.to_dict(), Shape(**sizes)).write
        self._reader, self._taps = reader, Taps(reader.model, tapped)
        self._store: KVStore | None = None
        self._seconds = dict[int, float]()
        self._chunks: dict[tuple[int, bytes], tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]] = {}

    def forward(
        self,
        batch: RaggedBatch,
        store: KVStore,
        rows: Tensor,
        taps: Taps | None = None,
        states: RecurrentPass | None = None,
    ) -> Tensor:
        if len(batch) <= LONGEST_DRAFT:
            return super().forward(batch, store, rows, taps, states)
        (segment,) = batch.segments
        layers, features, logits = self._read(batch, store, rows)
        for layer, (heads, _) in enumerate(self.kv_shapes):
            wide = (x.repeat(1, heads // x.shape[1], 1).to(self.dtype) for x in layers[layer % len(layers)])
            store.write(layer, segment.table.slots(segment.start, segment.end), *wide)
        if taps is not None:
            assert taps.layer_ids == self._taps.layer_ids
            own = features.unflatten(1, (len(taps.layer_ids), -1))
            taps.leave(self._states.widen(own, 2).flatten(1).to(self.dtype))
        return pad(logits, (0, self.vocab_size - logits.shape[1]), value=NEVER)

    def _read(
        self, batch: RaggedBatch, store: KVStore, rows: Tensor
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
        """The small target's K/V of each layer, features and logits; engines that take turns at a prompt have it read once."""
        (segment,) = batch.segments
        key = (segment.start, batch.token_ids.numpy().tobytes())
        if key not in self._chunks:
            if segment.start == 0:
                self._chunks, self._store = {}, self._reader.make_store("auto", store.num_slots)
            assert self._store is not None
            logits = self._reader.forward(batch, self._store, rows, self._taps)
            layers = [
                self._store.extract(layer, segment.table, segment.start, segment.end)
                for layer in range(self._reader.num_layers)
            ]
            self._chunks[key] = layers, self._taps.take()[0], logits
        return self._chunks[key]

    @torch.inference_mode()
    def reading_seconds(self, length: int) -> float:
        """In which this target itself would read ``length`` tokens.

        Two chunks are timed, the first and the last: the time of a chunk grows linearly with the tokens before it.
        """
        return length / CHUNK * (self._chunk_seconds(0) + self._chunk_seconds(length - CHUNK)) / 2

    def _chunk_seconds(self, context: int) -> float:
        if context not in self._seconds:
            batch, store = made_up([CHUNK], self.kv_shapes, self.dtype, self.device, causal=True, context=context)
            for layer, shape in enumerate(self.kv_shapes):  # or all of it would be one page of zeros
                store.write(layer, slice(0, context), *torch.randn(2, 1, *shape, dtype=self.dtype))
            started = time.perf_counter()
            super().forward(batch, store, torch.tensor([CHUNK - 1]))
            self._seconds[context] = time.perf_counter() - started
        return self._seconds[context]
