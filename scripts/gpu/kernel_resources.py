"""Registers, spills and shared memory of the Triton kernels on GPUs that need not be there: they are compiled ahead of time.

    python scripts/gpu/kernel_resources.py                 a table
    python scripts/gpu/kernel_resources.py --json OUT      the same as a list of objects
    python scripts/gpu/kernel_resources.py --arch 90       for one architecture

It ends with status 1 if a kernel spills registers, or if its shared memory is too large.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from volley.files import write_atomically
from volley.memory.kernels import attention, inject, noise, rows, write

SHARED = {80: 163, 86: 99, 90: 227, 100: 227}
"""KiB of shared memory that a program may have, by architecture."""
_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@dataclass(frozen=True)
class Case:
    """One kernel as it is compiled for one shape."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    kernel: str
    arch: int
    registers: int
    spilled: int
    """Bytes a thread."""
    shared: int
    """Bytes a program."""

    @property
    def fits(self) -> bool:
        return not self.spilled and self.shared <= SHARED[self.arch] * 1024


def attention_case(dtype: torch.dtype, dim: int, *, parted: bool, windowed: bool = False, groups: int = 4) -> Case:
    shape, block_dim = attention.tile_shape(groups, dim, dtype), max(16, triton.next_power_of_2(dim))
    own, result = _TYPES[dtype], "*fp32" if parted else _TYPES[dtype]
    integers = ("window", "num_tokens", "query_stride", "query_head_stride", "slot_stride")
    types = {
        **dict.fromkeys(("queries", "keys", "values", "sinks"), own),
        **dict.fromkeys(("tiles", "segments", "cells"), "*i32"),
        **dict.fromkeys(("output", "bests", "totals"), result),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
        **dict.fromkeys(integers, "i32"),
        **dict.fromkeys(("positions", "origins"), "*i64"),
    }
    flags = {"PARTED": parted, "WINDOWED": windowed, "SYMMETRIC": False, "CAPPED": windowed, "SINKS": windowed}
    sizes = {"PAGE_SIZE": 16, "GROUPS": groups, "DIM": dim, "BLOCK_DIM": block_dim, "PART": attention.PART}
    constants = {**sizes, "ROWS": shape.rows, "KEYS": shape.keys, **flags}
    name = f"attention {str(dtype)[6:]} d{dim}{' parted' * parted}{' windowed' * windowed} groups {groups}"
    options = {"num_warps": shape.warps, "num_stages": shape.stages, "enable_fp_fusion": False}
    return Case(name, attention._attention_kernel, types, constants, options)


def join_case(dtype: torch.dtype, dim: int) -> Case:
    pointers = dict.fromkeys(("parts", "bests", "totals"), "*fp32") | dict.fromkeys(("sinks", "output"), _TYPES[dtype])
    constants = {"HEADS": 32, "DIM": dim, "BLOCK_DIM": triton.next_power_of_2(dim), "SINKS": True}
    types = {**pointers, "num_rows": "i32", "num_parts": "i32"}
    return Case(f"join {str(dtype)[6:]} d{dim}", attention._join_kernel, types, constants, {"enable_fp_fusion": False})


def inject_case(dtype: torch.dtype, dim: int) -> Case:
    pointers = dict.fromkeys(("projected", "norm_weights", "cos", "sin", "keys", "values"), _TYPES[dtype])
    types = {**pointers, "eps": "fp32", "slots": "*i64", "layer_stride": "i64"}
    constants = {"LAYERS": 5, "HEADS": 8, "HALF": dim // 2, "BLOCK_HEADS": 8, "BLOCK_HALF": dim // 2}
    return Case(f"inject {str(dtype)[6:]} d{dim}", inject._inject_kernel, types, constants, {})


def write_case(dtype: torch.dtype, size: int) -> Case:
    types = dict.fromkeys(("keys", "values", "key_pool", "value_pool"), _TYPES[dtype]) | {"slots": "*i64"}
    types |= dict.fromkeys(("key_stride", "value_stride"), "i32")
    return Case(
        f"write {str(dtype)[6:]} {size}", write._write_kernel, types, {"SIZE": size, "BLOCK": size}, {"num_warps": 4}
    )


def row_cases(dtype: torch.dtype, dim: int, size: int) -> Iterator[Case]:
    """Operations of a joined layer between its linear layers."""
    own, kind = _TYPES[dtype], str(dtype)[6:]
    norm = {**dict.fromkeys(("states", "update", "weight", "added", "normed"), own), "eps": "fp32"}
    sizes = {"SIZE": size, "BLOCK": triton.next_power_of_2(size), "ADDS": True}
    yield Case(f"norm {kind} {size}", rows._add_norm_kernel, norm, sizes, {"num_warps": 8})
    turn = {**dict.fromkeys(("rows", "query_norm", "key_norm", "cos", "sin"), own), "eps": "fp32", "row_stride": "i32"}
    halves = {"HEADS": 32, "HALF": dim // 2, "BLOCK": triton.next_power_of_2(dim // 2), "NORMS": True}
    yield Case(f"turn {kind} d{dim}", rows._turn_kernel, turn, halves, {"num_warps": 1})
    gate = dict.fromkeys(("rows", "output"), own)
    yield Case(f"gate {kind}", rows._gated_silu_kernel, gate, {"SIZE": 3 * size, "BLOCK": 1024}, {})


def noise_case() -> Case:
    types = {"places": "*i64", "output": "*fp32", "count": "i32", "size": "i32"}
    return Case("noise", noise._exponentials_kernel, types, {"PURPOSE": 0, "BLOCK": noise.BLOCK}, {})


def cases() -> Iterator[Case]:
    """The kernels at the head sizes of published models."""
    half, full = torch.bfloat16, torch.float32
    yield attention_case(half, 64, parted=True, windowed=True, groups=8)
    yield attention_case(half, 128, parted=False)
    yield attention_case(half, 128, parted=True)
    yield attention_case(half, 256, parted=False, windowed=True, groups=2)
    for dim in (64, 128, 256):
        yield attention_case(full, dim, parted=False)
    yield join_case(half, 128)
    yield inject_case(half, 128)
    yield write_case(half, 1024)
    yield from row_cases(half, 128, 4096)
    yield noise_case()


def build(case: Case, arch: int) -> Any:
    """The kernel of ``case`` as Triton compiles it for a GPU of compute capability ``arch``."""
    names = case.kernel.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = [n for n in names if case.types.get(n, "")[:1] == "*" or (n in case.types and "stride" in n)]
    specialised = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(case.kernel, signature, constants, specialised)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=case.options)


def compiled(case: Case, arch: int) -> Resources:
    """Return the resources of the kernel of ``case``, as the wheel's ``cuobjdump`` reports them."""
    done = build(case, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        told = subprocess.run([_TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told.stdout + told.stderr)
    assert found is not None, "cuobjdump reports the resources of the only kernel"
    registers, stack, local = map(int, found.groups())
    return Resources(case.name, arch, registers, stack + local, done.metadata.shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=SHARED, help="one architecture instead of all")
    parser.add_argument("--json", type=Path, help="write the list here as well")
    options = parser.parse_args()
    print("| kernel | sm | registers | spilled, bytes | shared, KiB | fits |\n|---|---|---|---|---|---|")
    every = []
    for arch in [options.arch] if options.arch else SHARED:
        for case in cases():
            used = compiled(case, arch)
            every.append(used)
            print(
                f"| {used.kernel} | {arch} | {used.registers} | {used.spilled} | {used.shared / 1024:.0f} "
                f"| {'yes' if used.fits else 'NO'} |",
                flush=True,
            )
    if options.json is not None:
        write_atomically(options.json, json.dumps([asdict(used) for used in every], indent=1) + "\n")
    sys.exit(not all(used.fits for used in every))


if __name__ == "__main__":
    main()
