"""DFlash and a drafter that attends to the target's K/V (AitherOS), trained one after the other for equal minutes.

    python -m benchmarks.cross_attention --out runs/cross --json benchmarks/results/cross-attention.json

The bundled target answers the built-in prompts; every eighth prompt is held out. Both trainings have one thread, the same
layers, width, block size and optimizer. Their minutes are of CPU time, so that other processes count little. ``tau`` is of
greedy decoding of the held-out prompts with blocks of 8, ``cost`` the seconds of drafting by those of the target's passes.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.llama_cpp import circumstances
from volley import Engine, SamplingParams, Target
from volley.files import REFERENCE
from volley.prompts import BUILTIN, load_prompts
from volley.proposers.cross import CrossProposer
from volley.train.collect import CollectConfig, EngineSource, collect
from volley.train.cross import train_cross
from volley.train.loop import train
from volley.train.options import TrainConfig

HELD_OUT = 8
"""One prompt in so many is not trained on."""
COMMON: dict[str, Any] = {"num_layers": 2, "block_size": 8, "eval_share": 0.0, "eval_prompts": 0, "threads": 1}
MEASURED = [("one pass", {}), ("four passes", {"denoising_steps": 4}), ("one pass, 4-bit K/V", {"kv_dtype": "int4"})]


def responses(out: Path, target: Path, samples: int, max_tokens: int) -> tuple[Path, list[Any]]:
    """Return the file of the target's responses, made once, and the held-out conversations."""
    chats = [list(chat.messages) for chat in load_prompts(BUILTIN)]
    out.mkdir(parents=True, exist_ok=True)
    prompts = out / "prompts.jsonl"
    taught = [chat for index, chat in enumerate(chats) if index % HELD_OUT]
    prompts.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in taught), encoding="utf-8")
    file = out / "responses.jsonl"
    asked = CollectConfig(
        prompts=(str(prompts),), out=file, temperatures=(0.0, 0.7, 1.0), samples=samples, max_tokens=max_tokens
    )
    engine = Engine.from_pretrained(target)
    collect(asked, EngineSource(engine, str(target), None, most_tokens=engine.snapshot().max_tokens))
    return file, chats[::HELD_OUT]


def measure(
    target: Target, chats: list[Any], drafter: dict[str, Any], max_tokens: int, **options: Any
) -> dict[str, float]:
    engine = Engine.from_pretrained(target, dtype=target.dtype, policy="fixed:8", **drafter, **options)
    params = SamplingParams(max_tokens=max_tokens)
    stats = [next(iter(engine.generate([chat], params))).stats for chat in chats]
    lengths = [length for one in stats for length in one.accepted_lengths]
    cost = sum(one.draft_seconds for one in stats) / sum(one.verify_seconds for one in stats)
    return {"tau": round(sum(lengths) / len(lengths), 3), "cost": round(cost, 2)}


def run(out: Path, folder: Path, minutes: float, samples: int, max_tokens: int) -> dict[str, dict[str, float]]:
    """Return tau and cost by drafter and way of drafting; what was trained in ``out`` is not trained again."""
    data, chats = responses(out, folder, samples, max_tokens)
    common = {**COMMON, "target": str(folder), "data": str(data), "max_minutes": minutes}
    with mock.patch.object(time, "monotonic", time.process_time):
        dflash = train(TrainConfig(**common, out=str(out / "dflash")))
        cross = train_cross(TrainConfig(**common, out=str(out / "cross"), reveal=0.5))
    target, found = Target.from_pretrained(folder), dict[str, dict[str, float]]()
    found["DFlash, one pass"] = measure(target, chats, {"drafter": dflash, "draft_weights": "bf16"}, max_tokens)
    for name, options in MEASURED:
        drafter = {"drafter": None, "proposer": CrossProposer(cross, target)}
        found[f"cross-attention, {name}"] = measure(target, chats, drafter, max_tokens, **options)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for responses and trainings")
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each training")
    parser.add_argument("--samples", type=int, default=6, help="responses of a prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    about = circumstances(options)
    for place in ("out", "json"):
        del about["options"][place]
    found = run(options.out, REFERENCE / "target", options.minutes, options.samples, options.max_tokens)
    print("| drafter | τ | T_draft ÷ T_verify |\n|---|---|---|")
    for name, own in found.items():
        print(f"| {name} | {own['tau']} | {own['cost']} |")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"about": about, "rows": found}, indent=1, default=str) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
