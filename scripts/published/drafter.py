"""Make a bundled drafter of a published model: drafter.py NAME WORK --gguf FILE --responses FILE.jsonl [--minutes 85].

FILE is the model's GGUF file, and FILE.jsonl what `volley collect` took from it (`code_prompts.py` writes prompts for a coder).
Each step finds what an earlier run left in WORK: the parted responses, the training's features and checkpoint, the figures.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from volley import Engine, SamplingParams
from volley.bench.run import without_drafter
from volley.files import PUBLISHED_DRAFTERS, write_atomically
from volley.train.data import asked, read_rows
from volley.train.loop import train
from volley.train.options import TrainConfig

HELD_OUT = 160
"""Prompts that are never learnt from."""
RECIPE: dict[str, Any] = {
    "head": "markov",
    "head_rank": 128,
    "draft_vocab_size": 0,
    "tokens_per_batch": 1024,
    "anchors_per_sequence": 20,
    "features": "cache",
    "log_steps": 200,
}


@dataclass(frozen=True)
class Published:
    """Published model, by the name of its drafter and preset."""

    target: str
    maker: str
    recipe: dict[str, Any]
    """What its training changes of ``RECIPE``."""
    file: str
    """What its card says of the GGUF file."""
    elsewhere: str
    """What its card says of other programs."""


_RUNS_ELSEWHERE = """\
Exported, it drafts in llama.cpp what it drafts here; with volley's plugin it does so in vLLM
(`tests/llamacpp`, `tests/vllm`)."""
MODELS = {
    "smollm2-135m": Published("SmolLM2-135M-Instruct", "HuggingFaceTB", {"num_layers": 4}, "Q4_1", _RUNS_ELSEWHERE),
    "qwen2.5-coder-0.5b": Published(
        "Qwen2.5-Coder-0.5B-Instruct",
        "Qwen",
        {"num_layers": 3, "intermediate_size": 512, "taps": (1, 11, 21)},
        "Q4_K_M",
        "llama.cpp runs no drafter beside a Qwen 2 model.",
    ),
}
TEMPERATURES = (0.0, 1.0)
TAU_PROMPTS, SPEED_PROMPTS, TOKENS = 64, 8, 64

CARD = """\
# {target}'s drafter

A DFlash drafter with a Markov head of rank {rank} for {target}, from its GGUF file or its folder: {layers} layers,
block size {block}, target layers {taps}, bf16, {megabytes:.1f} MB. It serves only this target. `--drafter {name}` names it.
{elsewhere}

The drafter began as the target's last layers and learnt in {steps} steps from {tokens:.2f} M tokens of the target's own responses
({answers}; repeats count), {made}. `scripts/published/drafter.py` makes one again.

| held-out prompts | τ of chains of {block}, drafts alone | plain decoding | prompt lookup alone | with the drafter |
|---|---|---|---|---|
{rows}

τ is over {tau_prompts} prompts of all kinds below, speeds (tokens/s, and × plain decoding) over {speed_prompts} of them, one at a
time, {tokens_each} tokens each, in turns: {machine}, {file} file.

## Data and licences

Target: {target} ({maker}), Apache-2.0. Prompts were made of these texts; the target's answers are learnt.

| text | source | licence |
|---|---|---|
| grade-school math word problems (training split) | openai/grade-school-math | MIT |
| basic Python problems (rows outside the evaluation split) | google-research MBPP | CC-BY-4.0 |
| Python functions with docstrings | sympy/sympy, networkx/networkx | BSD-3-Clause |
| Python programs (a coder's drafter alone) | TheAlgorithms/Python | MIT |
| command help pages | tldr-pages/tldr | CC-BY-4.0 |
| Python Enhancement Proposals | python/peps | public domain, CC0-1.0 |
| The Rust Programming Language | rust-lang/book | MIT, Apache-2.0 |

Attribution as CC-BY-4.0 asks: the command help is by the tldr-pages contributors, MBPP is by Austin et al. (Google Research,
2021).
Weights: Apache-2.0.
"""


def part(responses: Path, work: Path) -> None:
    """Write ``train.jsonl`` and ``held-out.jsonl``: all answers to a prompt lie on one side."""
    rows = read_rows([responses])
    prompts = sorted({asked(row) for row in rows})
    held = set(random.Random(7).sample(prompts, HELD_OUT))
    sides = {
        "train": [row for row in rows if asked(row) not in held],
        "held-out": [row for row in rows if asked(row) in held],
    }
    for name, chosen in sides.items():
        write_atomically(work / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen))


def answers(rows: list[dict[str, Any]]) -> str:
    """Say how many answers there are, at which temperatures, and how long they may be."""
    temperatures = ", ".join(f"{own:g}" for own in sorted({row["temperature"] for row in rows}))
    longest = max(len(row["response_token_ids"]) for row in rows)
    return f"{len(rows):,} answers at T = {temperatures} of up to {longest} tokens"


def measure(target: str, drafter: Path, held_out: Path) -> dict[str, Any]:
    """τ of chains alone, and tokens a second of one request with the drafter, with prompt lookup alone, and plainly."""
    prompts = [row["prompt_token_ids"] for row in read_rows([held_out])][:TAU_PROMPTS]
    pair = Engine.from_pretrained(target, drafter=drafter)
    chains = Engine(pair.target, pair.drafter, policy="fixed")
    engines = {"plain": without_drafter(pair), "lookup": Engine(pair.target, policy="goodput"), "drafter": pair}
    rows = []
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, max_tokens=TOKENS)
        lengths = [n for result in chains.generate(prompts, params) for n in result.stats.accepted_lengths]
        tokens, seconds = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0.0)
        for number, prompt in enumerate([prompts[0], *prompts[:SPEED_PROMPTS]]):  # the first pays for what happens once
            for name, engine in engines.items():
                engine.reset_prefix_cache()
                (result,) = engine.generate([prompt], params)
                if number:
                    tokens[name] += len(result.token_ids) - 1
                    seconds[name] += result.stats.total_seconds - result.stats.time_to_first_token
        speeds = {name: tokens[name] / seconds[name] for name in engines}
        rows.append({"temperature": temperature, "tau": sum(lengths) / len(lengths), "tokens_per_second": speeds})
    return {"rows": rows, "tau_prompts": len(prompts), "speed_prompts": min(SPEED_PROMPTS, len(prompts))}


def bundle(name: str, drafter: Path, report: dict[str, Any], out: Path) -> None:
    """Copy the drafter, and write its card from the record of its making."""
    out.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        write_atomically(out / file, (drafter / file).read_bytes())
    config = json.loads((out / "config.json").read_text())
    rows = []
    for row in report["rows"]:
        speeds = row["tokens_per_second"]
        cells = [f"{speed:.0f} ({speed / speeds['plain']:.2f} ×)" for speed in speeds.values()]
        rows.append(" | ".join([f"| T = {row['temperature']:g}", f"{row['tau']:.2f}", *cells]) + " |")
    model = MODELS[name]
    card = CARD.format(
        name=name,
        target=model.target,
        maker=model.maker,
        file=model.file,
        elsewhere=model.elsewhere,
        rank=config["head"]["rank"],
        layers=config["num_hidden_layers"],
        block=config["block_size"],
        taps=config["dflash_config"]["target_layer_ids"],
        megabytes=(out / "model.safetensors").stat().st_size / 1e6,
        steps=report["steps"],
        tokens=report["tokens"] / 1e6,
        answers=report["answers"],
        made=report["made"],
        rows="\n".join(rows),
        tau_prompts=report["tau_prompts"],
        speed_prompts=report["speed_prompts"],
        tokens_each=TOKENS,
        machine=report["machine"],
    )
    write_atomically(out / "README.md", card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("work", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--responses", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=85, help="of training")
    parser.add_argument("--machine", default="", help="what the card says that speeds were measured on")
    parser.add_argument("--out", type=Path, help="by default where the package has it")
    given = parser.parse_args()
    work: Path = given.work
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "held-out.jsonl").exists():
        part(given.responses, work)
    run, record = work / "train", work / "report.json"
    if not record.exists():
        files = {"target": str(given.gguf), "data": (str(work / "train.jsonl"),), "out": str(run)}
        held_out = str(work / "held-out.jsonl")
        drafter = train(
            TrainConfig(
                **files,
                **RECIPE,
                **MODELS[given.name].recipe,
                preset=given.name,
                eval_data=held_out,
                max_minutes=given.minutes,
            )
        )
        trained = json.loads((run / "training_report.json").read_text())
        facts = {
            "steps": trained["position"]["step"],
            "tokens": trained["position"]["tokens"],
            "answers": answers(read_rows([work / "train.jsonl"])),
            "made": f"in {given.minutes:g} minutes, {time.strftime('%Y-%m-%d')}",
            "machine": given.machine or f"{torch.get_num_threads()} threads of a CPU",
        }
        measured = measure(str(given.gguf), drafter, work / "held-out.jsonl")
        write_atomically(record, json.dumps(facts | measured, indent=2) + "\n")
    bundle(given.name, run / "drafter", json.loads(record.read_text()), given.out or PUBLISHED_DRAFTERS[given.name])


if __name__ == "__main__":
    main()
