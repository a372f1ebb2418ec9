"""Command line: one module a command. Heavy imports happen inside the commands, so ``--help`` is instant."""

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from volley.cli import (
    bench,
    certify,
    chat,
    collect,
    demo,
    doctor,
    export,
    generate,
    inspect,
    pilot,
    presets,
    reservoir,
    serve,
    train,
    tune,
)
from volley.errors import VolleyError
from volley.options import name_misspelt_variables
from volley.serve.config import KEY_VARIABLE
from volley.vllm.command import serve_vllm


class _Commands(TyperGroup):
    """Command group in which ``serve --engine vllm`` is a command of its own: most of its options are vLLM's, and some share
    our names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        name_misspelt_variables(os.environ, self, KEY_VARIABLE)
        line = " ".join(rest).replace("--engine=", "--engine ")
        is_vllm = "--engine vllm" in line if "--engine" in line else os.environ.get("VOLLEY_ENGINE") == "vllm"
        return name, self.get_command(ctx, "serve-vllm") if name == "serve" and is_vllm else found, rest


app = typer.Typer(
    name="volley",
    cls=_Commands,
    help="Lossless block-diffusion speculative decoding: train drafters, measure them, decode with them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command()(generate.generate)
app.command()(chat.chat)
app.command()(demo.demo)
app.command()(bench.bench)
app.command()(serve.serve)
app.command()(collect.collect)
app.command()(train.train)
app.command()(pilot.pilot)
app.command()(export.export)
app.command()(inspect.inspect)
app.command()(tune.tune)
app.command()(certify.certify)
app.command()(doctor.doctor)
app.command()(presets.presets)
app.add_typer(reservoir.reservoir, name="reservoir")
app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve_vllm)


def main() -> None:
    """Run the command line, and print an error of volley's as one line without a traceback."""
    try:
        app()
    except VolleyError as error:
        typer.secho(f"volley: {error}", fg="red", err=True)
        sys.exit(2)
