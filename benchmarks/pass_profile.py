"""What a pass of the target spends its time on, by kind of operation.

    python benchmarks/pass_profile.py runs/pair-0.6b/target --rows 1,8,16 --threads 2

*Fused layers* are decoder layers that run in one call of volley's own kernels, products and all.
*Outside operations* is the time of a pass without a profiler, less the time in operations with one: Python, and what PyTorch
does before an operation begins. It may be too small, because profiled operations are a little slower. The rate of products is the
bytes of the weights by the time of the products.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from volley import Engine, native
from volley.files import REFERENCE
from volley.models.targets.rehearsal import CONTEXT, made_up
from volley.native import decoder

KINDS = {
    "attention": ("scaled_dot_product", "flash_attention", "softmax", "bmm"),
    "norms": ("norm", "rsqrt", "pow", "mean"),
    "products": ("linear", "mm", "matmul", "int8pack", "int4pack"),
    "moving data": (
        "copy", "cat", "index", "clone", "contiguous", "empty", "zeros", "fill", "embedding", "stack", "gather", "::to",
    ),
    "views": (
        "view", "as_strided", "slice", "narrow", "transpose", "split", "reshape", "unsqueeze", "expand", "select", "permute",
        "unbind", "alias", "detach",
    ),
}  # fmt: skip
OTHER = "rotary, SiLU, sums"
LAYERS = "fused layers"
ORDER = (LAYERS, *KINDS, OTHER, "outside operations")


def kind(operation: str) -> str:
    """The kind of an operation by its name; those that are left compute element by element."""
    return next((kind for kind, parts in KINDS.items() if any(part in operation for part in parts)), OTHER)


@contextmanager
def own_kernels_timed() -> Iterator[dict[str, float]]:
    """Seconds in volley's own layers and products, which PyTorch's profiler does not see."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            started = time.perf_counter()
            result = call(*args)
            seconds[name] += time.perf_counter() - started
            return result

        return wrapper

    run, product = decoder.Decoder.run, native.Product.__call__
    decoder.Decoder.run = timed(LAYERS, run)  # type: ignore[method-assign]
    native.Product.__call__ = timed("volley::linear", product)  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        decoder.Decoder.run, native.Product.__call__ = run, product  # type: ignore[method-assign]


def measure(engine: Engine, rows: int, repeats: int) -> tuple[float, dict[str, float], dict[str, float]]:
    """Seconds of a pass of ``rows`` tokens, of its kinds of operations and of its operations."""
    target = engine.target
    batch, store = made_up([rows], target.kv_shapes, target.dtype, target.device, causal=True, context=CONTEXT)
    wanted = torch.arange(rows)
    with torch.inference_mode():
        times = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            target.forward(batch, store, wanted)
            times.append(time.perf_counter() - started)
        with own_kernels_timed() as own, profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(repeats):
                target.forward(batch, store, wanted)
    operations = {event.key: event.self_cpu_time_total / 1e6 / repeats for event in profiled.key_averages()}
    operations |= {name: seconds / repeats for name, seconds in own.items()}
    kinds: dict[str, float] = defaultdict(float)
    for name, seconds in operations.items():
        kinds[LAYERS if name == LAYERS else kind(name)] += seconds
    whole = statistics.median(times[1:])
    kinds["outside operations"] = max(whole - sum(kinds.values()), 0.0)
    return whole, kinds, operations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default=REFERENCE / "target")
    parser.add_argument("--rows", default="1,8,16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--operations", type=int, default=0, help="list so many of the longest operations")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = Engine.from_pretrained(options.target, drafter=None, num_pages=64)
    weights = sum(parameter.nbytes for parameter in engine.target.model.parameters())
    print("| ms | pass | " + " | ".join(ORDER) + " | GB/s of products |\n|" + "---|" * (len(ORDER) + 3))
    for rows in map(int, options.rows.split(",")):
        whole, kinds, operations = measure(engine, rows, options.repeats)
        cells = [f"{1000 * kinds[name]:.2f} ({kinds[name] / whole:.0%})" for name in ORDER]
        rate = weights / (kinds["products"] + kinds[LAYERS]) / 1e9
        print(f"| {rows} | {1000 * whole:.2f} | " + " | ".join(cells) + f" | {rate:.0f} |", flush=True)
        for name in sorted(operations, key=lambda name: -operations[name])[: options.operations]:
            print(f"    {1000 * operations[name]:8.3f} ms  {name} ({kind(name)})")


if __name__ == "__main__":
    main()
