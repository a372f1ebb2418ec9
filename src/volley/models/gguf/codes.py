"""Codes of the kernels from the weights of a quantised GGUF file.

The kernels have codes with an fp16 scale for 32 inputs, as GGUF's symmetric blocks have them: these are taken as they are.
Weights of other types are rounded again, layer by layer.
"""

from collections import Counter
from math import prod

from volley.models.gguf.file import GGUFFile, Rows
from volley.models.layers.residency import MappedFiles
from volley.native import GROUP, Codes, Weights, blocks
from volley.native.codes import FINE, quantise_finely

_CODES: dict[str, Weights] = {"Q8_0": "int8", "Q5_0": "int8", "Q4_0": "int4", "Q4_K": "int4"}
EXACT: dict[str, Weights] = {"Q8_0": "int8", "Q5_0": "int8", "Q4_0": "int4"}
"""Types of 32 codes with one fp16 scale, which stands before them, and the kernels that have such codes."""
_LAYOUTS = {"int8": "a scale for each output", "int4": f"groups of {GROUP}"}
_ROUTER = ".ffn_gate_inp."  # of experts, which are no matrices and stay bf16 as it does
_JOINED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))
HEAD, EMBEDDING = "output.weight", "token_embd.weight"


def codes_for(file: GGUFFile) -> Weights:
    """The codes that most weights of the layers become; bf16 where they are of another type, or experts."""
    most = _most(file)
    return _CODES.get(most, "bf16") if not any("_exps." in name for name in file) else "bf16"


def _most(file: GGUFFile) -> str:
    """The type of most weights of the layers."""
    counts = Counter({"": 0})
    for name in file:
        if name.startswith("blk.") and len(file.shape(name)) > 1:
            counts[file.type(name)] += prod(file.shape(name))
    return counts.most_common(1)[0][0]


def plan(file: GGUFFile, weights: Weights) -> dict[str, Weights | None]:
    """For each matrix of a linear layer the codes in groups of 32 that it is taken over in; ``None``: rounded to ``weights``.

    Where these are the file's own, codes of 8 bits stay, and other types are rounded to int8 in groups of 32; but not Q4_K in a
    file that is mostly that, whose four bits stay four. Layers that are one product have codes of one kind.
    """
    own, most = weights == codes_for(file), _most(file)

    def of_type(kind: str) -> Weights | None:
        exact = EXACT.get(kind)
        if exact == "int4":
            return weights
        if exact is None:
            return "int8" if own and kind != most else None
        return "int8" if own or weights == "int8" else None

    unread = {EMBEDDING} if HEAD in file.names else set()
    found = {
        name: of_type(file.type(name))
        for name in file
        if len(file.shape(name)) == 2 and name not in unread and _ROUTER not in name
    }
    for name in list(found):
        for parts in _JOINED:
            if f".{parts[0]}." in name:
                together = [name.replace(parts[0], part) for part in parts]
                if len({found[one] for one in together if one in found}) > 1:
                    found |= dict.fromkeys(together, "int8" if own else None)
    return found


def describe(file: GGUFFile, weights: Weights) -> str:
    """What becomes of a file's weights: ``Q4_0 exact in int4, Q6_K rounded again to int8, in groups of 32``."""
    kinds: dict[str, set[Weights | None]] = {}
    for name, kind in plan(file, weights).items():
        kinds.setdefault(file.type(name), set()).add(kind)
    exact: list[str] = []
    fine: list[str] = []
    rest: list[str] = []
    for stored in sorted(kinds):
        codes = " and ".join(sorted(kind for kind in kinds[stored] if kind is not None))
        if codes:
            (exact if stored in EXACT else fine).append(
                f"{stored} {'exact in' if stored in EXACT else 'rounded again to'} {codes}"
            )
        if None in kinds[stored]:
            rest.append(stored)
    parts = [f"{', '.join(exact + fine)}, groups of {FINE}"] if exact + fine else []
    parts += [f"{' and '.join(rest)} rounded again to {weights}, {_LAYOUTS[weights]}"] if rest else []
    return "; ".join(parts)


class FileCodes:
    """A matrix of a file in codes in groups of 32, read some rows after others: its own, or rounded to int8 as Q8_0 is."""

    def __init__(self, file: GGUFFile, files: MappedFiles, name: str, kind: Weights, order: Rows | None) -> None:
        self.kind, self.group = kind, FINE
        self._file, self._files, self._name = file, files, name
        self._blocks = file.blocks(name, order)
        self.shape = file.shape(name)
        if order is not None:  # they are a copy
            files.forget_bytes(*file.place(name))

    def rows(self, rows: slice) -> Codes:
        own, stored = self._blocks[rows], self._file.type(self._name)
        if blocks.reads(stored):
            found = blocks.recode(stored, own, self.kind)
        else:
            found = quantise_finely(self._file.decoded(self._name, own))
        self._files.forget_bytes(int(own.ctypes.data), own.nbytes)
        return found
