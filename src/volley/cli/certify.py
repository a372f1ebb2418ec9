"""Command ``volley certify``: checks that speculative output is the target's own."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from volley.certify.options import CertifyConfig
from volley.errors import ConfigError
from volley.files import make_folder
from volley.options import Without, expand

if TYPE_CHECKING:
    from volley.certify.certificate import Certificate
    from volley.prompts import Message

_say = partial(typer.echo, err=True)

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
def certify(
    config: Annotated[CertifyConfig, Without("alpha", "prompts_used")],
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
    out: Annotated[Path, typer.Option(help="Folder for certificate.json.")] = Path("certificate"),
) -> None:
    """Check that speculative output is the target's own: a verdict, a report, and exit code 1 unless it is found lossless.

    OPENAI_API_KEY holds a server's key.
    The subject is a pair here, a diffusion language model that drafts for itself, or any OpenAI-compatible server as a black box.
    """
    from volley.prompts import load_prompts

    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no URL of a server (http://host:8000/v1); --target {url} certifies a model here")
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
        key, texts = os.environ.get("OPENAI_API_KEY"), [messages[0]["content"] for messages in asked]
        found = certify_server(url, texts, config, plain=plain, model=model, key=key, say=_say)
    else:
        found = _certify_here(config, asked, target, drafter, dtype)
    found.write(out / "certificate.json")
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
