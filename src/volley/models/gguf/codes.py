"""Quantised weights for the kernels, from a quantised GGUF file.

The kernels take the codes, scales and minima of most GGUF types unchanged. Weights of other types are quantised again, layer by
layer.
"""

from collections import Counter
from math import prod

from volley.models.gguf.file import GGUFFile, Rows
from volley.models.layers.residency import MappedFiles
from volley.native import GROUP, Codes, Weights, blocks
from volley.native.codes import quantise_finely
from volley.native.formats import FORMATS, PACK, STORED, Format, StoredBlocks

_ROUNDED = FORMATS["Q8_0"]
"""Format to which all other weights of a quantised file are quantised."""
_ROUTER = ".ffn_gate_inp."  # of experts, whose weights stay bf16, as the router does
_JOINED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))
HEAD, EMBEDDING = "output.weight", "token_embd.weight"


def codes_for(file: GGUFFile) -> Weights:
    """Return the weight format of most layer weights; bf16 if the kernels lack their type, or if the model has experts."""
    counts = Counter({"": 0})
    for name in file:
        if name.startswith("blk.") and len(file.shape(name)) > 1:
            counts[file.type(name)] += prod(file.shape(name))
    most = STORED.get(counts.most_common(1)[0][0])
    return "bf16" if most is None or any("_exps." in name for name in file) else most.weights


def plan(file: GGUFFile, weights: Weights) -> dict[str, Format | None]:
    """Return the stored format that each matrix of a linear layer keeps; ``None``: it is quantised to ``weights``.

    The file's codes are kept, unless ``weights`` have fewer bits and differ from the file's own format. If ``weights`` are the
    file's own format, matrices of other types are quantised to int8 in groups of 32. Layers that are joined into one matmul are
    either all kept or all quantised.
    """
    own = weights == codes_for(file)

    def of_type(kind: str) -> Format | None:
        stored = STORED.get(kind)
        if own:
            return stored or _ROUNDED
        return stored if stored and (weights == "int8" or stored.weights == "int4") else None

    unread = {EMBEDDING} if HEAD in file.names else set()
    found = {
        name: of_type(file.type(name))
        for name in file
        if _is_matrix(file.shape(name)) and name not in unread and _ROUTER not in name
    }
    for name in list(found):
        for parts in _JOINED:
            if f".{parts[0]}." in name:
                together = [name.replace(parts[0], part) for part in parts]
                if None in [found[one] for one in together if one in found]:
                    found |= dict.fromkeys(together)
    return found


def _is_matrix(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor can be quantised; a convolution's few taps cannot."""
    return len(shape) == 2 and shape[1] % PACK == 0


def describe(file: GGUFFile, weights: Weights) -> str:
    """Describe how a file's weights are loaded: ``Q4_1 exact in int4 with minima, groups of 32``."""
    said: dict[str, list[str]] = {}
    for stored, kinds in sorted(_kinds(file, weights).items()):
        for of in sorted(kinds, key=str):
            is_exact = of is not None and of.name == stored
            how = _how(of) if of is not None else _LAYOUTS[weights]
            said.setdefault(f"{'exact in' if is_exact else 'rounded again to'} {how}", []).append(stored)
    return "; ".join(f"{' and '.join(types)} {how}" for how, types in sorted(said.items()))


def _kinds(file: GGUFFile, weights: Weights) -> dict[str, set[Format | None]]:
    found: dict[str, set[Format | None]] = {}
    for name, of in plan(file, weights).items():
        found.setdefault(file.type(name), set()).add(of)
    return found


def _how(of: Format) -> str:
    """Describe a format: ``int4 with minima, groups of 32``."""
    kind = f"int{of.bits} by a table" if of.table else f"int{of.bits} with minima" if of.has_least else f"int{of.bits}"
    return f"{kind}, groups of {of.group}"


_LAYOUTS = {"int8": "int8, a scale for each output", "int4": f"int4, groups of {GROUP}"}


class FileCodes:
    """Matrix of a file in codes, read some rows at a time: the file's own codes, or int8 ones like Q8_0's."""

    def __init__(self, file: GGUFFile, files: MappedFiles, name: str, of: Format, order: Rows | None) -> None:
        self.format = of
        self._file, self._files, self._name = file, files, name
        self._blocks = file.blocks(name, order)
        self.shape = file.shape(name)
        if order is not None:  # the blocks are a copy
            files.forget_bytes(*file.place(name))

    def rows(self, rows: slice) -> Codes | StoredBlocks:
        own = self._blocks[rows]
        found = (
            StoredBlocks(self.format, own.copy())
            if blocks.reads(self._file.type(self._name))
            else quantise_finely(self._file.decoded(self._name, own))
        )
        self._files.forget_bytes(int(own.ctypes.data), own.nbytes)
        return found
