"""Command ``volley collect``: writes a target's responses for training."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from volley.cli.models import Capacity, ModelOptions, load_engine
from volley.errors import ConfigError
from volley.options import expand, on_command_line
from volley.train.collect import CollectConfig

if TYPE_CHECKING:
    from volley.train.collect import Source


@expand
def collect(
    config: CollectConfig,
    models: ModelOptions,
    capacity: Capacity,
    endpoint: Annotated[
        str | None, typer.Option(help="OpenAI-compatible endpoint (http://host:8000/v1) instead of the engine.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to request from the endpoint; by default its only one.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight at the endpoint.")] = 16,
    raw: Annotated[
        bool, typer.Option("--raw", help="With --endpoint: send prompts as they are to /completions (a base model).")
    ] = False,
) -> None:
    """Collect the target's own responses to prompts as training data for volley train. Run again to resume.

    OPENAI_API_KEY holds an endpoint's key.
    """
    from volley.cli import console
    from volley.train.collect import EngineSource, make_jobs
    from volley.train.collect import collect as run

    source: Source
    if endpoint:
        if models.target is not None or models.drafter is not None:
            raise ConfigError(
                "--endpoint answers by itself; leave --target and --drafter out (--model names its model)"
            )
        from volley.train.endpoint import EndpointSource

        key = os.environ.get("OPENAI_API_KEY")
        source = EndpointSource(endpoint, model, key, config.thinking, concurrency, raw=raw)
    else:
        if on_command_line("model") or on_command_line("raw"):
            raise ConfigError("--model and --raw are of an endpoint; give --endpoint, or a model here as --target")
        make_jobs(config)  # what is wrong with prompts is said before a model is loaded
        engine = load_engine(models, None, capacity)
        engine.procedures.write_causally()
        source = EngineSource(
            engine, models.target or "bundled", config.thinking, most_tokens=engine.snapshot().max_tokens
        )
    errors = console.stderr()
    end = run(config, source, console.progress(errors))
    errors.print(end.describe())
    for refusal in source.refusals:
        errors.print(refusal)
    errors.print(f"Written to {config.out}" + (f"; {end.failed} prompts could not be answered" if end.failed else ""))
    if end.failed and not end.finished + end.skipped:
        raise typer.Exit(1)
