"""Command line: one module a command. A command imports its own module alone, and what is heavy when it runs."""

import os
import sys
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from volley.errors import VolleyError
from volley.options import has_unknown_variables, name_misspelt_variables

_COMMANDS = (
    "generate", "chat", "demo", "bench", "serve", "collect", "train", "pilot", "export", "inspect", "tune", "certify", "doctor",
    "presets", "reservoir",
)  # fmt: skip


class _Commands(TyperGroup):
    """Command group in which ``serve --engine vllm`` is a command of its own: most of its options are vLLM's, and some share
    our names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        if has_unknown_variables(os.environ, self):  # of this command; they may be another's
            from volley.serve.config import KEY_VARIABLE

            name_misspelt_variables(os.environ, typer.main.get_command(make_app(_COMMANDS)), KEY_VARIABLE)
        line = " ".join(rest).replace("--engine=", "--engine ")
        is_vllm = "--engine vllm" in line if "--engine" in line else os.environ.get("VOLLEY_ENGINE") == "vllm"
        return name, self.get_command(ctx, "serve-vllm") if name == "serve" and is_vllm else found, rest


@cache
def make_app(names: tuple[str, ...]) -> typer.Typer:
    """Make the command line with some commands, of which only the modules are imported."""
    app = typer.Typer(
        name="volley",
        cls=_Commands,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(help="Lossless block-diffusion speculative decoding: train drafters, measure them, decode with them.")(
        lambda: None
    )
    for name in names:
        own = getattr(import_module(f"volley.cli.{name}"), name)
        if isinstance(own, typer.Typer):
            app.add_typer(own, name=name)
        else:
            app.command()(own)
    if "serve" in names:
        from volley.vllm.command import serve_vllm

        settings = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(hidden=True, context_settings=settings)(serve_vllm)
    return app


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
