"""Description of a target in a GGUF file by its header alone: it imports neither PyTorch nor transformers."""

from dataclasses import dataclass, field
from pathlib import Path

from volley import library
from volley.errors import VolleyError
from volley.files import published_drafter
from volley.models.gguf.codes import codes_for, describe, held_bytes
from volley.models.gguf.file import GGUFFile
from volley.models.gguf.target import config_values
from volley.weights import GROUP

_FUSED = {"llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "smollm3", "granite", "olmo2"}
"""Architectures whose layers volley's kernels run, whatever else the file says, if their sizes are usual."""


@dataclass
class Diagnosis:
    """Facts by name, and problems; a checkpoint without problems loads and fits its target."""

    title: str = "no drafter that volley can read"
    facts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    of_target: bool = False


def describe_target(path: Path) -> Diagnosis | None:
    """Describe the target in a sound GGUF file; ``None`` for other files, whose faults or layers must be tried to be known."""
    try:
        file = GGUFFile(path)
        if file.architecture not in _FUSED or not library.available:
            return None
        values = config_values(file)
    except VolleyError:
        return None
    hidden, heads, shared, dim = (
        values[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    inputs = hidden, heads * dim, values["intermediate_size"]
    is_usual = hidden % heads == 0 and heads % shared == 0 and heads <= 32 * shared and dim % 16 == 0 and dim <= 256
    if not is_usual or any(size % GROUP for size in inputs) or not values["vocab_size"]:
        return None
    facts = {
        **shape_of(hidden, values["vocab_size"], values["num_hidden_layers"]),
        "weights": weights_of(file),
        "memory of its weights": memory_of(file),
        "answers are exact to the bit": f"yes, with {codes_for(file)} weights",
    }
    return Diagnosis(f"a target of type {values['model_type']}", facts, of_target=True)


def shape_of(hidden_size: int, vocab_size: int, num_layers: int, *, drafts: bool = True) -> dict[str, str]:
    """Return the facts of a target's shape: its sizes, and with ``drafts`` what drafts for it by default."""
    facts = {"shape": f"{num_layers} layers, hidden size {hidden_size}, {vocab_size} tokens"}
    if drafts:
        drafter = published_drafter(hidden_size, vocab_size, num_layers)
        facts["drafts by default"] = f"the bundled drafter {drafter}" if drafter else "prompt lookup"
    return facts


def memory_of(file: GGUFFile) -> str:
    """Describe the memory that the weights of a file take on a CPU."""
    codes, size = codes_for(file), held_bytes(file, "bf16") / 2**30
    if codes == "bf16":
        return f"{size:.2f} GiB"
    return f"{held_bytes(file, codes) / 2**30:.2f} GiB where volley's kernels run, else {size:.2f}"


def weights_of(file: GGUFFile) -> str:
    """Describe how the weights of a file are loaded."""
    codes = codes_for(file)
    if codes != "bf16":
        return f"{describe(file, codes)} where volley's kernels run, else decoded"
    types = ", ".join(file.quantised_types())
    return f"{types}; decoded when loaded" if types else "not quantised"
