"""Command ``volley train``: trains a drafter."""

from typing import Annotated

import typer

from volley.options import Without, expand
from volley.train.options import TrainConfig

INTERNAL = (
    "eval_max_tokens",
    "eval_prompts",
    "eval_share",
    "eval_steps",
    "gamma",
    "intermediate_size",
    "keep_best",
    "log_steps",
    "patience",
    "rows_per_pass",
    "save_minutes",
    "save_steps",
    "window",
)
"""Settings for Python: presets, ``volley tune`` and tests choose them."""


@expand
def train(config: Annotated[TrainConfig, Without(*INTERNAL)]) -> None:
    """Train a drafter for a target on its own responses. Run again to resume, with torchrun for several processes."""
    from volley.train.loop import train as run

    typer.echo(f"written to {run(config)}", err=True)
