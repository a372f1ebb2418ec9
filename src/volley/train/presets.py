"""Choose the first settings of a training, a drafter's shape and its learning rate, by the target's config.

The shapes follow the published drafters of each family (DFlash and DSpark checkpoints). A trained drafter has its shape in its
own config, so presets are used only for new ones.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from volley import native
from volley.errors import CheckpointError, VolleyError, unknown_key
from volley.models.drafters.tap_layers import spread_taps
from volley.train.options import LONGEST, RANDOM, TrainConfig

PAPER_WIDTH, PAPER_RATE = 4096, 6e-4  # Qwen3-8B (DFlash §A.1)
RATE_EXPONENT = 0.55
"""Power of the width by which the learning rate falls. The rates that were tried are 6e-4 at 4096, 2e-3 at 256, 6e-3 at 64."""

CPU_BATCH, GPU_BATCH = 1024, 8192
"""Tokens of a step."""
NARROWEST = 256
"""Width below which a drafter is trained in fp32 on any CPU."""
NARROW = 512
"""Largest width for which Muon is the default. At width 64 it learnt in 100 steps what AdamW learns in 300 or more, but wider
matrices take long to orthogonalise on a CPU."""


@dataclass(frozen=True)
class Family:
    """Settings of the drafters of a family."""

    name: str
    model_types: tuple[str, ...]
    block_size: int = 16
    layers: int = 5
    note: str = ""


FAMILIES = (
    Family("Qwen3", ("qwen3",)),
    Family("Qwen3 MoE", ("qwen3_moe",), layers=8, note="narrow experts: more draft layers"),
    Family("Qwen2", ("qwen2",)),
    Family(
        "Qwen3.5",
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
        layers=6,
        note="recurrent layers",
    ),
    Family("Llama", ("llama",), block_size=10),
    Family("Mistral", ("mistral", "ministral", "ministral3")),
    Family("Gemma", ("gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text")),
    Family("gpt-oss", ("gpt_oss",), block_size=8, layers=8, note="usually served in batches: short blocks"),
    Family("Phi", ("phi3", "phi4")),
    Family("DeepSeek", ("deepseek_v2", "deepseek_v3", "kimi_k2"), block_size=8, layers=6, note="MLA"),
)
_OTHER = Family("other", ())
SMALL, SMALL_BLOCK, SMALL_LAYERS = 1024, 8, 2
"""Width below which a cycle is short, and the most block slots and draft layers for such targets."""


@dataclass(frozen=True)
class Dimensions:
    """Dimensions of a target, from which its preset follows."""

    model_type: str
    num_layers: int
    width: int
    intermediate_size: int
    """Width of the target's MLP; three hidden sizes if it has experts."""

    @classmethod
    def of(cls, config: Any) -> "Dimensions":
        """Return the dimensions in a transformers config."""
        text = config.get_text_config()
        experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
        wide = None if experts else getattr(text, "intermediate_size", None)
        return cls(text.model_type, text.num_hidden_layers, text.hidden_size, wide or 3 * text.hidden_size)


PAPER = "paper"
"""Name of the paper's recipe for any target: blocks and layers of its family, AdamW, decaying slot weights, long rows."""
PAPER_RECIPE: dict[str, Any] = {
    "anchors_per_sequence": 512,
    "max_length": 3072,
    "optimizer": "adamw",
    "learning_rate": PAPER_RATE,
    "loss_decay": "decay",
    "epochs": 6,
}
"""DFlash §A.1."""

TARGETS = {
    "smollm2-135m": Dimensions("llama", 30, 576, 1536),
    "qwen2.5-coder-0.5b": Dimensions("qwen2", 24, 896, 4864),
    "qwen3-4b": Dimensions("qwen3", 36, 2560, 9728),
    "qwen3-8b": Dimensions("qwen3", 36, 4096, 12288),
    "qwen3-coder-30b": Dimensions("qwen3_moe", 48, 2048, 6144),
    "llama-3.1-8b": Dimensions("llama", 32, 4096, 14336),
    "nemotron-8b": Dimensions("llama", 32, 4096, 14336),
    "deepseek-r1-14b": Dimensions("qwen2", 48, 5120, 13824),
    "gpt-oss-20b": Dimensions("gpt_oss", 24, 2880, 8640),
}
"""Targets that have a preset by name."""


@dataclass(frozen=True)
class Preset:
    """Options of a first training."""

    family: str
    block_size: int
    num_layers: int
    taps: tuple[int, ...]
    intermediate_size: int
    learning_rate: float
    optimizer: str = "adamw"
    note: str = ""


def learning_rate_for(width: int) -> float:
    """Return the peak learning rate for a drafter of this hidden size, rounded to two digits."""
    return float(f"{PAPER_RATE * (PAPER_WIDTH / width) ** RATE_EXPONENT:.1e}")


def muon_factor(width: int) -> float:
    """Return the ratio of Muon's to AdamW's learning rate: 5 at width 64 and 1.4 at 256, which were tried; at least 1."""
    return max(1.0, 5.0 * float((64 / width) ** 0.9))


def family_of(model_type: str) -> Family:
    return next((family for family in FAMILIES if model_type in family.model_types), _OTHER)


def preset_of(shape: Dimensions) -> Preset:
    """Return the preset of a target of this shape: a sixth of its layers, at most the family's number."""
    family, depth, width = family_of(shape.model_type), shape.num_layers, shape.width
    is_small, is_narrow = width < SMALL, width <= NARROW
    return Preset(
        family=family.name,
        block_size=min(family.block_size, SMALL_BLOCK) if is_small else family.block_size,
        num_layers=min(family.layers, max(1, depth // 6), SMALL_LAYERS if is_small else family.layers),
        taps=spread_taps(min(5, max(1, depth - 3)), depth),
        intermediate_size=shape.intermediate_size,
        learning_rate=float(f"{learning_rate_for(width) * (muon_factor(width) if is_narrow else 1):.1e}"),
        optimizer="muon" if is_narrow else "adamw",
        note=family.note,
    )


def preset_for(config: Any) -> Preset:
    """Return the preset for a transformers config."""
    return preset_of(Dimensions.of(config))


def preset_named(name: str) -> Preset:
    """Return the preset of a name. The error for an unknown name suggests the nearest one."""
    if name not in TARGETS:
        raise unknown_key("preset", name, [*TARGETS, PAPER])
    return preset_of(TARGETS[name])


def read_config(target: str) -> Any:
    """Read only the config of a target's folder, hub name or GGUF file. Raise an error if no drafter can serve the target."""
    from volley.models.targets.loading import load_config

    try:
        return load_config(target, causal=True)
    except VolleyError:
        raise
    except Exception as error:  # transformers raises many kinds for a damaged folder or an unknown name
        raise CheckpointError(
            f"{target}: the target's config cannot be read ({error}); give a hub name, a folder with config.json or a GGUF file"
        ) from error


def read_preset(target: str) -> Preset:
    """Return the preset for a target's folder, hub name or GGUF file."""
    return preset_for(read_config(target))


def with_preset(config: TrainConfig, target: Any, device: torch.device) -> TrainConfig:
    """Return ``config`` with a preset's values for the options that are not given; ``target`` is a transformers config.

    A drafter that is trained further keeps its shape, and its default is the paper's learning rate.
    """
    is_papers = config.preset == PAPER
    preset = preset_for(target) if config.preset is None or is_papers else preset_named(config.preset)
    width = target.get_text_config().hidden_size
    is_new = config.init in (None, RANDOM)
    optimizer = config.optimizer or (preset.optimizer if is_new else "adamw")
    rate = learning_rate_for(width) * (muon_factor(width) if optimizer == "muon" else 1)
    values: dict[str, Any] = {
        "optimizer": optimizer,
        "learning_rate": float(f"{rate:.1e}") if is_new else PAPER_RATE,
        "loss_decay": "decay" if config.reveal else "pace",
        "tokens_per_batch": GPU_BATCH if device.type == "cuda" else CPU_BATCH,
        "max_length": LONGEST if config.tokens_per_batch is None else None,
    }
    if is_papers:
        family = family_of(target.get_text_config().model_type)
        layers = min(family.layers, target.get_text_config().num_hidden_layers)
        preset = replace(preset, block_size=family.block_size, num_layers=layers)
        values |= PAPER_RECIPE
    if not config.keep_shape:
        values |= {name: getattr(preset, name) for name in ("block_size", "num_layers", "intermediate_size", "taps")}
    return replace(config, **{name: value for name, value in values.items() if getattr(config, name) is None})


def training_dtype(choice: str, width: int, device: torch.device) -> torch.dtype:
    """Return the dtype to train a drafter of hidden size ``width`` in: bf16, but on a CPU fp32 if that is faster.

    At width 256, bf16 trains on 1.65 times as many tokens per second on a CPU with bf16 instructions. For narrower matrices the
    conversion takes longer than the matmul, and other CPUs multiply bf16 slowly.
    """
    if choice == "auto":
        narrow = width < NARROWEST or (width <= NARROW and not native.has_dot_products)
        choice = "float32" if narrow and device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, choice)
    return dtype
