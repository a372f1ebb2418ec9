"""Command ``volley reservoir``: inspect and erase what ``volley serve --recalibrate`` keeps."""

import time
from pathlib import Path
from typing import Annotated

import typer

from volley.options import expand

reservoir = typer.Typer(no_args_is_help=True, help="What volley serve --recalibrate keeps: show it, erase it.")
_Folder = Annotated[Path, typer.Argument(help="The folder that volley serve --recalibrate was given.")]


@reservoir.command()
@expand
def show(folder: _Folder) -> None:
    """Show how much is kept, of how many clients and since when. No text is shown."""
    from volley.recalibrate.reservoir import check_reservoir, entries

    check_reservoir(folder)
    found = entries(folder)
    held = sum(entry.held_out for entry in found)
    typer.echo(
        f"{len(found)} answers of {len({entry.client for entry in found})} clients, "
        f"{sum(entry.tokens for entry in found)} tokens; {held} answers are held out"
    )
    if not found:
        typer.echo(
            'nothing was kept yet: answers of two tokens and more are kept of requests that say "recalibrate": true, or of all '
            "requests where the server was started with --recalibrate-requests all"
        )
    else:
        typer.echo(f"the oldest is of {time.strftime('%Y-%m-%d %H:%M', time.localtime(found[0].seconds))}")


@reservoir.command()
@expand
def erase(
    folder: _Folder,
    everything: Annotated[
        bool, typer.Option("--all", help="Erase trained drafters too; the server must be stopped.")
    ] = False,
) -> None:
    """Erase every prompt and answer. A running server continues with new ones."""
    from volley.recalibrate import reservoir as kept

    count = kept.forget(folder) if everything else kept.erase(folder)
    typer.echo(f"{count} answers erased from {folder}" + (", and what was learnt from them" if everything else ""))
