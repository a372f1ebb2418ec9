"""Answers recorded with one version of volley, compared token for token with another's: fp32, greedy and sampled with seeds.

    python benchmarks/recorded.py record answers.json --data-dir DIR --num-prompts 200    # with the version before
    python benchmarks/recorded.py compare answers.json --data-dir DIR                     # with the version after

Every configuration of ``identity.py`` answers all prompts twice, greedily and at T = 1 with a seed, and those below again with
speculative sampling and penalties. ``compare`` asks for what the file holds and exits with 1 if any token differs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

try:
    from benchmarks.identity import CONFIGURATIONS, DATASETS
except ImportError:  # started as a script
    from identity import CONFIGURATIONS, DATASETS

from volley import Drafter, Engine, SamplingParams, Target
from volley.engine.engine import REFERENCE
from volley.prompts import load_prompts

SAMPLED = {"temperature": 1.0, "top_p": 0.95}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": ((20, 2.0),)}
Case = tuple[dict[str, Any], dict[str, Any]]  # options of the engine, sampling parameters


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, configuration in CONFIGURATIONS.items():
        options = {"policy": None if "block_size" in configuration else "fixed", **configuration}
        found[name] = options, {}
        found[f"{name}, sampled"] = options, SAMPLED
    found["speculative sampling, blocks of 8"] = {"block_size": 8, "verification": "rejection"}, SAMPLED
    found["penalties, blocks of 8"] = {"block_size": 8}, PENALTIES
    found["penalties, trees, sampled"] = {"tree_nodes": 16}, {**SAMPLED, **PENALTIES}
    found["int8 pools"] = {"block_size": 8, "kv_dtype": "int8", "draft_kv_dtype": "int4"}, {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--data-dir", type=Path, help="folder with the datasets' files; without it the hub")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", default="", help="only those whose names contain one of these, separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recorded: dict[str, Any] = {}
    if options.what == "compare":
        recorded = json.loads(options.file.read_text(encoding="utf-8"))
        options.num_prompts, options.max_tokens = recorded["num_prompts"], recorded["max_tokens"]

    target = Target.from_pretrained(REFERENCE / "target", dtype=torch.float32)
    drafter = Drafter.from_pretrained(REFERENCE / "drafter", dtype=torch.float32)
    encode = Engine(target, num_pages=8).encode
    share = -(-options.num_prompts // len(DATASETS))
    chats = [c for name in DATASETS for c in load_prompts(name, options.data_dir, limit=share)][: options.num_prompts]
    prompts = [encode(list(chat.messages)) for chat in chats]
    answers: dict[str, list[list[int]]] = {}
    differing = 0
    for name, (configuration, sampling) in cases().items():
        if configuration.get("block_size", 1) > drafter.config.block_size:
            continue
        if not any(part in name for part in options.cases.split(",")):
            continue
        params = [SamplingParams(max_tokens=options.max_tokens, seed=seed, **sampling) for seed in range(len(prompts))]
        results = list(Engine(target, drafter, **configuration).generate(prompts, params))
        answers[name] = [result.token_ids for result in results]
        line = f"{name}: {len(results)} answers, {sum(map(len, answers[name]))} tokens"
        if options.what == "compare":
            wrong = sum(a != b for a, b in zip(answers[name], recorded["answers"][name], strict=True))
            differing += wrong
            line += f", {wrong} differ"
        print(line, flush=True)
    if options.what == "record":
        held = {"num_prompts": options.num_prompts, "max_tokens": options.max_tokens, "answers": answers}
        options.file.write_text(json.dumps(held), encoding="utf-8")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
