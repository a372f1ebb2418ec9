"""Where a search begins: the shape of a drafter and its learning rate, from the target's config alone.

The shapes begin at those of published drafters (DFlash and DSpark checkpoints). A drafter that exists says itself what it
is, so a preset is only ever the starting point of a training.
"""

from dataclasses import dataclass
from typing import Any

from volley.errors import CheckpointError, VolleyError
from volley.models.drafters.tap_layers import spread_taps

PAPER_WIDTH, PAPER_RATE = 4096, 6e-4  # Qwen3-8B (DFlash §A.1)
RATE_EXPONENT = 0.55
"""The learning rate falls with the width to this power: between 6e-4 at 4096, 2e-3 at 256 and 6e-3 at 64, which were tried."""

NARROW = 512
"""Up to this width Muon begins: at width 64 it learnt in 100 steps what AdamW learns in 300 or more. Wider matrices take long
to orthogonalise on a CPU."""


@dataclass(frozen=True)
class Family:
    """What is particular about the drafters of a family."""

    name: str
    model_types: tuple[str, ...]
    block_size: int = 16
    layers: int = 5
    note: str = ""


FAMILIES = (
    Family("Qwen3", ("qwen3",)),
    Family("Qwen3 MoE", ("qwen3_moe",), layers=8, note="narrow experts: more draft layers"),
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
    """Peak learning rate for a drafter of this hidden size, to two digits."""
    return float(f"{PAPER_RATE * (PAPER_WIDTH / width) ** RATE_EXPONENT:.1e}")


def muon_factor(width: int) -> float:
    """Muon's rate by AdamW's: 5 at a width of 64 and 1.4 at 256, which were tried, and never below 1."""
    return max(1.0, 5.0 * float((64 / width) ** 0.9))


def family_of(model_type: str) -> Family:
    return next((family for family in FAMILIES if model_type in family.model_types), _OTHER)


def preset_for(config: Any) -> Preset:
    """The preset of a transformers config: a target of few layers gets a seventh of them, at most the family's number."""
    text = config.get_text_config()
    family, depth, width = family_of(text.model_type), text.num_hidden_layers, text.hidden_size
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    return Preset(
        family=family.name,
        block_size=family.block_size,
        num_layers=min(family.layers, max(1, depth // 7)),
        taps=spread_taps(min(5, max(1, depth - 3)), depth),
        intermediate_size=3 * width if experts else getattr(text, "intermediate_size", None) or 3 * width,
        learning_rate=float(f"{learning_rate_for(width) * (muon_factor(width) if width <= NARROW else 1):.1e}"),
        optimizer="muon" if width <= NARROW else "adamw",
        note=family.note,
    )


def read_config(target: str) -> Any:
    """The config of a target's folder, hub name or GGUF file; reads nothing else. Raises for one that no drafter serves."""
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
    """The preset of a target's folder, hub name or GGUF file."""
    return preset_for(read_config(target))
