"""Kernels compiled ahead of time for GPUs that are not here: registers, spills and shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]


def run(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Python in a process of its own, in which Triton compiles and does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arch", [80, 86, 90, 100])
def test_no_kernel_spills_and_all_fit(arch: int, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run(tmp_path, str(ROOT / "benchmarks" / "kernel_resources.py"), "--arch", str(arch), "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    every = json.loads(out.read_text())
    assert {used["kernel"].split()[0] for used in every} == {
        *("attention", "join", "inject", "norm", "turn", "gate", "float8", "noise")
    }
    assert all(used["registers"] > 0 and used["arch"] == arch for used in every)
    assert all(used["spilled"] == 0 for used in every if "float32" not in used["kernel"])


def test_a_tile_that_is_too_large_is_found(tmp_path: Path) -> None:
    planted = """
import torch
from benchmarks import kernel_resources as resources
from volley.memory.kernels import attention
attention.tile_shape = lambda *_: attention.TileShape(64, 64, 4)
used = resources.compiled(resources.attention_case(torch.bfloat16, 256, parted=False), 86)
print(used.spilled > 0, used.shared > 99 * 1024, used.fits)
"""
    done = run(tmp_path, "-c", planted)
    assert done.stdout.split() == ["True", "True", "False"], done.stderr


def test_subnormal_codes_are_not_flushed_to_zero(tmp_path: Path) -> None:
    """The decoding multiplies numbers that are subnormal in fp32; ``.ftz`` in PTX would make zeros of these."""
    printed = """
from benchmarks import kernel_resources as resources
for arch in resources.SHARED:
    ptx = resources.build(resources.float8_case(4096), arch).asm["ptx"]
    print("mul.f32" in ptx, "mul.ftz" in ptx, "mma" in ptx, "cp.async" in ptx)
"""
    done = run(tmp_path, "-c", printed)
    assert set(done.stdout.splitlines()) == {"True False True True"}, done.stdout + done.stderr
