"""Commands that tune a drafter, certify a pair, and diagnose one. ``cli.py`` adds them to the command line."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from volley.certify.options import CertifyConfig
from volley.errors import ConfigError
from volley.files import make_folder, write_atomically
from volley.options import expand
from volley.tune.options import TuneConfig

if TYPE_CHECKING:
    from volley.certify.certificate import Certificate
    from volley.prompts import Message

_DEFAULT_PROMPTS = (
    "How do I use `tar`?",
    "Once upon a time there was",
    "Write a function to find the largest number in a list.",
    "A baker makes 4 trays of 12 rolls each morning and sells 35 of them. How many are left?",
    "The capital of France is",
    "List three reasons to go for a walk, and say for each who would agree with it.",
    "def fibonacci(n):",
    "Explain in a few words what a hash table is and when it is slow.",
)


@expand
def tune(config: TuneConfig) -> None:
    """Tune a drafter to a model and its traffic: collect, choose, train, measure, certify, export, report.

    Run again to resume after any stop. Every option can also come from the environment: VOLLEY_MAX_MINUTES=20. Exit code 1 if the
    pair's output was not found lossless.
    """
    from volley.certify.certificate import read_certificate
    from volley.tune.run import tune as run

    out = run(config, _say)
    if read_certificate(out / "certificate.json")["verdict"] != "lossless":
        raise typer.Exit(1)


@expand
def certify(
    config: CertifyConfig,
    url: Annotated[str | None, typer.Argument(help="A server (http://host:8000/v1) instead of a pair here.")] = None,
    plain: Annotated[
        str | None, typer.Option(help="With a URL: a server of the same target that decodes plainly.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Target: folder or hub name; by default the bundled one.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Drafter: folder; the bundled target has its own.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL of prompts (of turns, the first is used); by default a few of volley's own."),
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Data type of both models.")] = "float32",
    model: Annotated[str | None, typer.Option(help="With a URL: model to request; by default its first.")] = None,
    api_key_env: Annotated[str, typer.Option(help="With a URL: variable that holds the key.")] = "OPENAI_API_KEY",
    out: Annotated[Path, typer.Option(help="Folder for certificate.json and certificate.html.")] = Path("certificate"),
) -> None:
    """Check that speculative output is the target's own: a verdict, a report, and exit code 1 unless it is found lossless.

    The subject is a pair here, a diffusion language model that drafts for itself, or any OpenAI-compatible server as a black box.
    """
    from volley.certify.certificate import to_html
    from volley.prompts import load_prompts

    if url is not None and (target is not None or drafter is not None):
        raise ConfigError("a server has its models already; leave --target and --drafter out")
    if plain is not None and url is None:
        raise ConfigError("--plain is the reference of a server; give that server's URL too")
    if model is not None and url is None:
        raise ConfigError("--model names a server's model; give the server's URL too, or --target for a pair here")
    make_folder(out)
    usual = ([{"role": "user", "content": text}] for text in _DEFAULT_PROMPTS)
    asked = list(usual) if prompts is None else [list(one.messages) for one in load_prompts(prompts)]
    if url is not None:
        from volley.certify.certificate import certify_server

        if any(len(messages) > 1 for messages in asked):
            raise ConfigError(
                f"{prompts} has chats of several messages, and a server completes texts; give rows of 'prompt', "
                "or certify the pair here with --target and --drafter"
            )
        key, texts = os.environ.get(api_key_env), [messages[0]["content"] for messages in asked]
        found = certify_server(url, texts, config, plain=plain, model=model, key=key, say=_say)
    else:
        found = _certify_here(config, asked, target, drafter, dtype)
    found.write(out / "certificate.json")
    write_atomically(out / "certificate.html", to_html(found.to_json()))
    verdict = f"{found.verdict}{f': {found.finding}' if found.finding else ''}"
    _say(f"{verdict}, after {found.seconds / 60:.1f} minutes; written to {out}/")
    if found.verdict != "lossless":
        raise typer.Exit(1)


def _certify_here(
    config: CertifyConfig, asked: "list[list[Message]]", target: str | None, drafter: Path | None, dtype: str
) -> "Certificate":
    import torch

    from volley.certify.certificate import certify_pair
    from volley.engine.capacity import beside_others
    from volley.engine.engine import Engine
    from volley.memory.device import usable_device

    nothing = ConfigError("there is no drafter to certify; name one with --drafter")
    if str(drafter) == "none":
        raise nothing
    named: dict[str, Any] = {} if drafter is None else {"drafter": drafter}
    device = usable_device("auto")
    sizes = beside_others(device)
    engine = Engine.from_pretrained(target, **named, dtype=getattr(torch, dtype), device=device, capacity=sizes)
    if engine.drafter is None and engine.target.diffusion is None:
        raise nothing
    return certify_pair(engine, [engine.encode(messages) for messages in asked], config, _say)


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
    decode: Annotated[bool, typer.Option(help="Decode the prompts too: measure τ, and check the prefix cache.")] = True,
    metrics: Annotated[
        str | None,
        typer.Option(help="Server of the pair, volley's or vLLM's, whose acceptance by position is compared."),
    ] = None,
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
    from volley.doctor.counters import read_counters
    from volley.doctor.diagnosis import Doctor
    from volley.engine.engine import Engine

    counters = None if metrics is None else read_counters(metrics)
    physician = Doctor(target, drafter, data, temperature=temperature, block_size=block_size, say=_say)
    engine = Engine.from_pretrained(target, drafter=drafter, dtype=physician.target.dtype) if decode else None
    if engine is not None:
        engine.procedures.write_causally()
    found = physician.examine(engine, counters)
    measured = "" if found.measured is None else f", {found.measured:.2f} measured"
    typer.echo(f"τ {found.expected:.2f} expected from {len(physician.documents)} answers{measured}")
    if counters is not None:
        curves = (counters.acceptance, physician.as_it_is.acceptance)
        served, expected = (" ".join(f"{share:.2f}" for share in curve) for curve in curves)
        typer.echo(f"kept by position: {served} served, {expected} expected")
    for finding in found.findings:
        typer.echo(f"{finding.name}: {finding.evidence}\n  remedy: {finding.remedy}")
    if found.findings:
        raise typer.Exit(1)


def _explain_vllm(target: str, drafter: Path | None) -> None:
    from volley.vllm.activation import NOTHING, explain
    from volley.vllm.launch import VARIABLE, check_installed
    from volley.vllm.options import TESTED

    check_installed(TESTED)
    if drafter is not None:
        os.environ[VARIABLE] = str(drafter)
    line = explain(target)
    typer.echo(line)
    if line.startswith(NOTHING):
        raise typer.Exit(1)


@expand
def presets(
    target: Annotated[
        str | None, typer.Option(help="Derive the settings from this target's config: folder or hub name.")
    ] = None,
) -> None:
    """Show the initial settings of volley train and tune for each family of models, for some targets by name, or for one
    target."""
    from volley.train.presets import FAMILIES, TARGETS, preset_named, read_preset

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
    typer.echo("With --target: taps, widths and learning rate from its config. volley tune starts there and measures.")


def _say(line: str) -> None:
    typer.echo(line, err=True)
