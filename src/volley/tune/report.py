"""The report of a tuning as one HTML file: what was chosen and why, how training went, what came out."""

import html
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from volley.bench.html import facts_list, image, page
from volley.bench.report import machine
from volley.tune.options import TuneConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

USE = """Engine.from_pretrained({target!r}, drafter={out!r})

volley serve --target {target} --drafter {out}"""
TAU = "τ counts the tokens that a cycle of drafting and checking brings, the target's own included."
CURVES = """Cross-entropy of the responses that were learnt from and of those held out, and the τ of decoding held-out prompts.
The drafter of the best τ was kept."""
TRIALS = """Short trainings, each with one change of the best before it. Their τ is that of held-out responses read with the
right tokens before every block; tokens per second are expected from it and from the measured seconds of a cycle."""
OVERFIT = 0.02
"""How much the held-out cross-entropy must rise above its lowest, as a share, to be called over-fitting."""
LINES = 10
"""Lines of the training's log that are averaged. Each has the blocks of one step."""


def to_html(done: dict[str, Any], log: list[dict[str, Any]], certificate: dict[str, Any], config: TuneConfig) -> str:
    """``done`` are the outcomes of the steps, ``log`` the lines of the training's log."""
    parts = [f"<h1>A drafter for {html.escape(config.target)}</h1>"]
    parts.append(f"<p>{html.escape(summary(done, certificate))}</p>")
    parts += [f"<p class=warning>{html.escape(note)}</p>" for note in notes(done, log, certificate)]
    parts.append(f"<pre>{html.escape(USE.format(target=config.target, out=str(config.out)))}</pre>")
    parts.append(f"<h2>What came out</h2>{_measured(done['measure'])}{image(_acceptance(done['measure']))}")
    if any(row["kind"] == "eval" for row in log):
        parts.append(f"<h2>Training</h2><p>{CURVES}</p>{image(_curves(log))}")
    parts.append(f"<h2>What was chosen, and why</h2>{facts_list(_choices(done))}")
    parts.append(f"<h2>Trials</h2><p>{TRIALS}</p>{_trials(done.get('trials', []))}")
    rows = [[check["name"], check["outcome"], check["detail"]] for check in certificate["checks"]]
    parts.append(f"<h2>Certificate: {html.escape(certificate['verdict'])}</h2>{_table(['check', '', 'outcome'], rows)}")
    exports = [[form, where] for form, where in done["export"].items() if form != "seconds"]
    parts.append(f"<h2>Exports</h2>{_table(['format', 'where, or why not'], exports)}")
    parts.append(f"<h2>This run</h2>{facts_list(_facts(done, certificate, config))}")
    return page("volley tune", parts)


def summary(done: dict[str, Any], certificate: dict[str, Any]) -> str:
    """The outcome in a sentence or two."""
    speeds = [f"{row['speedup']:.2f} × at T = {row['temperature']:g}" for row in done["measure"]["rows"]]
    judged = f"{len(certificate['checks'])} checks found its output {certificate['verdict']}"
    return f"With this drafter the target decodes {' and '.join(speeds)} as fast as without, one request at a time. {judged}."


def notes(done: dict[str, Any], log: list[dict[str, Any]], certificate: dict[str, Any]) -> list[str]:
    """Return what the reader should know first."""
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
    """Return whether cross-entropy rose on held-out responses, from its lowest to the end, while it fell on trained ones."""
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
    chosen = done["choose"]
    return {
        "options": f"{chosen['chosen']} ({chosen['why']})",
        "block size": chosen["blocks"],
        "draft vocabulary": chosen["drafted"],
        "draft window": done["train"]["draft_window"] or "the whole context",
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


def _measured(measured: dict[str, Any]) -> str:
    rows = [[f"{r['temperature']:g}", f"{r['tau']:.2f}", f"{r['speedup']:.2f} ×"] for r in measured["rows"]]
    columns = ["temperature", f"τ, chains of {measured['block_size']}", "speed against plain decoding"]
    return f"<p>On {measured['prompts']} prompts that nothing was learnt from. {TAU}</p>{_table(columns, rows)}"


def _trials(trials: list[dict[str, Any]]) -> str:
    rows = [
        [t["name"], f"{t['tau']:.3f}", f"{1000 * t['cycle_seconds']:.2f} ms", f"{t['score']:.0f}", t["steps"]]
        for t in trials
    ]
    return _table(["trial", "τ (teacher-forced)", "cycle", "expected tokens/s", "steps"], rows)


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _axes(count: int) -> tuple["Figure", list["Axes"]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * count, 3.4))
    return figure, [figure.add_subplot(1, count, place) for place in range(1, count + 1)]


def _acceptance(measured: dict[str, Any]) -> "Figure":
    figure, (axes,) = _axes(1)
    for row in measured["rows"]:
        axes.plot(range(1, len(row["acceptance"]) + 1), row["acceptance"], "o-", label=f"T = {row['temperature']:g}")
    axes.set(xlabel="draft position k", ylabel="share of cycles accepting ≥ k", ylim=(0, 1))
    axes.legend()
    return figure


def _curves(log: list[dict[str, Any]]) -> "Figure":
    figure, (losses, taus) = _axes(2)
    for kind, label in (("train", "training"), ("eval", "held out")):
        rows = [row for row in log if row["kind"] == kind and "cross_entropy" in row]
        losses.plot([row["step"] for row in rows], [row["cross_entropy"] for row in rows], "o-", ms=3, label=label)
    rows = [row for row in log if "decoded" in row]
    taus.plot(
        [row["step"] for row in rows], [row["decoded"]["tau"] for row in rows], "o-", color="#c40", label="real τ"
    )
    for axes, name in ((losses, "cross-entropy"), (taus, "τ on held-out prompts")):
        axes.set(xlabel="step", ylabel=name)
        axes.legend()
    return figure
