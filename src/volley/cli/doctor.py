"""Command ``volley doctor``: explains low acceptance."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from volley.errors import ConfigError
from volley.options import expand


@expand
def doctor(
    target: Annotated[str, typer.Option(help="Target: folder or hub name.")],
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter: its folder, or that of the run that trained it.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Responses of volley collect to prompts like those served; may be repeated."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Temperature of the served requests.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Block size in service, anchor included.")] = None,
    vllm: Annotated[
        bool,
        typer.Option("--vllm", help="Say instead what drafts in `vllm serve TARGET` in this environment, or why not."),
    ] = False,
) -> None:
    """Explain low acceptance: list what is wrong with a pair, likeliest first, with the remedies; nothing for a healthy pair.

    Exit code 1 if something is found.
    """
    if vllm:
        _explain_vllm(target, drafter)
        return
    if drafter is None or not data:
        raise ConfigError("the doctor examines a drafter on answers; give --drafter and --data, or --vllm")
    from volley.doctor.diagnosis import Doctor
    from volley.engine.engine import Engine

    physician = Doctor(
        target, drafter, data, temperature=temperature, block_size=block_size, say=partial(typer.echo, err=True)
    )
    engine = Engine.from_pretrained(target, drafter=drafter, dtype=physician.target.dtype)
    engine.procedures.write_causally()
    found = physician.examine(engine)
    measured = "" if found.measured is None else f", {found.measured:.2f} measured"
    typer.echo(f"τ {found.expected:.2f} expected from {len(physician.documents)} answers{measured}")
    for finding in found.findings:
        typer.echo(f"{finding.name}: {finding.evidence}\n  remedy: {finding.remedy}")
    if found.findings:
        raise typer.Exit(1)


def _explain_vllm(target: str, drafter: Path | None) -> None:
    from volley.vllm.activation import NOTHING, explain
    from volley.vllm.options import TESTED, VARIABLE, check_tested

    try:
        import vllm
    except ImportError:
        raise ConfigError(f"vLLM is not installed in this environment: pip install 'vllm=={TESTED}.*'") from None
    check_tested(vllm.__version__)
    if drafter is not None:
        os.environ[VARIABLE] = str(drafter)
    line = explain(target)
    typer.echo(line)
    if line.startswith(NOTHING):
        raise typer.Exit(1)
