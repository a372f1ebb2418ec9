"""Command ``volley presets``: shows the initial settings of a training."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from volley.options import expand


@expand
def presets(
    target: Annotated[
        str | None, typer.Option(help="Derive the settings from this target's config: folder or hub name.")
    ] = None,
) -> None:
    """Show the initial settings of volley train and tune for each family of models, for some targets by name, or for one
    target."""
    from volley.train.presets import FAMILIES, PAPER, TARGETS, preset_named, read_preset

    if target is not None:
        typer.echo(json.dumps(asdict(read_preset(target)), indent=1))
        return
    for family in FAMILIES:
        note = f"; {family.note}" if family.note else ""
        typer.echo(f"{family.name:<10} blocks up to {family.block_size}, up to {family.layers} draft layers{note}")
    for name in TARGETS:
        own = preset_named(name)
        shape = f"{own.num_layers} draft layers, blocks of {own.block_size}, taps {','.join(map(str, own.taps))}"
        typer.echo(f"{name:<18} {shape}, {own.optimizer} at {own.learning_rate:g}")
    typer.echo(
        f"{PAPER:<18} the paper's recipe for any target: 512 anchors, rows of 3072 tokens, adamw at 0.0006, 6 epochs"
    )
    typer.echo("With --target: taps, widths and learning rate from its config. volley tune starts there and measures.")
