"""The paper's ablations (DFlash Tables 5–9, Fig. 5), small: one drafter per row, all else and the number of steps equal.

    python benchmarks/ablations.py --data responses.jsonl --prompts held-out.jsonl --out runs/ablations --max-steps 1000

Every row is trained by ``volley.train`` and measured by decoding the same held-out prompts with the engine; a finished row is not
trained again. Prints a Markdown table: τ at T = 0, and the cost of a draft pass against a target pass in the same decoding.
"""

import os
import random
from functools import partial
from typing import Any
from unittest import mock

import torch
from training_rows import Changes, decode, folder_of, load_chats, parser, tau, train_as_told, train_rows

from volley import Engine, SamplingParams, Target
from volley.train import step

BASE: Changes = {
    "num_layers": 2,
    "block_size": 8,
    "anchors_per_sequence": 32,
    "optimizer": "muon",
    "learning_rate": 2e-3,
}
# name, options of the run, block size to decode with, what the paper's table says of it
ROWS: list[tuple[str, Changes, int, str]] = [
    ("base: 2 layers, 5 taps, random anchors, decay, B = 8", {}, 8, ""),
    ("1 layer", {"num_layers": 1}, 8, "Table 5: fewer layers, lower τ"),
    ("4 layers", {"num_layers": 4}, 8, "Table 5: more layers, higher τ"),
    ("3 taps", {"taps": 3}, 8, "Table 6: fewer features, lower τ"),
    ("base decoded with B = 4", {}, 4, "Table 7: close to trained with 4"),
    ("trained and decoded with B = 4", {"block_size": 4}, 4, "Table 7"),
    ("no target features", {"taps": (-1,)}, 8, "Table 8: much lower τ"),
    ("fixed anchors", {"anchors": "fixed"}, 8, "Table 9: lower τ"),
    ("uniform loss", {"loss_decay": "decay", "gamma": 1e9}, 8, "Fig. 5: lower τ"),
]


def train_ablated(anchors: str = "random", **options: Any) -> None:
    """Train one drafter, with ``fixed`` anchors on the grid of uniformly divided blocks."""
    if anchors == "random":
        train_as_told(**options)
        return
    with mock.patch.object(step, "draw_anchors", partial(grid, options["block_size"])):
        train_as_told(**options)


def grid(block_size: int, start: int, length: int, count: int, seed: str) -> list[int]:
    """Divide a response at ``[start, length)`` into blocks; returns the anchors of at most ``count`` of them."""
    candidates = range(start, length - 1, block_size)
    return sorted(random.Random(seed).sample(candidates, min(count, len(candidates))))


def main() -> None:
    options = parser(__doc__).parse_args()
    train_rows(options, BASE, [changes for _, changes, _, _ in ROWS], train_ablated)
    target = Target.from_pretrained(options.target, dtype=torch.bfloat16)
    chats = load_chats(options)
    print(f"{options.max_steps} steps of {options.tokens_per_batch} tokens each\n")
    print("| drafter | τ | against base | T_draft ÷ T_verify | in the paper |\n|---|---|---|---|---|", flush=True)
    base = None
    for name, changes, block_size, paper in ROWS:
        drafter = folder_of(options.out, changes) / "drafter"
        engine = Engine.from_pretrained(target, drafter=drafter, dtype=target.dtype, block_size=block_size)
        stats = decode(engine, chats, SamplingParams(max_tokens=options.max_tokens))
        cost = sum(s.draft_seconds for s in stats) / sum(s.verify_seconds for s in stats)
        base = base or tau(stats)
        print(f"| {name} | {tau(stats):.3f} | {tau(stats) / base - 1:+.1%} | {cost:.2f} | {paper} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
