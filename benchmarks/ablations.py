"""The paper's ablations (DFlash Tables 5–9, Fig. 5), small: one drafter per row, all else and the number of steps equal.

    python benchmarks/ablations.py --data responses.jsonl --prompts held-out.jsonl --out runs/ablations --max-steps 1000

Every row is trained by ``volley.train`` and measured by decoding the same held-out prompts with the engine; a finished row is not
trained again. Prints a Markdown table: τ at T = 0, and the cost of a draft pass against a target pass in the same decoding.
"""

import os

import torch
from training_rows import Changes, decode, folder_of, load_chats, parser, tau, train_rows

from volley import Engine, SamplingParams, Target

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
    ("no target features", {"no_features": True}, 8, "Table 8: much lower τ"),
    ("fixed anchors", {"anchors": "fixed"}, 8, "Table 9: lower τ"),
    ("uniform loss", {"loss_decay": "uniform"}, 8, "Fig. 5: lower τ"),
]


def main() -> None:
    options = parser(__doc__).parse_args()
    train_rows(options, BASE, [changes for _, changes, _, _ in ROWS])
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
