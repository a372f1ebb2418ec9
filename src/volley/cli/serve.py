"""Command ``volley serve``: serves a pair over HTTP."""

from pathlib import Path
from typing import Annotated

from volley.cli.models import Capacity, ModelArgument, ModelOptions, load_engine, with_target
from volley.config import DecodingConfig
from volley.options import Without, expand
from volley.recalibrate.options import RecalibrateConfig
from volley.serve.config import ServeConfig

PACE = (
    "recalibrate_idle",
    "recalibrate_learning_rate",
    "recalibrate_nice",
    "recalibrate_steps",
    "recalibrate_tokens",
    "reservoir_tokens",
)
"""Settings for Python: how a server recalibrates."""
LIMITS = ("bare_calls", "receive_timeout", "shutdown_timeout")
"""Settings of the server for Python."""


@expand
def serve(
    config: Annotated[ServeConfig, Without(*LIMITS)],
    models: ModelOptions,
    decoding: DecodingConfig,
    capacity: Capacity,
    recalibration: Annotated[RecalibrateConfig, Without(*PACE)],
    model: ModelArgument = None,
) -> None:
    """Serve a pair over HTTP with OpenAI's API; /dashboard shows its state."""
    models = with_target(models, model)
    name = config.served_model_name or (
        "volley-reference" if models.target is None else Path(models.target).resolve().name
    )
    config.check_address()
    loaded = load_engine(models, decoding, capacity)
    from volley.serve.server import serve as run  # after load_engine, because this imports transformers too
    from volley.serve.service import Service

    service = Service(loaded, config, name)
    if recalibration.recalibrate is not None:
        from volley.recalibrate.recalibrator import attach

        attach(service, loaded, recalibration, models.target)
    run(service, config)
