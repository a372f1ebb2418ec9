"""Copy trained models into the package, with their model cards, after checking that all is small enough to ship.

Two matrices a layer of the diffusion model are kept in floats of 8 bits. Programs that read safetensors make bf16 of them.
"""

import argparse
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from volley.files import replaced
from volley.tensors import load_tensors, save_tensors

LIMIT_BYTES = 85_000_000
SHORT = ("down_proj.weight", "gate_proj.weight")

SOURCES = """\
| text | source | licence |
|---|---|---|
| grade-school math word problems (training split) | openai/grade-school-math | MIT |
| basic Python problems (rows outside the evaluation split) | google-research MBPP | CC-BY-4.0 |
| Python functions with docstrings | sympy/sympy, networkx/networkx | BSD-3-Clause |
| Python algorithms | TheAlgorithms/Python | MIT |
| command help pages | tldr-pages/tldr | CC-BY-4.0 |
| Python Enhancement Proposals | python/peps | public domain, CC0-1.0 |
| The Rust Programming Language | rust-lang/book | MIT, Apache-2.0 |

Attribution as CC-BY-4.0 asks: the command help is by the tldr-pages contributors, MBPP is by Austin et al. (Google Research, 2021).
The evaluation files (GSM8K test, HumanEval, MBPP tasks 11–510, MT-bench and others) were not trained on.
"""

TARGET_CARD = """\
# volley's reference target

{layers} layers, width {hidden}, vocabulary {vocabulary} (byte-level BPE), Qwen3 architecture, ChatML template, bf16: {megabytes:.1f} MB.
Trained from scratch on a CPU for {minutes:.0f} minutes on {tokens:.1f} M tokens of chats made from the text below. It is here to prove the
machinery on real text: it writes in the form of its three domains and is often wrong. **It is not an assistant.**

Held-out loss, nats per token (1 % of each file, never trained on):

| domain | loss |
|---|---|
{losses}

## Data and licences

{sources}
Weights: Apache-2.0. Made by `scripts/reference/run`.
"""

DRAFTER_CARD = """\
# volley's reference drafter

A {kind} for the reference target beside it: {layers} layers, block size {block}, target layers {taps}, bf16,
{megabytes:.1f} MB. Trained by `volley train` on {rows} responses ({tokens:.1f} M tokens) that `volley collect` took from the target, for
{steps} steps{init}. τ, greedy, on prompts {prompts}: {tau:.2f}.
It serves only this target.

The prompts come from the text named in the target's model card, under the licences named there. Weights: Apache-2.0.
"""

DIFFUSION_STAGE = """\
in {minutes:.0f} minutes on {machine}: {tokens:.1f} M tokens of text, among which are {responses:,} answers of the model
that it began with, and {noisy:.1f} M masked slots behind them{kept}"""

DIFFUSION_CARD = """\
# volley's reference diffusion model

The reference target beside it, taught to fill masks, too: the same architecture, tokenizer and template, {megabytes:.1f} MB: bf16, and float8 (e4m3)
for `down_proj` and `gate_proj`, which become bf16 where they are loaded (the loss below was measured before that). Adapted
{stages}.
Its causal mode still writes. **It is not an assistant.**

Nats per token of held-out text (never trained on): as an autoregressive model, and the bound of canvases of each length, whose tokens are revealed
in random order.

| domain | {names} |
|---|{rules}
{losses}

## Data and licences

{sources}
Weights: Apache-2.0. Made by `scripts/reference/run`.
"""


def megabytes(folder: Path) -> float:
    return (folder / "model.safetensors").stat().st_size / 1e6


def copy(files: Iterable[Path], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        with replaced(out / file.name) as temporary:  # a program that runs may have the old one mapped
            shutil.copy(file, temporary)


def write_target(source: Path, out: Path) -> None:
    copy((source / "model").iterdir(), out)
    report = json.loads((source / "report.json").read_text())
    config = json.loads((out / "config.json").read_text())
    losses = "\n".join(f"| {name} | {loss:.3f} |" for name, loss in report["held_out_nats_per_token"].items())
    card = TARGET_CARD.format(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        vocabulary=config["vocab_size"],
        megabytes=megabytes(out),
        minutes=report["seconds"] / 60,
        tokens=report["tokens"] / 1e6,
        losses=losses,
        sources=SOURCES,
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def shorten(file: Path) -> None:
    """Store :data:`SHORT` matrices in 8 bits."""
    weights = load_tensors(file)
    for name, weight in weights.items():
        if name.endswith(SHORT):
            weights[name] = weight.to(torch.float8_e4m3fn)
    save_tensors(file, weights, {"format": "pt"})


def write_diffusion(source: Path, out: Path, threshold: float | None = None) -> None:
    copy((source / "model").iterdir(), out)
    shorten(out / "model.safetensors")
    if threshold is not None:
        config = json.loads((out / "config.json").read_text())
        config["block_diffusion"]["threshold"] = threshold
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    report = json.loads((source / "report.json").read_text())
    names = list(next(iter(report["held_out"].values())))
    stages = [
        DIFFUSION_STAGE.format(
            minutes=stage["seconds"] / 60,
            machine=stage["machine"],
            responses=stage["responses"],
            tokens=stage["tokens"] / 1e6,
            noisy=stage["noisy"] / 1e6,
            kept=f" ({stage['keep']:.0%} of the weights are those that it began with)" if stage.get("keep") else "",
        )
        for stage in report["stages"]
    ]
    rows = [" | ".join([domain, *(f"{loss:.3f}" for loss in of.values())]) for domain, of in report["held_out"].items()]
    card = DIFFUSION_CARD.format(
        megabytes=megabytes(out),
        stages="; then\n".join(stages),
        names=" | ".join(names),
        rules="---|" * len(names),
        losses="\n".join(f"| {row} |" for row in rows),
        sources=SOURCES,
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def write_drafter(source: Path, out: Path) -> None:
    copy((source / "drafter" / name for name in ("config.json", "model.safetensors")), out)
    report = json.loads((source / "training_report.json").read_text())
    config = json.loads((out / "config.json").read_text())
    with safe_open(out / "model.safetensors", "pt") as weights:
        assert "fc.weight" in weights.keys(), "a drafter has its feature projection"  # noqa: SIM118
    head = config.get("head")
    kind = "DFlash drafter in z-lab's format"
    if head:
        kind = f"DFlash drafter with a {head['type']} head of rank {head['rank']}"
    card = DRAFTER_CARD.format(
        kind=kind,
        layers=config["num_hidden_layers"],
        block=config["block_size"],
        taps=config["dflash_config"]["target_layer_ids"],
        megabytes=megabytes(out),
        rows=report["data"]["rows"],
        tokens=report["data"]["response_tokens"] / 1e6,
        steps=report["position"]["step"],
        init=" after those of the drafter it began with" if report["options"].get("init") else "",
        prompts=report["held_out"]["decoded"].get(
            "prompts", "held out from the drafter (the target was trained on them)"
        ),
        tau=report["held_out"]["decoded"]["tau"],
    )
    (out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, help="folder of the target's training")
    parser.add_argument("--drafter", type=Path, help="folder of the training of the drafter to use")
    parser.add_argument("--dflash", type=Path, help="folder of the training of the plain DFlash drafter")
    parser.add_argument("--markov", type=Path, help="folder of the training of the drafter with a Markov head")
    parser.add_argument("--diffusion", type=Path, help="folder of the training of the diffusion model")
    parser.add_argument(
        "--threshold", type=float, help="the diffusion model's own, chosen by benchmarks/diffusion_curve.py"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.diffusion is not None:
        write_diffusion(options.diffusion, options.out / "diffusion", options.threshold)
    if options.target is not None:
        write_target(options.target, options.out / "target")
    for kind in ("drafter", "dflash", "markov"):
        source = getattr(options, kind)
        if source is not None:
            write_drafter(source, options.out / ("drafter" if kind == "drafter" else f"drafter-{kind}"))
    total = sum(file.stat().st_size for file in options.out.rglob("*.safetensors"))
    if total > LIMIT_BYTES:
        raise SystemExit(
            f"the bundle has {total / 1e6:.1f} MB of weights, more than the {LIMIT_BYTES / 1e6:.0f} MB to ship"
        )
    print(f"{total / 1e6:.1f} MB of weights in {options.out}")
