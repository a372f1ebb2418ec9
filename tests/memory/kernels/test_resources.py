"""Kernels compiled ahead of time for GPUs that are not here: registers, spills and shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that Triton has compiled: no test compiles them again."""
    return tmp_path_factory.mktemp("triton")


def run(cache: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Python in a process of its own, in which Triton compiles and does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def resources(cache: Path) -> list[dict[str, Any]]:
    out = cache / "out.json"
    done = run(cache, str(ROOT / "scripts" / "gpu" / "kernel_resources.py"), "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("arch", [80, 86, 90, 100])
def test_no_kernel_spills_and_all_fit(resources: list[dict[str, Any]], arch: int) -> None:
    every = [used for used in resources if used["arch"] == arch]
    assert {used["kernel"].split()[0] for used in every} == {
        *("attention", "join", "inject", "write", "norm", "turn", "gate", "noise")
    }
    assert all(used["registers"] > 0 for used in every)
    assert {used["spilled"] for used in every} == {0}
    assert any("float32" in used["kernel"] for used in every)


@pytest.mark.slow
def test_a_tile_that_is_too_large_is_found(cache: Path) -> None:
    planted = """
import torch
from scripts.gpu import kernel_resources as resources
from volley.memory.kernels import attention
attention.tile_shape = lambda *_: attention.TileShape(64, 64, 4)
used = resources.compiled(resources.attention_case(torch.bfloat16, 256, parted=False), 86)
print(used.spilled > 0, used.shared > 99 * 1024, used.fits)
"""
    done = run(cache, "-c", planted)
    assert done.stdout.split() == ["True", "True", "False"], done.stderr
