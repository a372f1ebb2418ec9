"""The report of a tuning as one HTML file: what was chosen and why, how training went, what came out."""

import html
from typing import TYPE_CHECKING, Any

from volley.bench.html import STYLE, facts_list, image
from volley.tune.options import TuneConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OVERFIT = 0.02
"""How much the held-out loss must rise above its lowest, as a share, to be called over-fitting."""


def to_html(done: dict[str, Any], log: list[dict[str, Any]], certificate: dict[str, Any], config: TuneConfig) -> str:
    """``done`` are the outcomes of the steps, ``log`` the lines of the training's log."""
    parts = [f"<h1>volley tune</h1><style>{STYLE}</style>", facts_list(_facts(done, certificate, config))]
    parts += [f"<p class=warning>{html.escape(note)}</p>" for note in notes(done, log, certificate)]
    parts.append(f"<h2>What came out</h2>{_measured(done['measure'])}{image(_acceptance(done['measure']))}")
    if any(row["kind"] == "eval" for row in log):
        parts.append(f"<h2>Training</h2>{image(_curves(log))}")
    parts.append(f"<h2>Trials</h2><p>{html.escape(done['choose']['why'])}</p>{_trials(done.get('trials', []))}")
    rows = [[check["name"], check["outcome"], check["detail"]] for check in certificate["checks"]]
    parts.append(f"<h2>Certificate: {html.escape(certificate['verdict'])}</h2>{_table(['check', '', 'outcome'], rows)}")
    exports = [[form, where] for form, where in done["export"].items() if form != "seconds"]
    parts.append(f"<h2>Exports</h2>{_table(['format', 'where, or why not'], exports)}")
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>volley tune</title>\n{body}\n</html>\n'


def notes(done: dict[str, Any], log: list[dict[str, Any]], certificate: dict[str, Any]) -> list[str]:
    """What the reader should know before anything else."""
    found = []
    if certificate["finding"]:
        found.append(f"The pair is not lossless: {certificate['finding']}.")
    if certificate["verdict"] == "lossless" and done["train"]["stopped_early"]:
        found.append("Training stopped early, because the real τ on held-out prompts fell; the best drafter was kept.")
    if is_overfit(log):
        found.append(
            "The drafter over-fits: its held-out loss rose while the training loss fell. More prompts would help."
        )
    if done["measure"]["rows"] and min(row["speedup"] for row in done["measure"]["rows"]) < 1:
        found.append(
            "At some temperature the pair is slower than plain decoding: volley doctor says what may be the cause."
        )
    return found


def is_overfit(log: list[dict[str, Any]]) -> bool:
    losses = [row["loss"] for row in log if row["kind"] == "eval" and "loss" in row]
    train = [row["loss"] for row in log if row["kind"] == "train"]
    return len(losses) > 1 and losses[-1] > (1 + OVERFIT) * min(losses) and bool(train) and train[-1] < losses[-1]


def _facts(done: dict[str, Any], certificate: dict[str, Any], config: TuneConfig) -> dict[str, Any]:
    chosen, collected = done["choose"]["options"], done["collect"]
    seconds = {
        name: outcome["seconds"] for name, outcome in done.items() if isinstance(outcome, dict) and "seconds" in outcome
    }
    return {
        "target": config.target,
        "responses": f"{collected['rows']} to {collected['prompts']} prompts, {collected['held_out_prompts']} held out",
        "chosen": ", ".join(f"{name} {value}" for name, value in chosen.items()) or "the preset",
        "draft vocabulary": done["choose"]["drafted"],
        "draft window": done["train"]["draft_window"] or "the whole context",
        "training": f"{done['train']['steps']} steps, {done['train']['epochs']} epochs",
        "seconds": ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()),
        "certificate": certificate["sha256"][:16],
    }


def _measured(measured: dict[str, Any]) -> str:
    rows = [[f"{r['temperature']:g}", f"{r['tau']:.2f}", f"{r['speedup']:.2f} ×"] for r in measured["rows"]]
    columns = ["temperature", f"τ, chains of {measured['block_size']}", "speed against plain decoding"]
    return f"<p>On {measured['prompts']} prompts that nothing was learnt from.</p>{_table(columns, rows)}"


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
        rows = [row for row in log if row["kind"] == kind and "loss" in row]
        losses.plot([row["step"] for row in rows], [row["loss"] for row in rows], "o-", ms=3, label=label)
    rows = [row for row in log if "decoded" in row]
    taus.plot(
        [row["step"] for row in rows], [row["decoded"]["tau"] for row in rows], "o-", color="#c40", label="real τ"
    )
    for axes, name in ((losses, "loss"), (taus, "τ on held-out prompts")):
        axes.set(xlabel="step", ylabel=name)
        axes.legend()
    return figure
