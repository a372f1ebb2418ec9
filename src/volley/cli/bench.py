"""Command ``volley bench``: measures a pair here, or a server under load."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from volley.bench.tasks import BenchConfig
from volley.cli.models import Capacity, ModelOptions, load_engine
from volley.config import DecodingConfig
from volley.errors import ConfigError
from volley.files import REFERENCE, find_target, make_folder, write_atomically
from volley.options import Without, expand, on_command_line

if TYPE_CHECKING:
    from volley.bench.measure import Record


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options for measuring a server."""

    server: str | None = None
    """Measure this OpenAI-compatible server under load instead of decoding here."""
    rates: tuple[float, ...] = ()
    """With --server: requests per second, arriving at random, instead of --concurrency at once."""
    requests: int = 64
    """With --server: requests per level of load."""
    model: str | None = None
    """With --server: model to request; by default the only one it has."""


@expand
def bench(
    config: Annotated[BenchConfig, Without("draft_tokens", "ignore_eos")],
    models: ModelOptions,
    decoding: Annotated[DecodingConfig, Without("policy", "block_size")],
    capacity: Capacity,
    load: LoadOptions,
    out: Annotated[Path, typer.Option(help="Folder for report.json and report.md.")] = Path("bench"),
) -> None:
    """Measure speculative against plain decoding, in turn, prompt by prompt. Ctrl-C keeps the results so far.

    With --server: put load on a server and measure time to the first token, time between tokens, and throughput.
    OPENAI_API_KEY holds its key.
    """
    if load.server is not None:
        if models.target is not None or models.drafter is not None:
            raise ConfigError("--server decodes by itself; leave --target and --drafter out (--model names its model)")
        _bench_server(config, load, out)
        return
    if on_command_line("model") or on_command_line("rates"):
        raise ConfigError("--model and --rates are of a server; name it with --server, or a model here with --target")
    make_folder(out)
    config.load()  # report bad prompts before loading a model, which may take minutes
    largest = max(config.block_sizes, default=1)
    if largest > 1 and (
        models.drafter or models.target is None
    ):  # blocks above the trained size are drafted if requested
        decoding = replace(decoding, block_size=largest)
    engine = load_engine(models, decoding, capacity)
    from volley.bench.report import to_tables
    from volley.bench.run import run_bench, save
    from volley.cli import console

    names = {
        "target": models.target or "bundled",
        "drafter": models.drafter or ("bundled" if models.target is None else "none"),
        **{name: str(getattr(models, name)) for name in ("weights", "draft_weights", "long_context")},
        "path": str(find_target(models.target or REFERENCE / "target")),
        **_chosen(decoding, "kv_dtype", "draft_kv_dtype"),
    }
    errors = console.stderr()

    def progress(record: "Record", done: int, total: int) -> None:
        line = f"{done}/{total} {record.dataset} T={record.temperature:g} {record.prompt}"
        errors.print(line, end="\r" if errors.is_terminal else "\n", overflow="ellipsis", no_wrap=True)

    report = run_bench(engine, config, names, progress)
    save(report, out)
    wide = console.stdout()
    wide.width = max(wide.width, 110)
    wide.print(*to_tables(report.summaries))
    end = f"{'Interrupted; what was measured is' if report.measurements.partial else 'Written'} in {out}/"
    errors.print(*report.measurements.notes, end, sep="\n")
    raise typer.Exit(report.measurements.exit_code)


def _chosen(decoding: DecodingConfig, *always: str) -> dict[str, str]:
    """Return the settings that differ from the default, and those named in ``always``."""
    usual = asdict(DecodingConfig())
    return {name: str(value) for name, value in asdict(decoding).items() if name in always or value != usual[name]}


def _bench_server(config: BenchConfig, options: LoadOptions, out: Path) -> None:
    """Measure a server at each rate, or at the given concurrency without rates."""
    from volley.bench.load import LoadConfig, run_load, to_markdown
    from volley.cli import console

    load = LoadConfig.of(
        config,
        url=options.server or "",
        model=options.model,
        api_key=os.environ.get("OPENAI_API_KEY"),
        concurrencies=() if options.rates else (config.concurrency,),
        rates=options.rates,
        requests=options.requests,
    )
    make_folder(out)
    conversations = [conversation for many in config.load().values() for conversation in many]
    errors = console.stderr()
    levels = run_load(
        load,
        conversations,
        lambda label, done: errors.print(f"{label}: {done}/{load.requests}", end="\r" if errors.is_terminal else "\n"),
    )
    report = {"config": {**asdict(load), "api_key": None}, "levels": [level.to_json() for level in levels]}
    write_atomically(out / "load.json", json.dumps(report, indent=1) + "\n")
    write_atomically(out / "load.md", to_markdown(levels))
    console.stdout().print(to_markdown(levels), soft_wrap=True)
    measured = [len(level.samples) for level in levels]
    is_partial = measured != [load.requests] * (len(load.concurrencies) + len(load.rates))
    errors.print(f"{'Interrupted; what was measured is' if is_partial else 'Written'} in {out}/")
    if is_partial:
        raise typer.Exit(130)
    if all(sample.error for level in levels for sample in level.samples):
        raise typer.Exit(1)
