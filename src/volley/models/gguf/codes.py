"""Quantised weights for the kernels, from a quantised GGUF file.

The kernels take the codes, scales and minima of most GGUF types unchanged. Weights of other types are quantised again, layer by
layer.
"""

from collections import Counter
from math import prod

from volley.models.gguf.architectures import num_layers
from volley.models.gguf.file import GGUFFile
from volley.models.gguf.target import is_changed
from volley.weights import BLOCK, FORMATS, GROUP, OF_FILES, PACK, Format, Weights

_ROUNDED = FORMATS["Q8_0"]
"""Format to which all other weights of a quantised file are quantised."""
_ROUTER = ".ffn_gate_inp"  # of experts, and the gate of shared ones: their weights stay bf16
_MERGED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"), ("ffn_gate_exps", "ffn_up_exps"))
HEAD, EMBEDDING = "output.weight", "token_embd.weight"


def codes_for(file: GGUFFile) -> Weights:
    """Return the weight format of most layer weights; bf16 if the kernels lack their type."""
    counts = Counter({"": 0})
    for name in file:
        if name.startswith("blk.") and len(file.shape(name)) > 1:
            counts[file.type(name)] += prod(file.shape(name))
    most = OF_FILES.get(counts.most_common(1)[0][0])
    return "bf16" if most is None else most.weights


def plan(file: GGUFFile, weights: Weights) -> dict[str, Format | None]:
    """Return the stored format that each matrix of linear layers and experts keeps; ``None``: it is quantised to ``weights``.

    The file's codes are kept, unless ``weights`` have fewer bits and differ from the file's own format. If ``weights`` are the
    file's own format, matrices of other types are quantised to int8 in groups of 32, and so are matrices whose numbers the file
    has in another order. Layers that are merged into one matmul are either all kept or all quantised.
    """
    own = weights == codes_for(file)

    def kept(name: str) -> Format | None:
        stored = None if _is_reordered(file, name) else OF_FILES.get(file.type(name))
        if own:
            return stored or _ROUNDED
        return stored if stored and (weights == "int8" or stored.weights == "int4") else None

    unread = {EMBEDDING} if HEAD in file.names else set()
    found = {
        name: kept(name)
        for name in file
        if _is_matrix(name, file.shape(name)) and name not in unread and _ROUTER not in name
    }
    for name in list(found):
        for parts in _MERGED:
            if f".{parts[0]}." in name:
                together = [name.replace(parts[0], part) for part in parts]
                if None in [found[one] for one in together if one in found]:
                    found |= dict.fromkeys(together)
    return found


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor can be quantised; a convolution's few taps cannot, nor can experts that are no whole blocks."""
    if is_of_experts(name):
        return len(shape) == 3 and shape[1] % BLOCK == 0 == shape[2] % PACK
    return name.endswith(".weight") and len(shape) > 1 and shape[-1] % PACK == 0


def _is_reordered(file: GGUFFile, name: str) -> bool:
    """Return whether a weight is made of several tensors, or of one in another order than that of its rows."""
    return not is_of_experts(name) and is_changed(file, name)


def is_of_experts(name: str) -> bool:
    """Return whether a tensor holds a matrix of each expert."""
    return name.endswith("_exps.weight")


def describe(file: GGUFFile, weights: Weights) -> str:
    """Describe how a file's weights are loaded: ``Q4_1 exact in int4 with minima, groups of 32``."""
    said: dict[str, set[str]] = {}
    for name, of in plan(file, weights).items():
        is_exact = of is not None and of == OF_FILES.get(file.type(name)) and not _is_reordered(file, name)
        how = _how(of) if of is not None else _LAYOUTS[weights]
        said.setdefault(f"{'exact in' if is_exact else 'rounded again to'} {how}", set()).add(file.type(name))
    return "; ".join(f"{' and '.join(sorted(types))} {how}" for how, types in sorted(said.items()))


def held_bytes(file: GGUFFile, weights: Weights, size: int = 2) -> int:
    """Return the bytes of a file's weights in memory; those that are not in codes take ``size`` bytes a number."""
    kinds: dict[str, Format | None] = {} if weights == "bf16" else plan(file, weights)
    if weights != "bf16" and EMBEDDING not in kinds and EMBEDDING in file.names:
        kinds[EMBEDDING] = OF_FILES.get(file.type(EMBEDDING), FORMATS["int8"])
    bits = {name: (of or FORMATS[weights]).held_bits for name, of in kinds.items()}
    unused = {name for layer in range(num_layers(file), file.require("block_count")) for name in file.of_layer(layer)}
    return int(sum(prod(file.shape(name)) * bits.get(name, 8 * size) / 8 for name in file if name not in unused))


def _how(of: Format) -> str:
    """Describe a format: ``int4 with minima, groups of 32``."""
    kind = f"int{of.bits} by a table" if of.table else f"int{of.bits} with minima" if of.has_least else f"int{of.bits}"
    return f"{kind}, groups of {of.group}"


_LAYOUTS = {"int8": "int8, a scale for each output", "int4": f"int4, groups of {GROUP}"}
