"""Command ``volley serve``: serves pairs over HTTP."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from volley.cli.models import Capacity, ModelArgument, ModelOptions, load_engine, with_target
from volley.config import DecodingConfig
from volley.options import expand
from volley.recalibrate.options import RecalibrateConfig
from volley.serve.config import ServeConfig


@expand
def serve(
    config: ServeConfig,
    models: ModelOptions,
    decoding: DecodingConfig,
    capacity: Capacity,
    recalibration: RecalibrateConfig,
    model: ModelArgument = None,
    engine: Annotated[
        Literal["volley", "vllm"],
        typer.Option(help="Server to start. vllm has its own options: volley serve --engine vllm --help."),
    ] = "volley",
) -> None:
    """Serve a pair over HTTP with OpenAI's API; /dashboard shows its state."""
    assert engine == "volley"
    models = with_target(models, model)
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
