"""Command ``volley inspect``: describes a checkpoint and its faults."""

from pathlib import Path
from typing import Annotated

import typer

from volley.errors import UnsupportedModelError
from volley.imports import import_transformers, quick_imports
from volley.options import expand


@expand
def inspect(
    path: Annotated[
        Path, typer.Argument(help="Folder or GGUF file of a drafter or a target, or the name of a bundled one.")
    ],
    target: Annotated[
        str | None, typer.Option(help="Check that the drafter fits this target: folder or hub name.")
    ] = None,
) -> None:
    """Describe a drafter's checkpoint, its target, and its faults. Exit code 1 if it has any.

    For a target: describe its shape, its quantisation, and whether its output is batch-invariant.
    """
    with quick_imports():
        import_transformers()
        from volley.engine.exactness import foresee_exactness
        from volley.models.diagnosis import diagnose

    found = diagnose(path, target)
    if found.of_target and not found.problems:
        try:
            found.facts["answers are exact to the bit"] = foresee_exactness(path)
        except UnsupportedModelError as error:
            found.problems.append(str(error))
    typer.echo(f"{path}: {found.title}")
    for name, fact in found.facts.items():
        typer.echo(f"  {name}: {fact}")
    for problem in found.problems:
        typer.echo(f"  wrong: {problem}")
    if found.problems:
        raise typer.Exit(1)
    typer.echo("  nothing is wrong with it" + (f"; it fits {target}" if target else ""))
