"""The fused injection against the loop over layers; on a GPU the Triton kernels against their references and a copy.

    python benchmarks/gpu_kernels.py                  the bundled drafter's injection on this CPU
    python benchmarks/gpu_kernels.py --device cuda    kernels: correctness and bandwidth (Qwen3-8B's shapes)

Bandwidth counts each byte of K/V, or of weights, that must be read once; *of a copy* compares it with what ``Tensor.copy_`` of
1 GiB reaches on the same device, read and written bytes added. Kernels are timed in CUDA graphs of many calls, so that launches
do not count. Exits with 1 if a kernel and its reference differ.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.functional import linear

from tests.memory.reference import reference_attention
from volley import Drafter, Engine
from volley.memory.attention import AttentionOptions, paged_attention
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import DenseKVStore
from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.drafters.inject import Injection

PAGE = 16
KV_HEADS, GROUPS, DIM = 8, 4, 128
PRODUCTS = {
    "q, k, v": (6144, 4096),
    "o": (4096, 4096),
    "gate, up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
BATCHES = {
    "1 × verify 16, 112 context": [(112, 16)],
    "1 × decode, 1k context": [(1023, 1)],
    "1 × verify 16, 1k context": [(1008, 16)],
    "1 × decode, 8k context": [(8191, 1)],
    "1 × verify 16, 8k context": [(8176, 16)],
    "64 × decode, 2k context": [(2047, 1)] * 64,
    "64 × verify 8, 2k context": [(2040, 8)] * 64,
    "mixed lengths": [(256 * i, 1 + i % 16) for i in range(32)],
    "prefill 2k": [(0, 2048)],
}


def seconds(functions: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median time of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 3):
        for name, function in functions.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(time.perf_counter() - started)
    return {name: median(each) for name, each in times.items()}


def device_seconds(run: Callable[[], object], calls: int = 20) -> float:
    """Median seconds of one of ``calls`` in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    for _ in range(2):
        run()  # compiles
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls / 1e3)
    return median(times)


def by_layers(
    drafter: Drafter, store: DenseKVStore, features: torch.Tensor, positions: torch.Tensor, slots: slice
) -> None:
    for layer, (keys, values) in enumerate(drafter.context_kv(features, positions)):
        store.write(layer, slots, keys, values)


@torch.inference_mode()
def injection(drafter: Drafter, device: torch.device, repeats: int) -> bool:
    """Prints the table; whether both gave the same."""
    dtype = next(drafter.parameters()).dtype
    stores = [DenseKVStore(drafter.kv_shapes, 1024, dtype, device) for _ in range(2)]
    fused = Injection(drafter, stores[0])
    width = drafter.fc.in_features
    same = True
    print("| tokens injected | loop over layers, µs | fused, µs | ratio |\n|---|---|---|---|")
    for count in (1, 4, 16, 128, 512):
        features, positions = torch.randn(count, width, device=device, dtype=dtype), torch.arange(count, device=device)
        slots = slice(64, 64 + count)
        times = seconds(
            {
                "loop": lambda: by_layers(drafter, stores[1], features, positions, slots),  # noqa: B023
                "fused": lambda: fused(features, positions, slots),  # noqa: B023
            },
            device,
            repeats,
        )
        print(
            f"| {count} | {times['loop'] * 1e6:.0f} | {times['fused'] * 1e6:.0f} | {times['loop'] / times['fused']:.2f} |"
        )
        for mine, theirs in zip(stores[0].keys + stores[0].values, stores[1].keys + stores[1].values, strict=True):
            same &= torch.allclose(mine.float(), theirs.float(), rtol=2**-5, atol=2**-5)
    return same


def copy_bandwidth(device: torch.device) -> float:
    source, target = (torch.empty(2**30, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * source.nbytes / seconds({"copy": lambda: target.copy_(source)}, device, 20)["copy"]


def attention_arguments(shapes: list[tuple[int, int]], device: torch.device) -> tuple[Any, ...]:
    """Time attention for segments of such starts and lengths on scattered pages."""
    pages = [-(-(start + length) // PAGE) for start, length in shapes]
    order = torch.randperm(sum(pages)).tolist()
    segments = []
    for (start, length), count in zip(shapes, pages, strict=True):
        segments.append(Segment(BlockTable(PAGE, order[:count]), start, length))
        order = order[count:]
    batch = RaggedBatch(segments, torch.zeros(sum(length for _, length in shapes), dtype=torch.long, device=device))
    store = DenseKVStore([(KV_HEADS, DIM)], sum(pages) * PAGE, torch.bfloat16, device)
    store.keys[0].normal_()
    store.values[0].normal_()
    rows = torch.randn(len(batch), KV_HEADS * (GROUPS + 2), DIM, device=device, dtype=torch.bfloat16)
    queries, keys, values = rows.split([KV_HEADS * GROUPS, KV_HEADS, KV_HEADS], dim=1)
    return batch, store, 0, queries, keys, values, AttentionOptions(DIM**-0.5)


@torch.inference_mode()
def attention(device: torch.device) -> bool:
    """Prints the table; whether kernel and reference agree."""
    from volley.memory.kernels.attention import ragged_attention

    copy, same = copy_bandwidth(device), True
    print(f"\nA copy moves {copy / 1e9:.0f} GB/s.\n")
    print(
        "| batch | kernel, µs | gather and SDPA, µs | GB/s | of a copy | largest difference |\n|---|---|---|---|---|---|"
    )
    for name, shapes in BATCHES.items():
        arguments = attention_arguments(shapes, device)
        difference = float((ragged_attention(*arguments) - reference_attention(*arguments)).abs().max())
        same &= difference < 2e-2
        kernel = device_seconds(lambda: ragged_attention(*arguments))  # noqa: B023
        torch_seconds = seconds({"torch": lambda: paged_attention(*arguments)}, device, 10)["torch"]  # noqa: B023
        read = sum(start + length for start, length in shapes) * 2 * KV_HEADS * DIM * 2 / kernel
        print(
            f"| {name} | {kernel * 1e6:.1f} | {torch_seconds * 1e6:.0f} | {read / 1e9:.0f} | {read / copy:.0%} "
            f"| {difference:.1e} |",
            flush=True,
        )
    return same


@torch.inference_mode()
def products(device: torch.device) -> None:
    """Prints microseconds of PyTorch's products in bf16, by rows, and the bandwidth at 16 rows. No weight stays in a cache."""
    copy, counts = copy_bandwidth(device), (1, 16, 64, 128)
    print(
        f"\n| product | {' | '.join(f'{count} rows, µs' for count in counts)} | of a copy, 16 rows |\n|---|---|---|---|---|---|"
    )
    for name, (outputs, inputs) in PRODUCTS.items():
        size = 2 * outputs * inputs
        weights = [
            torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) for _ in range(max(2, int(1.5e9 / size)))
        ]
        times = []
        for count in counts:
            x = torch.randn(count, inputs, device=device, dtype=torch.bfloat16)
            all_of_them = device_seconds(lambda: [linear(x, weight) for weight in weights], 1)  # noqa: B023
            times.append(all_of_them / len(weights))
        shown = " | ".join(f"{1e6 * each:.1f}" for each in times)
        print(f"| {name} | {shown} | {size / times[1] / copy:.0%} |", flush=True)


def large_drafter() -> Drafter:
    """The shape of a published drafter for Qwen3-8B, with random weights."""
    return Drafter(
        DrafterConfig(
            hidden_size=4096,
            intermediate_size=12288,
            num_attention_heads=KV_HEADS * GROUPS,
            num_key_value_heads=KV_HEADS,
            head_dim=DIM,
            vocab_size=151936,
            num_hidden_layers=5,
            num_target_layers=36,
            block_size=16,
            mask_token_id=151669,
            target_layer_ids=(1, 9, 17, 25, 33),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cpu":
        drafter = Engine.from_pretrained(num_pages=4).drafter
        assert drafter is not None
        sys.exit(not injection(drafter, device, options.repeats))
    same = injection(large_drafter().to(device, torch.bfloat16).eval(), device, options.repeats)
    same &= attention(device)
    products(device)
    sys.exit(not same)


if __name__ == "__main__":
    main()
