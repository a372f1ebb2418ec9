"""Estimate the memory that a training needs, before it starts, and refuse one that does not fit."""

from dataclasses import dataclass

import torch

from volley.errors import ConfigError
from volley.memory.device import memory_bytes
from volley.models.layers.accelerate import weight_bytes
from volley.train.documents import Document
from volley.train.features import KEPT, FrozenTarget
from volley.train.losses import CHUNK

BYTES_A_WEIGHT = 16
"""Bytes for each weight of a drafter: the weight, its gradient and the optimizer's two means, in fp32."""
LIBRARIES = 700_000_000
STATES = 12
"""Approximate number of tensors, as wide as the draft MLP, that a row of a pass keeps for its gradients."""


@dataclass(frozen=True)
class Needs:
    """Bytes that a training needs, by use."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def describe(self) -> str:
        """Describe the needs in one line."""
        named = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in self.parts.items() if size >= 5e7)
        return f"memory: {self.total / 1e9:.1f} GB at most ({named})"

    def check(self, device: torch.device) -> None:
        """Refuse a training that needs more memory than the device has."""
        have = memory_bytes(device)
        if self.total > have:
            raise ConfigError(
                f"the training needs {self.total / 1e9:.1f} GB and {device.type} has {have / 1e9:.1f}; give fewer layers, "
                "--features cache, smaller --tokens-per-batch, or a smaller target"
            )


def needs(
    target: FrozenTarget,
    documents: list[Document],
    *,
    parameters: int,
    taps: int,
    rows: int,
    intermediate_size: int,
    remembers: bool,
    decodes: bool,
) -> Needs:
    """Return the memory of a training of ``parameters``, with ``rows`` of blocks in one pass.

    On a CPU the target's weights are packed, and the originals stay. With ``decodes`` a second target decodes for evaluations.
    """
    own = sum(weight.nbytes for weight in target.model.parameters())
    served = 0 if target.served is None else weight_bytes(target.served.model)
    copies = 1 if target.device.type == "cuda" else 2
    width, vocab_size = target.head.shape[1], target.head.shape[0]
    features = taps * width * KEPT.itemsize * sum(map(len, documents)) if remembers else 0
    return Needs(
        {
            "the target": own * copies,
            "the target that decodes": served or (own * copies if decodes else 0),
            "the drafter": BYTES_A_WEIGHT * parameters,
            "features": min(features, target.remembered.budget),
            "a step": rows * STATES * intermediate_size * 4 + 3 * CHUNK * vocab_size * 4,
            "libraries": LIBRARIES,
        }
    )
