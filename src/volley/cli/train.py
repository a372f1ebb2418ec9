"""Command ``volley train``: trains a drafter."""

import typer

from volley.options import expand
from volley.train.options import TrainConfig


@expand
def train(config: TrainConfig) -> None:
    """Train a drafter for a target on its own responses. Run again to resume, with torchrun for several processes."""
    from volley.train.loop import train as run

    typer.echo(f"written to {run(config)}", err=True)
