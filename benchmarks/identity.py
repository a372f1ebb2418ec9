"""Greedy identity on real prompts: volley's tokens against transformers' own ``generate``, fp32, token for token.

    python -m benchmarks.identity --data-dir DIR --num-prompts 210
    python -m benchmarks.identity --data-dir DIR --target MODEL.gguf --drafter none --only goodput --json RECORD

Every row of the printed table decodes all prompts with one configuration of the engine. A GGUF file is decoded to fp32 by volley
and by transformers, each in its own way. Exits with 1 if any token differs. Where one does, the distance between the target's two
largest logits at that place is printed: a tie to within rounding would show.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.llama_cpp import circumstances
from volley import Drafter, Engine, SamplingParams, Target
from volley.engine.engine import REFERENCE
from volley.files import write_atomically
from volley.prompts import load_prompts

DATASETS = ("gsm8k", "humaneval", "mt-bench")
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    **{f"block size {size}": {"block_size": size} for size in (1, 2, 4, 8, 12, 16)},
    **{
        f"{steps} denoising steps, {schedule}": {"denoising_steps": steps, "denoising_schedule": schedule}
        for steps, schedule in ((2, "cosine"), (4, "linear"), (3, "sqrt"))
    },
    "one request at a time": {"max_running": 1},
    "7 requests at a time": {"max_running": 7},
    "prompt chunks of 16": {"max_batch_tokens": 16, "max_running": 4},
    "no prefix cache": {"prefix_caching": False},
    "draft window of 64": {"draft_window": 64},
    "pages of 4 tokens": {"page_size": 4},
    "pool too small: preemption": {"num_pages": 64},
    "goodput": {"policy": "goodput"},
    "feedback": {"policy": "feedback"},
    "trees of 16": {"tree_nodes": 16},
}


def load(path: str) -> PreTrainedModel:
    """Load a folder or GGUF file in fp32 with transformers alone."""
    file = Path(path)
    named: dict[str, Any] = {"gguf_file": file.name} if file.suffix == ".gguf" else {}
    where = file.parent if named else file
    return AutoModelForCausalLM.from_pretrained(where, **named, dtype=torch.float32, attn_implementation="eager").eval()


def transformers_tokens(
    model: PreTrainedModel, prompts: list[list[int]], max_tokens: int, stops: list[int]
) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=stops or None,
            repetition_penalty=1.0,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


@torch.no_grad()
def logit_gap(model: PreTrainedModel, token_ids: list[int]) -> float:
    best = model(torch.tensor([token_ids])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with the datasets' files; without it the hub")
    parser.add_argument("--target", default=str(REFERENCE / "target"))
    parser.add_argument("--drafter", default=str(REFERENCE / "drafter"))
    parser.add_argument("--num-prompts", type=int, default=210)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--only", help="names of configurations, separated by commas; by default all")
    parser.add_argument("--json", type=Path, help="record")
    options = parser.parse_args()

    about = circumstances(options)
    target = Target.from_pretrained(options.target, dtype=torch.float32)
    drafter = None if options.drafter == "none" else Drafter.from_pretrained(options.drafter, dtype=torch.float32)
    encode = Engine(target).encode
    share = -(-options.num_prompts // len(DATASETS))
    chats = [c for name in DATASETS for c in load_prompts(name, options.data_dir, limit=share)]
    prompts = [encode(list(chat.messages)) for chat in chats]
    model = load(options.target)
    expected = transformers_tokens(model, prompts, options.max_tokens, sorted(target.stop_token_ids))
    total = sum(map(len, expected))
    print(f"{len(prompts)} prompts of {', '.join(DATASETS)}; {total} tokens from transformers; fp32\n")
    print("| configuration | identical answers | preemptions | τ |\n|---|---|---|---|", flush=True)
    differences, rows = [], []
    chosen = options.only.split(",") if options.only else list(CONFIGURATIONS)
    for name in chosen:
        configuration = CONFIGURATIONS[name]
        if configuration.get("block_size", 1) > (1 if drafter is None else drafter.config.block_size):
            continue
        usual = None if "block_size" in configuration or drafter is None else "fixed"
        engine = Engine(target, drafter, **{"policy": usual, **configuration})
        results = list(engine.generate(prompts, SamplingParams(max_tokens=options.max_tokens)))
        engine.check_integrity()
        same = [result.token_ids == answer for result, answer in zip(results, expected, strict=True)]
        lengths = [length for result in results for length in result.stats.accepted_lengths]
        preemptions = sum(result.stats.preemptions for result in results)
        tau = sum(lengths) / max(1, len(lengths))
        rows.append({"configuration": name, "identical": sum(same), "answers": len(same), "tau": round(tau, 2)})
        print(f"| {name} | {sum(same)} of {len(same)} | {preemptions} | {tau:.2f} |", flush=True)
        for prompt, result, answer, identical in zip(prompts, results, expected, same, strict=True):
            if not identical:
                pairs = enumerate(zip(result.token_ids, answer, strict=False))
                at = next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(result.token_ids), len(answer)))
                differences.append((name, at, logit_gap(model, prompt + answer[:at])))
    for name, at, gap in differences:
        print(f"{name}: token {at} differs; the two largest logits are {gap:.2e} apart")
    if options.json:
        about["options"] = {"target": Path(options.target).name, "drafter": Path(options.drafter).name}
        write_atomically(options.json, json.dumps({"about": about, "tokens": total, "rows": rows}, indent=1) + "\n")
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
