"""Store recurrent states: a slot holds those of all layers after one token of one request."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from volley.memory.upload import upload_indices


@dataclass(frozen=True)
class RecurrentLayout:
    """Shapes of one sequence's states, in the order in which a model's layers compute them."""

    convolutions: tuple[tuple[int, int], ...] = ()
    """Shape ``(K − 1, C)`` of each causal convolution: the inputs of C channels for the K − 1 tokens before the next one."""
    rules: tuple[tuple[int, int, int], ...] = ()
    """Heads, keys and values of each linear recurrence."""

    def __bool__(self) -> bool:
        return bool(self.convolutions or self.rules)

    def bytes_per_state(self, dtype: torch.dtype) -> int:
        """Return the bytes of a slot: convolutions in the model's ``dtype``, recurrences in fp32."""
        return sum(map(prod, self.convolutions)) * dtype.itemsize + 4 * sum(map(prod, self.rules))


class RecurrentStore:
    """State tensors of ``num_slots`` slots: ``[slots, K − 1, C]`` per convolution, ``[slots, heads, keys, values]`` in fp32
    per recurrence."""

    def __init__(self, layout: RecurrentLayout, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.num_slots = layout, num_slots
        self.bytes_per_state = layout.bytes_per_state(dtype)
        self.histories = [torch.zeros(num_slots, *shape, dtype=dtype, device=device) for shape in layout.convolutions]
        self.states = [torch.zeros(num_slots, *shape, device=device) for shape in layout.rules]

    def copy(self, source: int, target: int) -> None:
        """Copy one slot's states to another."""
        for tensor in (*self.histories, *self.states):
            tensor[target] = tensor[source]

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.bytes_per_state


def read_slots(stored: Tensor, slots: list[int | None]) -> Tensor:
    """Return entries ``slots`` of a stored tensor; zeros for ``None``, a sequence that begins."""
    if len(slots) == 1:
        return torch.zeros_like(stored[:1]) if slots[0] is None else stored[slots[0] : slots[0] + 1]
    found = stored.index_select(0, upload_indices([slot or 0 for slot in slots], stored.device))
    for place, slot in enumerate(slots):
        if slot is None:
            found[place] = 0
    return found
