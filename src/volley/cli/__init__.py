"""Command line: one module a command. A command imports its own module alone, and what is heavy when it runs."""

import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

from volley.errors import VolleyError

_COMMANDS = (
    "generate", "chat", "demo", "bench", "serve", "collect", "train", "pilot", "export", "inspect", "tune", "certify", "doctor",
    "presets", "reservoir",
)  # fmt: skip


@cache
def make_app(names: tuple[str, ...]) -> typer.Typer:
    """Make the command line with some commands, of which only the modules are imported."""
    app = typer.Typer(
        name="volley",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help="Lossless block-diffusion speculative decoding: train drafters, measure them, decode with them.")(
        _global
    )
    for name in names:
        own = getattr(import_module(f"volley.cli.{name}"), name)
        if isinstance(own, typer.Typer):
            app.add_typer(own, name=name)
        else:
            app.command()(own)
    return app


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from volley import __version__

        typer.echo(__version__)
        raise typer.Exit


def _global(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


def __getattr__(name: str) -> Any:
    if name == "app":
        return make_app(_COMMANDS)
    raise AttributeError(name)


def main() -> None:
    """Run the command line, and print an error of volley's as one line without a traceback."""
    asked = tuple(name for name in sys.argv[1:2] if name in _COMMANDS)
    try:
        make_app(asked or _COMMANDS)()
    except VolleyError as error:
        typer.secho(f"volley: {error}", fg="red", err=True)
        sys.exit(2)
