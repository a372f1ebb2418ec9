"""Write the report of a tuning run in Markdown: its choices and its results."""

from collections.abc import Iterable
from statistics import fmean
from typing import Any

import torch

from volley.bench.report import machine
from volley.tune.options import TuneConfig

USE = """```
Engine.from_pretrained({target!r}, drafter={out!r})

volley serve --target {target} --drafter {out}
```"""
OVERFIT = 0.02
"""Share by which the held-out cross-entropy must rise above its minimum to count as overfitting."""
LINES = 10
"""Number of log lines that are averaged; each is about one step."""


def to_markdown(
    done: dict[str, Any], log: list[dict[str, Any]], certificate: dict[str, Any], config: TuneConfig
) -> str:
    """Return the report. ``done`` holds the outcomes of the steps, ``log`` the lines of the training's log."""
    measured, checks = done["measure"], certificate["checks"]
    exports = [(form, where) for form, where in done["export"].items() if form != "seconds"]
    parts = [
        f"# A drafter for {config.target}",
        summary(done, certificate),
        *(f"**{note}**" for note in notes(done, log, certificate)),
        USE.format(target=config.target, out=str(config.out)),
        f"## On {measured['prompts']} prompts that nothing was learnt from",
        _table(
            ("temperature", f"τ, chains of {measured['block_size']}", "speed against plain decoding"),
            _measured(measured),
        ),
        "## What was chosen",
        _table(("option", "choice"), _choices(done).items()),
        f"## Certificate: {certificate['verdict']}",
        _table(("check", "outcome", ""), ((check["name"], check["outcome"], check["detail"]) for check in checks)),
        "## Exports",
        _table(("format", "where, or why not"), exports),
        "## This run",
        _table(("", ""), _facts(done, certificate, config).items()),
    ]
    return "\n\n".join(parts) + "\n"


def summary(done: dict[str, Any], certificate: dict[str, Any]) -> str:
    """Summarise the outcome in one or two sentences."""
    speeds = [f"{row['speedup']:.2f} × at T = {row['temperature']:g}" for row in done["measure"]["rows"]]
    judged = f"{len(certificate['checks'])} checks found its output {certificate['verdict']}"
    return f"With this drafter the target decodes {' and '.join(speeds)} as fast as without, one request at a time. {judged}."


def notes(done: dict[str, Any], log: list[dict[str, Any]], certificate: dict[str, Any]) -> list[str]:
    """Return warnings and hints for the top of the report."""
    found = []
    if certificate["finding"]:
        found.append(f"The pair is {certificate['verdict']}: {certificate['finding']}.")
    if certificate["verdict"] == "undecided":
        found.append("Too little could be judged for a certificate; more prompts, or longer ones, would help.")
    if done["train"]["stopped_early"]:
        found.append("Training stopped early, because the real τ on held-out prompts fell; the best drafter was kept.")
    if is_overfit(log):
        found.append(
            "The drafter over-fits: the cross-entropy of held-out responses rose while that of those learnt from fell. More "
            "prompts would help."
        )
    if done["measure"]["rows"] and min(row["speedup"] for row in done["measure"]["rows"]) < 1:
        found.append(
            "At some temperature the pair is slower than plain decoding: volley doctor says what may be the cause."
        )
    return found


def is_overfit(log: list[dict[str, Any]]) -> bool:
    """Return True if cross-entropy rose on held-out responses, from its minimum to the end, while it fell on trained ones."""
    known = [row for row in log if "cross_entropy" in row]
    held = [(row["cross_entropy"], row["step"]) for row in known if row["kind"] == "eval"]
    train = [row for row in known if row["kind"] == "train"]
    lowest, step = min(held, default=(0.0, 0))
    before, after = (
        [row["cross_entropy"] for row in train if (row["step"] <= step) == early] for early in (True, False)
    )
    if not before or not after:
        return False
    return held[-1][0] > (1 + OVERFIT) * lowest and fmean(after[-LINES:]) < fmean(before[-LINES:])


def _choices(done: dict[str, Any]) -> dict[str, Any]:
    trained = done["train"]
    begun = trained.get("tau_at_first")
    gained = {} if begun is None else {"real τ of the bundled drafter, and after": f"{begun:.2f}, {trained['tau']:.2f}"}
    return {
        "options": trained["chosen"],
        **gained,
        "draft vocabulary": trained["draft_vocab_size"] or "all tokens",
        "draft window": trained["draft_window"] or "the whole context",
    }


def _facts(done: dict[str, Any], certificate: dict[str, Any], config: TuneConfig) -> dict[str, Any]:
    collected = done["collect"]
    seconds = {
        name: outcome["seconds"] for name, outcome in done.items() if isinstance(outcome, dict) and "seconds" in outcome
    }
    return {
        "responses": f"{collected['rows']} to {collected['prompts']} prompts, {collected['held_out_prompts']} held out",
        "training": f"{done['train']['steps']} steps, {done['train']['epochs']} epochs",
        "minutes given": f"{config.max_minutes:g}",
        "seconds": ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()),
        **machine(torch.get_num_threads()),
        "volley": certificate["volley"],
        "certified": f"{certificate['date']}, digest {certificate['sha256'][:16]}",
    }


def _measured(measured: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(f"{r['temperature']:g}", f"{r['tau']:.2f}", f"{r['speedup']:.2f} ×") for r in measured["rows"]]


def _table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    cells = [list(columns), *([str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]])
