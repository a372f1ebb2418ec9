"""Milliseconds of all products of some decoder layers by the kind of their weights and the number of rows, on this CPU.

    python -m benchmarks.products [--shape 0.6b] [--layers 4] [--rows 1,4,8,16]

Kinds are timed in turn, and the fastest of ``--repeats`` rounds counts: what other processes take is mostly left out. The layers
together are meant to be larger than the caches.
"""

import argparse
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.inflate import SHAPES, Shape
from volley.native import Codes, Product, Weights
from volley.native.codes import FINE

BUNDLED = Shape(256, 20, 4, 2, 512)
KINDS = ("bf16", "int8", "int8 in groups of 32", "int4", "int4 in groups of 32")


def stored(kind: Weights, outputs: int, inputs: int) -> Codes:
    """Made-up codes as a GGUF file has them."""
    most = 128 if kind == "int8" else 8
    codes = torch.randint(-most, most, (outputs, inputs), dtype=torch.int8)
    return Codes(kind, codes, (torch.randn(outputs, inputs // FINE) * 0.01).half())


def make(kind: str, shape: Shape) -> list[Product]:
    """The products of one layer."""
    heads, shared, dim = shape.num_attention_heads, shape.num_key_value_heads, 64
    sizes = [
        ((heads + 2 * shared) * dim, shape.hidden_size),
        (shape.hidden_size, heads * dim),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    ]
    weights: Weights = "bf16" if kind == "bf16" else "int8" if kind.startswith("int8") else "int4"
    found = []
    for outputs, inputs in sizes:
        codes = stored(weights, outputs, inputs) if "groups" in kind else None
        found.append(Product(torch.randn(outputs, inputs).bfloat16(), None, weights, codes))
    return found


def fastest(products: Mapping[str, Sequence[Product]], rows: int, repeats: int) -> dict[str, float]:
    """Seconds."""
    inputs: dict[int, Tensor] = {}
    times = dict.fromkeys(products, float("inf"))
    for _ in range(repeats):
        for kind, own in products.items():
            started = time.perf_counter()
            for product in own:
                product(inputs.setdefault(product.inputs, torch.randn(rows, product.inputs).bfloat16()))
            times[kind] = min(times[kind], time.perf_counter() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["bundled", *SHAPES], default="0.6b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", default="1,4,8,16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = BUNDLED if options.shape == "bundled" else SHAPES[options.shape]
    products = {kind: [one for _ in range(options.layers) for one in make(kind, shape)] for kind in KINDS}
    print(f"| rows | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}")
    print("| MB | " + " | ".join(f"{sum(one.nbytes for one in products[kind]) / 1e6:.0f}" for kind in KINDS) + " |")
    for rows in map(int, options.rows.split(",")):
        times = fastest(products, rows, options.repeats)
        print(f"| {rows} | " + " | ".join(f"{times[kind] * 1e3:.2f}" for kind in KINDS) + " |", flush=True)


if __name__ == "__main__":
    main()
