"""Times passes of both models on made-up text, for cost tables; apart from all requests, in K/V of its own."""

import time
from collections.abc import Callable

import torch

from volley.decode.sampling import best_tokens
from volley.engine.runner import Runner
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import KVStore, make_store
from volley.models.blocks import block_states

_CONTEXT = 128  # tokens before each made-up segment
_MOST_RUNS = 8
_LONG = 0.1  # seconds of timing after which one run has to do
_ALIKE = 1.05  # runs that differ by less were not interrupted


class Rehearsal:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def target(self, tokens: int, requests: int) -> float:
        """Seconds of one target pass over ``tokens``, spread over ``requests``, all of them verified and one of each injected."""
        return self._pass(_spread(tokens, requests), chosen=tokens, injected=requests)

    def rows(self) -> tuple[float, float]:
        """Seconds that each token of a prompt, and each row of padding, adds to a target pass."""
        prompt = min(_CONTEXT, self._runner.target.context_length)
        uneven = [12, *_spread(10, 5), *_spread(10, 10)]
        rows = 16 * max(uneven) - sum(uneven)
        times = [
            (
                self._pass([prompt], chosen=1, injected=prompt),
                self.target(1, 1),
                self._pass(uneven, chosen=32, injected=16),
                self.target(32, 16),
            )
            for _ in range(2)
        ]
        reading, plain, padded, even = map(min, zip(*times, strict=True))
        return max(0.0, reading - plain) / prompt, max(0.0, padded - even) / rows

    @torch.inference_mode()
    def _pass(self, lengths: list[int], *, chosen: int, injected: int) -> float:
        """Seconds of one target pass over requests of so many tokens."""
        target, drafter = self._runner.target, self._runner.drafter
        batch = self._batch(lengths, causal=True)
        store = self._store(target.kv_shapes, batch)
        rows = torch.arange(len(batch), device=target.device)[-chosen:]
        width = 0 if drafter is None else drafter.fc.in_features
        features = torch.zeros(injected, width, dtype=target.dtype, device=target.device)

        def run() -> None:
            best_tokens(target.forward(batch, store, rows))
            if drafter is not None:
                drafter.context_kv(features, batch.positions[:injected])

        return _timed(run)

    @torch.inference_mode()
    def draft(self, tokens: int, requests: int) -> float:
        """Seconds to draft ``tokens``, anchors included, for ``requests``."""
        drafter, target, head = self._runner.drafter, self._runner.target, self._runner.head
        assert drafter is not None
        batch = self._batch(_spread(tokens, requests), causal=False)
        store, windows = self._store(drafter.kv_shapes, batch), drafter.windows()

        def run() -> None:
            hidden = block_states(drafter, batch, store, target.attention, target.embed, windows)
            logits = drafter.logits(hidden, target.head)
            if head is None:
                best_tokens(logits)
            else:
                head.lattices(hidden, logits, [0] * requests, [len(batch) // requests] * requests)

        return _timed(run)

    def _batch(self, lengths: list[int], *, causal: bool) -> RaggedBatch:
        context = min(_CONTEXT, max(0, self._runner.target.context_length - max(lengths)))
        segments: list[Segment] = []
        for index, length in enumerate(lengths):
            segments.append(Segment(BlockTable(context + max(lengths), [index]), context, length, causal))
        token_ids = torch.zeros(sum(lengths), dtype=torch.long, device=self._runner.target.device)
        return RaggedBatch(segments, token_ids)

    def _store(self, shapes: list[tuple[int, int]], batch: RaggedBatch) -> KVStore:
        target = self._runner.target
        slots = sum(segment.table.capacity for segment in batch.segments)
        return make_store("auto", shapes, slots, target.dtype, target.device)


def _spread(tokens: int, requests: int) -> list[int]:
    return [-(-tokens // requests)] * requests


def _timed(run: Callable[[], object]) -> float:
    """The fastest run, once another was about as fast: a machine with other work interrupts most runs that are long."""
    run()
    times: list[float] = []
    while sum(times) < _LONG and (len(times) < 2 or (times[1] > _ALIKE * times[0] and len(times) < _MOST_RUNS)):
        started = time.perf_counter()
        run()
        times = sorted([*times, time.perf_counter() - started])
    return times[0]
