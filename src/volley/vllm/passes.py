"""View of one pass of vLLM's target: the features of every token, and the slots that hold its K/V.

Forward hooks tap the features. vLLM does not name requests to a proposer. They are identified by the metadata of its attention
back ends in the forward context: ``block_table``, ``query_start_loc`` and ``seq_lens``, with one row per request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from volley.errors import MismatchError, UnsupportedModelError

FINAL = -2
"""Key of the final normed states in :attr:`TargetPass.states`; -1 is the embedding."""

IntArray = NDArray[np.int64]
Tokens = NDArray[np.int32]


@dataclass(slots=True)
class TargetPass:
    """Pass over T tokens of R requests, concatenated."""

    starts: IntArray
    """Position of each request's first token of the pass ``[R]``."""
    offsets: IntArray
    """Row of each request's first token, and T ``[R + 1]``."""
    blocks: NDArray[np.int32]
    """vLLM's blocks of each request ``[R, most]``."""
    block_size: int
    num_slots: int
    """Total number of vLLM's slots."""
    token_ids: Tensor | None
    states: dict[int, Tensor] = field(default_factory=dict)

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.offsets)

    @property
    def ends(self) -> IntArray:
        """Return the position after each request's last token of the pass ``[R]``."""
        return self.starts + self.lengths

    def slots(self, row: int, start: int, end: int) -> IntArray:
        """Return the slots of positions ``[start, end)`` of the request in ``row``."""
        positions = np.arange(start, end)
        found = self.blocks[row, positions // self.block_size].astype(np.int64) * self.block_size
        return np.asarray(found + positions % self.block_size)

    def slot(self, row: int, position: int) -> int:
        return int(self.slots(row, position, position + 1)[0])

    def span(self, ends: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return rows, positions and slots of this pass's tokens before position ``ends [R]`` of their requests."""
        rows, positions, slots = [], [], []
        for row, (start, end) in enumerate(zip(self.starts.tolist(), ends.tolist(), strict=True)):
            rows.append(int(self.offsets[row]) + np.arange(end - start))
            positions.append(np.arange(start, end))
            slots.append(self.slots(row, start, end))
        return np.concatenate(rows), np.concatenate(positions), np.concatenate(slots)

    def features(self, layer_ids: Sequence[int]) -> Tensor:
        """Return the features ``[T, taps · H]``."""
        return torch.cat([self.states[index][: int(self.offsets[-1])] for index in layer_ids], dim=-1)


class PassTaps:
    """Hooks that keep the last pass until it is taken, and pass it to ``skipped`` if the next one begins earlier."""

    def __init__(
        self,
        model: nn.Module,
        layer_ids: Sequence[int],
        block_size: int,
        skipped: Callable[[TargetPass], None],
        with_final: bool = False,
    ) -> None:
        layers = decoder_layers(model)
        missing = [i for i in layer_ids if not 0 <= i < len(layers) or type(layers[i]).__name__ == "PPMissingLayer"]
        if missing:
            raise MismatchError(
                f"volley taps target layers {list(layer_ids)} and layers {missing} are not here ({len(layers)} layers in "
                "this process); use this target's drafter, or taps that it has, without pipeline parallelism"
            )
        self._wanted, self._block_size, self._skipped = set(layer_ids), block_size, skipped
        self._pass: TargetPass | None = None
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for index in self._wanted:
            layers[index].register_forward_hook(self._keeper(index))
        if with_final:
            self._wanted.add(FINAL)
            final_norm(model).register_forward_hook(self._keep_final)

    def take(self) -> TargetPass | None:
        """Return the last pass; ``None`` if there was none or its layers did not call the hooks."""
        found, self._pass = self._pass, None
        return found if found is not None and found.states.keys() == self._wanted else None

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (unread := self.take()) is not None:
            self._skipped(unread)
        self._pass = _current_pass(kwargs.get("input_ids", args[0] if args else None), self._block_size)

    def _keeper(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            if self._pass is not None:
                # vLLM adds a layer's residual in place in the next layer. Their sum here is the layer's output elsewhere.
                self._pass.states[index] = output[0] + output[1] if isinstance(output, tuple) else output.clone()

        return keep

    def _keep_final(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._pass is not None:
            self._pass.states[FINAL] = (output[0] if isinstance(output, tuple) else output).clone()


def _decoder(model: nn.Module) -> Any:
    get_language_model = getattr(model, "get_language_model", None)
    language = get_language_model() if callable(get_language_model) else model
    return getattr(language, "model", None)


def final_norm(model: nn.Module) -> nn.Module:
    """Return the norm after the last layer, whose output, alone or with the residual, the head reads."""
    norm = getattr(_decoder(model), "norm", None)
    if not isinstance(norm, nn.Module):
        raise UnsupportedModelError(
            f'vLLM\'s {type(model).__name__} has no `model.norm` to tap; leave out "final", and losses against its distributions'
        )
    return norm


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of one of vLLM's causal LMs."""
    layers = getattr(_decoder(model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModelError(
            f"vLLM's {type(model).__name__} has no `model.layers` to tap; use vLLM's own drafting methods with this target"
        )
    return layers


def _current_pass(token_ids: Tensor | None, block_size: int) -> TargetPass | None:
    """Return the pass that vLLM has just begun; ``None`` for a dummy pass of its warm-up."""
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    if not context.attn_metadata:
        return None
    layer, found = _whole_attention(context)
    slot_mapping, offsets = found.slot_mapping.cpu().numpy(), found.query_start_loc.cpu().numpy().astype(np.int64)
    starts = found.seq_lens.cpu().numpy().astype(np.int64)[: len(offsets) - 1] - np.diff(offsets)
    num_slots = layer.kv_cache.numel() // (2 * layer.num_kv_heads * layer.head_size)
    blocks = found.block_table.cpu().numpy().copy()  # vLLM reuses these buffers in the next pass
    token_ids = None if token_ids is None else token_ids.clone()
    target_pass = TargetPass(starts, offsets, blocks, block_size, num_slots, token_ids)
    if target_pass.slot(0, int(starts[0])) != slot_mapping[0]:
        raise UnsupportedModelError(
            f"vLLM does not keep this target's K/V in blocks of {block_size} tokens as its configuration says; "
            "use vLLM's own drafting methods with this target"
        )
    return target_pass


def _whole_attention(context: Any) -> tuple[Any, Any]:
    """Return a layer that attends to all positions and its metadata, if there is one."""
    if not isinstance(context.attn_metadata, dict):
        raise UnsupportedModelError("volley's proposer cannot follow microbatches; switch them off (no --enable-dbo)")
    wanted = ("block_table", "query_start_loc", "seq_lens", "slot_mapping")
    layers = context.no_compile_layers
    usable = [
        (layers[name], metadata)
        for name, metadata in context.attn_metadata.items()
        if all(hasattr(metadata, key) for key in wanted) and hasattr(layers.get(name), "kv_cache")
    ]
    if not usable:
        raise UnsupportedModelError(
            "none of the target's layers keeps K/V in blocks that volley knows; use vLLM's own drafting methods"
        )
    return min(usable, key=lambda pair: pair[0].sliding_window is not None)
