"""Benchmark report as one self-contained HTML file with plots as embedded PNGs."""

import base64
import html
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from volley.bench.report import COLUMNS, Report, Summary
from volley.bench.tasks import PLAIN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:nth-child(1), td:nth-child(1), th:nth-child(3), td:nth-child(3) { text-align: left; }
dl { display: grid; grid-template-columns: max-content auto; gap: .1rem 1rem; } dd { margin: 0; }
img { max-width: 100%; background: white; border-radius: .4rem; }
.warning { background: #fc03; padding: .6rem 1rem; border-radius: .4rem; }
"""
EXPLANATION = """Speeds count tokens and time after the first token. Speedup is against plain decoding in the same
process, prompt by prompt in turn. τ is tokens gained per verified block, bonus token included. Efficiency is
speedup ÷ τ: 1 would be free drafting and verification. “identical” is the share of tokens equal to plain
decoding's at T = 0."""


def page(title: str, parts: Iterable[str]) -> str:
    """Return an HTML document."""
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return "\n".join(["<!doctype html>", f'<html lang="en">{head}', *parts, "</html>\n"])


def to_html(report: Report) -> str:
    summaries = report.summaries
    parts = ["<h1>volley bench</h1>"]
    if report.measurements.partial:
        parts.append("<p class=warning>Interrupted: this is what had been measured by then.</p>")
    parts.append(facts_list({**report.models, **report.machine, **_settings(report)}))
    parts.append(f"<p>{EXPLANATION}</p>{_table(summaries)}")
    parts += [f"<p class=warning>{html.escape(note)}</p>" for note in report.measurements.notes]
    drafted = [summary for summary in summaries if summary.case.name == "volley"]
    if drafted:
        parts.append(f"<h2>Speed and acceptance length</h2>{image(_speed_plot(summaries))}")
        parts.append(f"<h2>Acceptance by position</h2>{image(_acceptance_plot(drafted))}")
        parts.append(f"<h2>Accepted lengths</h2>{image(_histogram_plot(drafted))}")
        parts.append(f"<h2>Where a cycle's time goes</h2>{image(_time_plot(summaries))}")
    return page("volley bench", parts)


def _settings(report: Report) -> dict[str, Any]:
    config = report.config
    return {
        "prompts per dataset": config.num_prompts,
        "prompts left out at the start": config.skip_prompts,
        "tokens per answer": f"at most {config.max_tokens}",
        "repeats": config.repeats,
        "prompts at once": config.concurrency,
        "peak memory": f"{report.measurements.peak_memory_bytes / 2**20:.0f} MiB (whole process)",
    }


def facts_list(facts: dict[str, Any]) -> str:
    items = "".join(f"<dt>{html.escape(str(k))}</dt><dd>{html.escape(str(v))}</dd>" for k, v in facts.items())
    return f"<dl>{items}</dl>"


def _table(summaries: list[Summary]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell(summary))}</td>" for cell in COLUMNS.values()) + "</tr>"
        for summary in summaries
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def image(figure: "Figure") -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def _panels(summaries: list[Summary]) -> tuple["Figure", list[tuple[Any, list[Summary]]]]:
    """Return a figure with one panel per dataset and temperature."""
    from matplotlib.figure import Figure

    places = list(dict.fromkeys((summary.dataset, summary.temperature) for summary in summaries))
    columns = min(3, len(places))
    rows = -(-len(places) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    panels = []
    for axes, place in zip(grid, places, strict=False):
        axes.set_title(f"{place[0]}, T = {place[1]:g}", fontsize=10)
        axes.grid(alpha=0.3)
        panels.append((axes, [s for s in summaries if (s.dataset, s.temperature) == place]))
    for axes in grid[len(places) :]:
        axes.set_visible(False)
    return figure, panels


def _speed_plot(summaries: list[Summary]) -> "Figure":
    figure, panels = _panels(summaries)
    for axes, group in panels:
        labels = [s.case.label for s in group]
        axes.bar(labels, [s.speedup for s in group], color=["#888" if s.case == PLAIN else "#2a7" for s in group])
        drafted = [s for s in group if s.case.name == "volley"]
        axes.plot([s.case.label for s in drafted], [s.acceptance_length for s in drafted], "o", color="#c40", label="τ")
        axes.axhline(1, color="#888", linewidth=0.8)
        axes.set_ylabel("speedup (bars), τ (dots)")
        axes.tick_params(axis="x", rotation=35, labelsize=8)
    return figure


def _acceptance_plot(summaries: list[Summary]) -> "Figure":
    figure, panels = _panels(summaries)
    for axes, group in panels:
        for s in group:
            axes.plot(
                range(1, len(s.acceptance_by_position) + 1), s.acceptance_by_position, "o-", ms=3, label=s.case.label
            )
        axes.set(xlabel="draft position k", ylabel="share of cycles accepting ≥ k", ylim=(0, 1))
        axes.legend(fontsize=8)
    return figure


def _histogram_plot(summaries: list[Summary]) -> "Figure":
    figure, panels = _panels(summaries)
    for axes, group in panels:
        width = 0.8 / len(group)
        for number, s in enumerate(group):
            total = sum(s.histogram.values()) or 1
            places = [length + (number - (len(group) - 1) / 2) * width for length in s.histogram]
            axes.bar(places, [count / total for count in s.histogram.values()], width, label=s.case.label)
        longest = max((length for s in group for length in s.histogram), default=1)
        axes.set(xlabel="tokens gained in a cycle", ylabel="share of cycles", xticks=range(1, longest + 1))
        axes.legend(fontsize=8)
    return figure


def _time_plot(summaries: list[Summary]) -> "Figure":
    own = [s for s in summaries if s.case.name in ("plain", "volley")]
    figure, panels = _panels(own)
    for axes, group in panels:
        labels = [s.case.label for s in group]
        # Plain decoding drafts nothing: its whole cycle is the target's pass.
        draft = [s.draft_ms for s in group]
        verify = [min(s.verify_ms, s.cycle_ms) for s in group]
        rest = [max(0.0, s.cycle_ms - d - v) for s, d, v in zip(group, draft, verify, strict=True)]
        axes.bar(labels, draft, color="#e90", label="draft")
        axes.bar(labels, verify, bottom=draft, color="#27a", label="verify")
        axes.bar(labels, rest, bottom=[d + v for d, v in zip(draft, verify, strict=True)], color="#aaa", label="rest")
        axes.set_ylabel("ms per cycle")
        axes.tick_params(axis="x", rotation=35, labelsize=8)
        axes.legend(fontsize=8)
    return figure
