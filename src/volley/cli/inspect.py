"""Command ``volley inspect``: describes a checkpoint and its faults."""

from pathlib import Path
from typing import Annotated

import typer

from volley.errors import UnsupportedModelError
from volley.imports import import_transformers, quick_imports
from volley.models.description import Diagnosis, describe_target
from volley.models.gguf.file import is_gguf
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
    found = describe_target(path) if is_gguf(path) else None
    if found is None:
        found = _examine(path, target)
    typer.echo(f"{path}: {found.title}")
    for name, fact in found.facts.items():
        typer.echo(f"  {name}: {fact}")
    for problem in found.problems:
        typer.echo(f"  wrong: {problem}")
    if found.problems:
        raise typer.Exit(1)
    typer.echo("  nothing is wrong with it" + (f"; it fits {target}" if target else ""))


def _examine(path: Path, target: str | None) -> Diagnosis:
    """Describe a checkpoint by the modules that would be made from it."""
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
    return found
