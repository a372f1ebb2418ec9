"""The bundled pair, widened to the shape of a larger model without changing what it computes.

    python benchmarks/inflate.py runs/pair-0.6b --shape 0.6b

Acceptance stays that of the trained pair; bytes, operations and K/V become those of the larger shape. So speculative decoding
can be measured at a real model's cost without a real model. The folders ``target``, ``drafter``, ``drafter-dflash`` and
``drafter-markov`` are ordinary Hugging Face checkpoints.

How: each channel of the hidden state, each head and each neuron is held several times, and what reads the copies is scaled by
powers of two that sum to 1. Powers of two are exact in every float type, and equal copies keep the mean square, so RMS norms
and their eps stay. Added layers have zero ``o_proj`` and ``down_proj``. Added vocabulary rows must never win, so they read a
channel that is a small constant in every token's embedding. Room for it comes from 64 channels that are held once at twice
their value instead of four times: the mean square is the same and three channels of each four are free.

The heads stay 64 wide. A shape has twice the heads of the model that it is named after, so that its matrices and its K/V have
the same sizes.
"""

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from volley.errors import ConfigError
from volley.files import REFERENCE, read_json, write_atomically
from volley.tensors import load_tensors, save_tensors

DRAFTERS = tuple(REFERENCE / name for name in ("drafter", "drafter-dflash", "drafter-markov"))
FREED = 64  # channels held once: a group of volley's codes, so that the constant has one of its own, as it has a block of GGUF's
CONSTANT = (
    2.0**-8
)  # of the mean square of the weakest embedding, 5e-6; not lost where Q6_K scales 256 channels together
FINAL_SCALE = (
    2.0**10
)  # the final norm divides the constant by about 12; after it the constant is as large as its neighbours
NEVER = -(2.0**12)  # what added rows read it with: logits below -1,000


@dataclass(frozen=True)
class Shape:
    """Sizes to widen a pair to; ``vocab_size=None`` keeps the vocabulary."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int | None = None


SHAPES = {
    "0.6b": Shape(1024, 28, 32, 16, 3072, 151_936),
    "1.7b": Shape(2048, 28, 32, 16, 6144, 151_936),
}


@dataclass(frozen=True)
class Axis:
    """How one dimension of a tensor grows: place i is the old place ``source[i]`` times ``scale[i]``."""

    source: Tensor
    scale: Tensor

    def widen(self, tensor: Tensor, dim: int) -> Tensor:
        shape = [-1 if axis == dim else 1 for axis in range(tensor.dim())]
        return tensor.index_select(dim, self.source) * self.scale.to(tensor.dtype).view(shape)


def shares(count: int) -> list[float]:
    """``count`` powers of two that sum to 1, as even as can be."""
    found = [1.0]
    while len(found) < count:
        found = sorted([*found[1:], found[0] / 2, found[0] / 2], reverse=True)
    return found


def copies(old: int, new: int, what: str) -> int:
    if new < old or new % old:
        raise ConfigError(f"{what}: {new} is no multiple of the pair's {old}; give a multiple")
    return new // old


class Widening:
    """Every axis of a pair, old and new, and the tensors that lie on them."""

    def __init__(self, config: Mapping[str, Any], shape: Shape) -> None:
        """``config`` is the target's; its drafters have the same layers."""
        self.shape, self.config = shape, config
        self.vocab_size = shape.vocab_size or int(config["vocab_size"])
        self.extra = self.vocab_size - int(config["vocab_size"])
        if self.extra < 0:
            raise ConfigError(f"vocabulary: {self.vocab_size} is less than the pair's; give a larger one, or none")
        heads = copies(config["num_attention_heads"], shape.num_attention_heads, "attention heads")
        if heads != copies(config["num_key_value_heads"], shape.num_key_value_heads, "key-value heads"):
            raise ConfigError("attention heads and key-value heads must grow alike; multiply both by one number")
        neurons = copies(config["intermediate_size"], shape.intermediate_size, "intermediate size")
        source, held, read = self._states(int(config["hidden_size"]))
        final = torch.where(held > 0, read / held.clamp(min=1), 0)
        queries, values = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
        write, reader, normed = Axis(source, held), Axis(source, read), Axis(source, (held > 0).float())
        self.final_norm = Axis(source, final)
        kv, neuron = repeated(values, heads), repeated(config["intermediate_size"], neurons)
        self.axes: dict[str, tuple[Axis | None, ...]] = {
            "embed_tokens.weight": (None, write),
            "lm_head.weight": (None, write),  # the final norm holds the shares, so that head and embedding can be one
            "input_layernorm.weight": (normed,),
            "post_attention_layernorm.weight": (normed,),
            "hidden_norm.weight": (normed,),
            "q_norm.weight": (None,),
            "k_norm.weight": (None,),
            "q_proj.weight": (repeated(queries, heads), reader),
            "k_proj.weight": (kv, reader),
            "v_proj.weight": (kv, reader),
            "o_proj.weight": (write, repeated(queries, heads, shares(heads))),
            "gate_proj.weight": (neuron, reader),
            "up_proj.weight": (neuron, reader),
            "down_proj.weight": (write, repeated(config["intermediate_size"], neurons, shares(neurons))),
            "head.previous.weight": (None, reader),
            "head.context.weight": (None, write),  # reads final states, as the head does
            "head.output.weight": (reader, None),  # writes final states
            "d2t": (None,),
        }
        self.write, self._read = write, reader

    def _states(self, old: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each new channel the old one, the factor it is held with, and the factor it is read with."""
        count = copies(old, self.shape.hidden_size, "hidden size")
        held, read = torch.ones(count, old), torch.tensor(shares(count))[:, None].repeat(1, old)
        if self.extra:
            if count < 4:
                raise ConfigError("a larger vocabulary needs four times the pair's hidden size; give a wider shape")
            once = torch.tensor([2.0, 0, 0, 0] + [1.0] * (count - 4))  # the squares sum to count
            held[:, :FREED], read[:, :FREED] = once[:, None], 0
            read[once > 0, :FREED] = (torch.tensor(shares(count - 3)) / once[once > 0])[:, None]
        self.constant = old  # the first freed channel: the first of the second copy
        return torch.arange(old).repeat(count), held.flatten(), read.flatten()

    def target(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The target's tensors, with the added layers."""
        grown = {name: self._widen(name, tensor) for name, tensor in tensors.items()}
        layers = int(self.config["num_hidden_layers"])
        for layer in range(layers, self.shape.num_hidden_layers):
            model = f"model.layers.{layer % layers}."
            for name in [name for name in tensors if name.startswith(model)]:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                added = torch.zeros_like(grown[name]) if writes else grown[name].clone()
                grown[f"model.layers.{layer}." + name.removeprefix(model)] = added
        return grown

    def drafter(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._widen(name, tensor) for name, tensor in tensors.items()}

    def _widen(self, name: str, tensor: Tensor) -> Tensor:
        if name in ("norm.weight", "model.norm.weight"):
            norm = self.final_norm.widen(tensor, 0)
            if self.extra:
                norm[self.constant] = FINAL_SCALE
            return norm
        if name == "fc.weight":
            taps = tensor.view(len(tensor), -1, self.config["hidden_size"])
            return self.write.widen(self._read.widen(taps, 2).flatten(1), 0)
        found = [axes for ending, axes in self.axes.items() if name.endswith(ending)]
        if not found:
            raise ConfigError(f"{name}: a tensor that this script cannot widen; teach it the tensor's axes")
        for dim, axis in enumerate(found[0]):
            tensor = tensor if axis is None else axis.widen(tensor, dim)
        is_head = name.endswith("lm_head.weight")
        if self.extra and (is_head or name.endswith("embed_tokens.weight")):
            rows = tensor.new_zeros(self.extra, tensor.shape[1])
            rows[:, self.constant] = NEVER
            if not is_head:
                tensor[:, self.constant] = CONSTANT
            tensor = torch.cat([tensor, rows])
        return tensor.contiguous()


def repeated(size: int, count: int, scales: Sequence[float] | None = None) -> Axis:
    scale = torch.ones(count) if scales is None else torch.tensor(scales)
    return Axis(torch.arange(size).repeat(count), scale.repeat_interleave(size))


def inflate(
    out: Path,
    shape: Shape,
    target: Path = REFERENCE / "target",
    drafters: Sequence[Path] = DRAFTERS,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Path]:
    """Write the widened ``target`` and ``drafters`` into ``out``; returns the new folders by the names of the old."""
    config = read_json(target / "config.json")
    widening = Widening(config, shape)
    layers = {
        key: getattr(shape, key)
        for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    common = {**layers, "vocab_size": widening.vocab_size, "dtype": str(dtype).removeprefix("torch.")}
    folders = {path.name: out / path.name for path in (target, *drafters)}
    for source in (target, *drafters):
        raw, tensors = read_json(source / "config.json"), load_tensors(source / "model.safetensors")
        if source == target:
            added = shape.num_hidden_layers - raw["num_hidden_layers"]
            if added < 0:
                raise ConfigError(f"layers: {shape.num_hidden_layers} are fewer than the pair's; give as many or more")
            raw |= {
                "num_hidden_layers": shape.num_hidden_layers,
                "layer_types": raw["layer_types"] + ["full_attention"] * added,
            }
            tensors = widening.target(tensors)
        else:
            raw |= {"num_target_layers": shape.num_hidden_layers}
            tensors = widening.drafter(tensors)
        folder = folders[source.name]
        write_atomically(folder / "config.json", json.dumps(raw | common, indent=2) + "\n")
        save_tensors(
            folder / "model.safetensors",
            {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()},
            {"format": "pt"},
        )
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            if (source / name).exists():
                shutil.copy(source / name, folder / name)
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the widened pair")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument(
        "--vocab-size", type=int, help="rows of the vocabulary; by default 151,936, 8192 keeps the bundled one"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--target", type=Path, default=REFERENCE / "target")
    parser.add_argument("--drafters", type=Path, nargs="+", default=DRAFTERS)
    options = parser.parse_args()
    shape = replace(SHAPES[options.shape], **({"vocab_size": options.vocab_size} if options.vocab_size else {}))
    for folder in inflate(options.out, shape, options.target, options.drafters, getattr(torch, options.dtype)).values():
        print(folder, f"{(folder / 'model.safetensors').stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
