"""Adapters: a drafter's weights for another workload as low-rank updates of its linear maps (LoRA), in PEFT's two files.

``W + (α/r)·B·A`` with ``A [r, in]`` and ``B [out, r]`` for every linear map except those of the heads. Training changes only A
and B. For decoding the update is added to a copy of the drafter, which then runs like any drafter.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from volley.errors import ConfigError, MismatchError, check_keys
from volley.files import read_json, write_atomically
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.inject import Injection
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.tensors import check_finite, check_weights, load_tensors, save_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SAME_IN_ALL: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "target_modules": ["fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Config with the names of PEFT's ``adapter_config.json``; ``drafter`` is the :func:`drafter_fingerprint` of its drafter."""

    r: int
    lora_alpha: float
    drafter: str

    def to_json(self) -> dict[str, Any]:
        return {**_SAME_IN_ALL, **asdict(self)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "AdapterConfig":
        """Parse a config; unknown, missing and unusable entries are errors that name them."""
        own = cls.__dataclass_fields__
        check_keys("adapter config key", raw, [*own, *_SAME_IN_ALL])
        for key, value in _SAME_IN_ALL.items():
            if raw.get(key) != value:
                raise ConfigError(f"adapter config: {key} is {raw.get(key)!r}; volley's adapters have {value!r}")
        missing = [name for name in own if name not in raw]
        if missing:
            raise ConfigError(f"adapter config lacks {', '.join(map(repr, missing))}; save the adapter again")
        if not isinstance(raw["r"], int) or raw["r"] < 1:
            raise ConfigError(f"adapter config: r is {raw['r']!r}; a rank is a positive integer")
        if not isinstance(raw["lora_alpha"], int | float):
            raise ConfigError(f"adapter config: lora_alpha is {raw['lora_alpha']!r}; it must be a number")
        return cls(**{name: raw[name] for name in own})


class LowRankUpdate(nn.Module):
    """Parametrisation that adds ``(α/r)·B·A`` to a weight; B starts at zero, so the drafter starts unchanged."""

    def __init__(self, weight: Tensor, config: AdapterConfig) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.lora_A = nn.Parameter(torch.randn(config.r, columns, device=weight.device) * columns**-0.5)
        self.lora_B = nn.Parameter(torch.zeros(rows, config.r, device=weight.device))
        self.scale = config.lora_alpha / config.r

    def forward(self, weight: Tensor) -> Tensor:
        updated: Tensor = weight + self.scale * (self.lora_B @ self.lora_A).to(weight.dtype)
        return updated


@dataclass(frozen=True, eq=False)
class Adapter:
    """Copy of the drafter with an adapter merged in, which requests may choose instead of the drafter."""

    drafter: Drafter
    injection: Injection
    digest: bytes
    """Digest that distinguishes draft K/V of these weights from those of other weights."""


def _linears(drafter: Drafter) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith(("head.", "lm_head")):
            yield name, module


def attach(drafter: Drafter, config: AdapterConfig) -> None:
    """Freeze ``drafter`` and let low-rank updates of its linear maps learn instead."""
    drafter.requires_grad_(False)
    for _, linear in list(_linears(drafter)):
        parametrize.register_parametrization(linear, "weight", LowRankUpdate(linear.weight, config))


def _updates(drafter: Drafter) -> dict[str, LowRankUpdate]:
    """Return the attached updates by the name of their linear map."""
    ending = ".parametrizations.weight.0"
    found = {name: m for name, m in drafter.named_modules() if isinstance(m, LowRankUpdate)}
    return {name.removesuffix(ending): module for name, module in found.items()}


def _tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Return every A and B of the attached updates, by PEFT's names."""
    return {
        f"{_PREFIX}{name}.{part}.weight": tensor
        for name, update in _updates(drafter).items()
        for part, tensor in (("lora_A", update.lora_A), ("lora_B", update.lora_B))
    }


def merge(drafter: Drafter) -> None:
    """Turn attached updates into plain weights."""
    for name in _updates(drafter):
        parametrize.remove_parametrizations(drafter.get_submodule(name), "weight", leave_parametrized=True)


def save_adapter(path: Path, drafter: Drafter, config: AdapterConfig) -> None:
    """Write the updates attached to ``drafter`` as fp32 tensors, each file atomically."""
    write_atomically(path / CONFIG, json.dumps(config.to_json(), indent=2) + "\n")
    save_tensors(path / WEIGHTS, {k: v.float() for k, v in _tensors(drafter).items()}, {"format": "pt"})


def adapted(drafter: Drafter, path: Path | str) -> Drafter:
    """Copy ``drafter`` and merge the adapter in folder ``path``; heads, embedding and rotary tables are shared, not copied."""
    path = Path(path)
    config = AdapterConfig.from_json(read_json(path / CONFIG))
    if config.drafter != drafter_fingerprint(drafter):
        raise MismatchError(
            f"the adapter in {path} was trained for a drafter with fingerprint {config.drafter}, this one's is "
            f"{drafter_fingerprint(drafter)}; load the drafter it was trained on, or train an adapter of this one"
        )
    weights = load_tensors(path / WEIGHTS)
    with torch.device(drafter.norm.weight.device):
        changed = Drafter(drafter.config)
    changed.load_state_dict(drafter.state_dict())
    attach(changed, config)
    expected = _tensors(changed)
    check_weights(path / WEIGHTS, expected, weights)
    check_finite(path / WEIGHTS, weights)
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(weights[name])
        merge(changed)
    changed.head, changed.rotary = drafter.head, drafter.rotary
    changed.lm_head, changed.embed_tokens = drafter.lm_head, drafter.embed_tokens
    return changed.to(drafter.fc.weight.dtype).requires_grad_(False).eval()
