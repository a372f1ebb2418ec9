"""The pilot's network (BlockPilot), its inputs from a prompt's end, and its two files beside the drafter.

``volley pilot`` trains it for one drafter; ``policies/pilot.py`` chooses block sizes with it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from volley.config import DraftingConfig
from volley.errors import ConfigError, MismatchError, check_keys, unknown_key
from volley.files import read_json, write_atomically
from volley.models.drafters.drafter import Drafter
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.tensors import check_finite, check_weights, load_tensors, save_tensors

CONFIG, WEIGHTS = "pilot.json", "pilot.safetensors"
_TOP = 32  # number of likeliest tokens in the input ``top``

PilotInput = Literal["top", "logits", "softmax", "normalised", "hidden"]


@dataclass(frozen=True, kw_only=True)
class PilotConfig:
    """Config of a pilot; ``drafter`` is the :func:`drafter_fingerprint` of the drafter it was trained for."""

    drafter: str
    input: PilotInput
    block_sizes: tuple[int, ...]
    """Block sizes it chooses from, anchor included."""
    width: int
    layers: int
    """Number of linear maps; 1 means no hidden layer."""

    def __post_init__(self) -> None:
        if self.input not in get_args(PilotInput):
            raise unknown_key("pilot input", str(self.input), get_args(PilotInput))
        if self.width < 1 or self.layers < 1:
            raise ConfigError(f"a pilot of width {self.width} with {self.layers} layers; both must be at least 1")
        if not self.block_sizes or min(self.block_sizes) < 1:
            raise ConfigError(f"a pilot that chooses from blocks of {list(self.block_sizes)}; give sizes of at least 1")

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "PilotConfig":
        """Parse a config; unknown and missing entries are errors that name them."""
        known = cls.__dataclass_fields__
        check_keys("pilot config key", raw, known)
        missing = [name for name in known if name not in raw]
        if missing:
            raise ConfigError(f"pilot config lacks {', '.join(map(repr, missing))}; train it again with `volley pilot`")
        return cls(**{**raw, "block_sizes": tuple(raw["block_sizes"])})


def features(kind: PilotInput, temperature: Tensor, logits: Tensor, hidden: Tensor) -> Tensor:
    """Return a pilot's input ``[N, D]`` from temperatures ``[N]``, logits ``[N, V]`` and tapped states ``[N, taps · H]``."""
    logits = logits.float()
    if kind == "top":
        top = torch.topk(logits, min(_TOP, logits.shape[-1])).values
        found = (top - logits.logsumexp(dim=-1, keepdim=True)).exp()
    elif kind == "logits":
        found = logits
    elif kind == "softmax":
        found = logits.softmax(dim=-1)
    elif kind == "normalised":
        found = nn.functional.layer_norm(logits, logits.shape[-1:])
    else:
        found = nn.functional.layer_norm(hidden.float(), hidden.shape[-1:])
    return torch.cat([found, temperature.to(found)[:, None]], dim=-1)


def net_for(config: PilotConfig, drafter: Drafter) -> nn.Sequential:
    """Make a pilot's network with random weights for ``drafter``'s target: :func:`features` ``[N, D]`` to sizes ``[N, S]``."""
    vocab_size = drafter.config.vocab_size
    inputs = {"top": min(_TOP, vocab_size), "hidden": drafter.fc.in_features}.get(config.input, vocab_size)
    widths = [inputs + 1, *[config.width] * (config.layers - 1), len(config.block_sizes)]
    net = nn.Sequential(nn.Linear(widths[0], widths[1]))
    for before, after in pairwise(widths[1:]):
        net.extend([nn.ReLU(), nn.Linear(before, after)])
    return net


def save_pilot(folder: Path, config: PilotConfig, net: nn.Sequential) -> None:
    """Write both files, each atomically."""
    save_tensors(folder / WEIGHTS, net.state_dict(), {"format": "pt"})
    write_atomically(folder / CONFIG, json.dumps(asdict(config), indent=2) + "\n")


def largest_block(config: DraftingConfig, trained: int, folder: Path | None) -> int:
    """Return the largest block that is drafted by ``config``: the one a drafter was ``trained`` for, a fixed policy's, or the
    largest that the pilot in the drafter's ``folder`` chooses from.

    Positions beyond the trained block are masks like all others; their drafts are less accurate (DFlash, Table 7).
    """
    name, _, named = config.policy.partition(":") if isinstance(config.policy, str) else ("", "", "")
    own = Path(named) if named else folder
    sizes: tuple[int, ...] = ()
    if name == "pilot" and own is not None and (own / CONFIG).exists():
        sizes = PilotConfig.from_json(read_json(own / CONFIG)).block_sizes
    return max((trained, config.fixed_block, *sizes))


def load_pilot(drafter: Drafter, folder: Path | str | None = None) -> tuple[PilotConfig, nn.Sequential]:
    """Load the pilot of ``drafter`` from ``folder`` or the drafter's own folder; another drafter's pilot is an error."""
    folder = Path(folder) if folder is not None else drafter.folder
    if folder is None or not (folder / CONFIG).exists():
        where = "beside this drafter" if folder is None else f"in {folder}"
        raise ConfigError(f"there is no pilot {where}; train one with `volley pilot`, or choose another policy")
    config = PilotConfig.from_json(read_json(folder / CONFIG))
    if config.drafter != (own := drafter_fingerprint(drafter)):
        raise MismatchError(
            f"the pilot in {folder} was trained for a drafter with fingerprint {config.drafter}, this one's is {own}; "
            "train one for this drafter with `volley pilot`, or choose another policy"
        )
    net, weights = net_for(config, drafter), load_tensors(folder / WEIGHTS)
    check_weights(folder / WEIGHTS, net.state_dict(), weights)
    check_finite(folder / WEIGHTS, weights)
    net.load_state_dict(weights)
    return config, net.to(drafter.norm.weight.device).requires_grad_(False)
