"""Summary of benchmark records per dataset, temperature and case, as table, Markdown and JSON."""

import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from volley.bench.measure import Measurements, Record
from volley.bench.tasks import PLAIN, BenchConfig, Case

if TYPE_CHECKING:
    from rich.table import Table

ALL = "all"


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        values = sorted(values)
        if len(values) < 2:
            only = values[0] if values else 0.0
            return cls(only, only, only)
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


@dataclass(frozen=True)
class Summary:
    """Results of one case on one dataset at one temperature. Speeds exclude the first token and its time."""

    dataset: str
    temperature: float
    case: Case
    runs: int
    tokens_per_second: Spread
    """Spread over the repeats. A repeat's speed is its total tokens per total time."""
    end_to_end_tokens_per_second: float
    speedup: float
    """Ratio of plain decoding's time per token to this case's, over all prompts and repeats."""
    speedup_per_prompt: Spread
    """Spread of the ratio over single runs, each against the plain run of its prompt in the same repeat."""
    acceptance_length: float
    """τ: tokens per verified block, bonus token included."""
    draft_ms: float
    """Time per cycle, like ``verify_ms`` and ``cycle_ms``. ``cycle_ms`` is wall time and includes all other work."""
    verify_ms: float
    cycle_ms: float
    first_token_ms: Spread
    identical: float | None
    """Share of tokens equal to plain decoding's, at temperature 0."""
    walk_ms: float = 0.0
    """Part of ``draft_ms`` that a sequential head takes."""
    differing: int = 0
    """Number of runs whose answer differs from plain decoding's."""
    ties: int = 0
    """Number of differing runs that part at two logits equal to within rounding."""
    accuracy: float | None = None
    """Share of judged answers that are right."""
    accepted_share: float | None = None
    """Share of drafted tokens that were accepted; of a tree all nodes count as drafted."""
    acceptance_by_position: list[float] = field(default_factory=list)
    """Share of cycles with a full block or tree that accepted at least k draft tokens, k = 1 … B − 1."""
    histogram: dict[int, int] = field(default_factory=dict)
    """Cycles by accepted length."""

    @property
    def efficiency(self) -> float:
        """Return the share of τ that becomes speed: speedup ÷ τ. It is 1 if drafting and verification are free."""
        return self.speedup / self.acceptance_length if self.acceptance_length else 0.0

    def to_json(self) -> dict[str, Any]:
        facts = {**asdict(self), "case": self.case.to_json()}
        return {**facts, "efficiency": self.efficiency, "label": self.case.label}


def summarise(records: list[Record]) -> list[Summary]:
    """Return summaries in the order of the records. With several datasets, totals come last."""
    datasets = list(dict.fromkeys(record.dataset for record in records))
    summaries = []
    for dataset in datasets + [ALL] * (len(datasets) > 1):
        chosen = [record for record in records if dataset in (ALL, record.dataset)]
        for temperature in dict.fromkeys(record.temperature for record in chosen):
            alike = [record for record in chosen if record.temperature == temperature]
            plain = {_place(record): record for record in alike if record.case == PLAIN}
            for case in dict.fromkeys(record.case for record in alike):
                runs = [record for record in alike if record.case == case]
                summaries.append(_summarise(dataset, temperature, case, runs, plain))
    return summaries


def _place(record: Record) -> tuple[str, str, int]:
    return record.dataset, record.prompt, record.repeat


def _rate(records: Iterable[Record]) -> float:
    """Return the tokens per second after the first token."""
    records = list(records)
    seconds = sum(record.decode_seconds for record in records)
    return sum(record.decode_tokens for record in records) / seconds if seconds > 0 else 0.0


def _summarise(
    dataset: str, temperature: float, case: Case, runs: list[Record], plain: dict[tuple[str, str, int], Record]
) -> Summary:
    beside = [plain[_place(record)] for record in runs]
    ratios = [
        _rate([run]) / _rate([other])
        for run, other in zip(runs, beside, strict=True)
        if run.decode_tokens > 0 and _rate([other]) > 0
    ]
    lengths = [n for record in runs for n in record.accepted_lengths]
    drafted = sum(size - 1 for record in runs for size in record.block_sizes)
    cycles = sum(record.cycles for record in runs)
    scored = sum(record.scored for record in runs)
    identical = [record.identical for record in runs if record.identical is not None]
    per_cycle: Callable[[float], float] = lambda seconds: 1000 * seconds / cycles if cycles else 0.0  # noqa: E731
    return Summary(
        dataset=dataset,
        temperature=temperature,
        case=case,
        runs=len(runs),
        tokens_per_second=Spread.of(
            _rate(record for record in runs if record.repeat == repeat) for repeat in {record.repeat for record in runs}
        ),
        end_to_end_tokens_per_second=sum(r.output_tokens for r in runs) / sum(r.seconds for r in runs),
        speedup=_rate(runs) / _rate(beside) if _rate(beside) else 0.0,
        speedup_per_prompt=Spread.of(ratios),
        acceptance_length=sum(lengths) / len(lengths) if lengths else 1.0,
        draft_ms=per_cycle(sum(record.draft_seconds for record in runs)),
        walk_ms=per_cycle(sum(record.walk_seconds for record in runs)),
        verify_ms=per_cycle(sum(record.verify_seconds for record in runs)),
        cycle_ms=per_cycle(sum(record.decode_seconds for record in runs)),
        first_token_ms=Spread.of(1000 * record.first_token_seconds for record in runs),
        identical=sum(identical) / len(identical) if identical else None,
        differing=sum(record.differing for record in runs),
        ties=sum(record.ties for record in runs),
        accuracy=sum(r.right for r in runs) / scored if scored else None,
        accepted_share=sum(length - 1 for length in lengths) / drafted if drafted else None,
        acceptance_by_position=_acceptance_by_position(runs),
        histogram={n: lengths.count(n) for n in sorted(set(lengths))},
    )


def _acceptance_by_position(runs: list[Record]) -> list[float]:
    cycles = [pair for r in runs for pair in zip(r.accepted_lengths, r.block_sizes, strict=False)]
    full = max((size for _, size in cycles), default=1)  # blocks are shorter near the end of an answer
    accepted = [length for length, size in cycles if size == full]
    decoding = runs[0].case.decoding
    depth = min(full, decoding.block_size) if decoding.tree_nodes and decoding.block_size else full
    return [sum(length > position for length in accepted) / len(accepted) for position in range(1, depth)]


def _identical(summary: Summary) -> str:
    share = f"{100 * (summary.identical or 0):.2f} %"
    return share + (f" ({summary.ties} of {summary.differing} part at a tie)" if summary.differing else "")


def _draft_time(summary: Summary) -> str:
    return f"{summary.draft_ms:.2f}" + (f" (head {summary.walk_ms:.2f})" if summary.walk_ms else "")


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "dataset": lambda s: s.dataset,
    "T": lambda s: f"{s.temperature:g}",
    "decoding": lambda s: s.case.label,
    "tokens/s": lambda s: f"{s.tokens_per_second.median:.1f}",
    "speedup": lambda s: f"{s.speedup:.2f}",
    "per prompt (quartiles)": lambda s: str(s.speedup_per_prompt),
    "τ": lambda s: f"{s.acceptance_length:.2f}",
    "efficiency": lambda s: f"{s.efficiency:.2f}" if s.case.name == "volley" else "",
    "T_draft ms": lambda s: _draft_time(s) if s.case.name == "volley" else "",
    "T_verify ms": lambda s: f"{s.verify_ms:.2f}" if s.case.name == "volley" else "",
    "cycle ms": lambda s: f"{s.cycle_ms:.2f}" if s.cycle_ms else "",
    "TTFT ms": lambda s: f"{s.first_token_ms.median:.1f}",
    "accuracy": lambda s: "" if s.accuracy is None else f"{100 * s.accuracy:.1f} %",
    "identical": lambda s: "" if s.identical is None or s.case == PLAIN else _identical(s),
}
PLACE = ("dataset", "T", "decoding")
TIMES = ("T_draft ms", "T_verify ms", "cycle ms", "TTFT ms")


def to_markdown(summaries: list[Summary]) -> str:
    shown = _shown(summaries)
    lines = ["| " + " | ".join(shown) + " |", "|" + "---|" * len(shown)]
    lines += ["| " + " | ".join(COLUMNS[name](summary) for name in shown) + " |" for summary in summaries]
    return "\n".join(lines) + "\n"


def to_tables(summaries: list[Summary]) -> "list[Table]":
    """Return tables for a terminal: speeds, then times, so that neither is too wide."""
    return [
        _table(summaries, [name for name in _shown(summaries) if name not in TIMES]),
        _table(summaries, [*PLACE, *TIMES]),
    ]


def _shown(summaries: list[Summary]) -> list[str]:
    """Return the columns, without accuracy if no answer was judged."""
    return [name for name in COLUMNS if name != "accuracy" or any(s.accuracy is not None for s in summaries)]


def _table(summaries: list[Summary], columns: list[str]) -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in ("dataset", "decoding") else "right", no_wrap=True)
    for before, summary in zip([None, *summaries], summaries, strict=False):
        if before is not None and (before.dataset, before.temperature) != (summary.dataset, summary.temperature):
            table.add_section()
        table.add_row(*(COLUMNS[name](summary) for name in columns))
    return table


def machine(threads: int) -> dict[str, Any]:
    """Return a description of the machine."""
    return {
        "cpu": _cpu_model(),
        "logical_cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers")},
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Report:
    """Results of a benchmark, complete or interrupted."""

    config: BenchConfig
    measurements: Measurements
    machine: dict[str, Any]
    models: dict[str, str]
    """Names of target and drafter, data type and device."""

    @property
    def summaries(self) -> list[Summary]:
        return summarise(self.measurements.records)

    def to_json(self) -> dict[str, Any]:
        measured = self.measurements
        return {
            "partial": measured.partial,
            "machine": self.machine,
            "models": self.models,
            "config": asdict(self.config),
            "notes": measured.notes,
            "peak_memory_bytes": measured.peak_memory_bytes,
            "summaries": [summary.to_json() for summary in self.summaries],
            "records": [{**asdict(record), "case": record.case.to_json()} for record in measured.records],
        }
