"""Loading holds each weight once: the most memory that a process of its own ever has, on made-up weights of 200 MiB."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.conftest import byte_tokenizer
from tests.models.gguf.converted import random_model
from tests.models.gguf.files import bpe_tokenizer, write_model
from tests.tiles import needs_kernels
from volley.files import REFERENCE
from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.drafters.drafter import Drafter
from volley.models.layers.host_memory import MappedFiles

pytestmark = [needs_kernels, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_768,
}
LAYERS = 4
MEASURE = """
import gc, json, os, sys
from pathlib import Path
from volley import Engine, SamplingParams
from volley.files import REFERENCE

def resident(kind):
    return int(Path("/proc/self/status").read_text().split(kind)[1].split()[0]) * 1024

def run(folder, drafter, weights, draft_weights):
    engine = Engine.from_pretrained(folder, drafter=drafter, weights=weights, draft_weights=draft_weights)
    list(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8)))

def measured(small, folder, drafter, *weights):
    run(small, drafter and "reference-dflash", *weights)
    gc.collect()
    before = resident("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    run(folder, drafter, *weights)
    return resident("VmHWM:") - before

run(str(REFERENCE / "target"), "reference-dflash", "bf16", "bf16")
for case in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if not (child := os.fork()):  # none finds what another has freed
        print(measured(*case), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
"""Prints the bytes that loading and decoding took, at most, for each case: a target that was loaded before, the target, its
drafter, and the weights of both."""


@dataclass(frozen=True)
class Folders:
    target: Path
    drafter: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("large")
    config = Qwen3Config(**SHAPE, num_hidden_layers=LAYERS, tie_word_embeddings=True, dtype="bfloat16")
    with torch.device("meta"):
        empty = Qwen3ForCausalLM(config)
    names = {name: tensor.shape for name, tensor in empty.state_dict().items() if name != "lm_head.weight"}
    config.save_pretrained(folder / "target")
    weights = {name: torch.empty(shape).uniform_(-0.05, 0.05).bfloat16() for name, shape in names.items()}
    save_file(weights, folder / "target/model.safetensors", {"format": "pt"})
    byte_tokenizer().save_pretrained(folder / "target")
    drafter = DrafterConfig(
        **SHAPE,
        num_hidden_layers=2,
        mask_token_id=5,
        target_layer_ids=(0, 2),
        block_size=8,
        num_target_layers=LAYERS,
        max_position_embeddings=4096,
    )
    Drafter(drafter).save_pretrained(folder / "drafter")
    return Folders(folder / "target", folder / "drafter")


def size(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


SLACK = 80 * 2**20
"""Memory of threads, buffers of a pass and the one weight that is being converted, beside the model."""
SHARES = {"bf16": 1.0, "int8": 0.5, "int4": 0.29}
"""Shares of the bytes of bf16 weights."""
HEAD = SHAPE["vocab_size"] * SHAPE["hidden_size"] * 2


PAIRS = [("bf16", "bf16"), ("bf16", "int8"), ("int8", "int8"), ("int4", "int8")]
"""Weights of a target and of its drafter; a target that is in memory twice is found beside its drafter, too."""


@pytest.fixture(scope="module")
def most(folders: Folders) -> dict[tuple[str, ...], int]:
    """Bytes that loading and decoding took, at most."""
    bundled = str(REFERENCE / "target")
    found = measure([(bundled, str(folders.target), str(folders.drafter), *pair) for pair in PAIRS])
    return dict(zip(PAIRS, found, strict=True))


def measure(cases: list[tuple[str | None, ...]]) -> list[int]:
    found = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(cases)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # a fork has none of the threads that its parent waits for
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return list(map(int, found.stdout.split()))


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "draft_weights"), PAIRS)
def test_a_pair_is_in_memory_once(
    folders: Folders, most: dict[tuple[str, ...], int], weights: str, draft_weights: str
) -> None:
    """A head in other codes than the target's is there once more."""
    held = SHARES[weights] * size(folders.target) + SHARES[draft_weights] * size(folders.drafter)
    if draft_weights != weights:
        held += SHARES[draft_weights] * HEAD
    assert most[weights, draft_weights] < 1.1 * held + SLACK


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["BF16", "Q4_0"])
def test_a_gguf_file_is_in_memory_once(tmp_path: Path, kind: str) -> None:
    """The weights of the file, and nothing of the file itself; queries and keys of Llama lie in another order there."""
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    for path, changes in ((small, {}), (large, {**SHAPE, "num_hidden_layers": LAYERS})):
        write_model(path, random_model("llama", **changes), "llama", kind, tokenizer=bpe_tokenizer())
    (most,) = measure([(str(small), str(large), None, "auto", "auto")])
    assert most < 1.1 * large.stat().st_size + SLACK


def test_what_is_forgotten_is_read_again(folders: Folders) -> None:
    weights = load_file(folders.drafter / "model.safetensors")
    wanted = {name: weight.clone() for name, weight in weights.items()}
    files = MappedFiles()
    resident = Path("/proc/self/statm").read_text().split()[2]
    for weight in weights.values():
        files.forget(weight)
    assert int(resident) - int(Path("/proc/self/statm").read_text().split()[2]) > size(folders.drafter) / 4096 * 0.9
    for name, weight in weights.items():
        assert torch.equal(weight, wanted[name])


LIBRARIES = """
import torch
from pathlib import Path
from volley.models.layers.host_memory import forget_libraries

def in_files():
    return int(Path("/proc/self/status").read_text().split("RssFile:")[1].split()[0])

left, right = torch.randn(64, 64), torch.randn(64, 64)
expected, before = left @ right, in_files()
forget_libraries()
print(in_files() / before)
assert torch.equal(left @ right, expected)
assert torch.linalg.svdvals(left).shape == (64,), "what was never used before"
"""


@pytest.mark.slow
def test_libraries_leave_memory_and_come_again() -> None:
    found = subprocess.run([sys.executable, "-c", LIBRARIES], capture_output=True, text=True, check=True, timeout=120)
    assert float(found.stdout) < 0.4


FREED = """
import torch
from pathlib import Path
from volley.models.layers.host_memory import returning_memory

def unnamed():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

del (large := [torch.ones(6 * 2**20)])[:]  # glibc keeps allocations of 24 MiB once one of them was freed
with returning_memory():
    large = [torch.ones(6 * 2**20) for _ in range(4)]
    before, fence = unnamed(), [torch.ones(2**17) for _ in range(8)]
    del large[:]
    print(before - unnamed())
"""


@pytest.mark.slow
def test_what_is_freed_while_loading_is_given_back() -> None:
    """In a process of its own, without free memory of earlier tests."""
    found = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True, timeout=120)
    assert int(found.stdout) > 90 * 2**10


def test_memory_that_is_in_no_file_is_never_forgotten() -> None:
    weight = torch.ones(2**20)
    MappedFiles().forget(weight)
    assert bool((weight == 1).all())
