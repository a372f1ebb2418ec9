"""Command ``volley generate``: answers a prompt or a file of prompts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from volley.cli.models import Capacity, ModelOptions, load_engine, names_file, names_model, with_target
from volley.cli.sampling import SamplingOptions
from volley.config import DecodingConfig
from volley.errors import ConfigError, InputError
from volley.options import expand
from volley.prompts import Conversation, load_prompts

if TYPE_CHECKING:
    from volley.cli.console import Comparison
    from volley.engine.engine import Engine
    from volley.types import SamplingParams


@expand
def generate(
    models: ModelOptions,
    decoding: DecodingConfig,
    capacity: Capacity,
    sampling: SamplingOptions,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] [PROMPT]", help="Target, as --target gives it, and prompt to answer."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL with prompt, messages or turns per row; answers are written as JSONL.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    diffusion: Annotated[
        list[str] | None,
        typer.Option(help="Setting of a diffusion model, such as stream_drafts=true; may be repeated."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")] = False,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="Passed to the chat template; by default the template decides."),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Name of one of the tokenizer's chat templates, or file of a Jinja template.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Decode plainly too; report its speed and whether the tokens are identical."),
    ] = False,
) -> None:
    """Answer a prompt or a file of prompts. A terminal colours drafted text. Statistics go to standard error."""
    model, prompt = _model_and_prompt(words or [], has_prompts=prompts is not None)
    models = with_target(models, model)
    _check_asked(prompt, prompts, compare=compare)
    if raw and (thinking is not None or chat_template is not None):
        option = "--thinking" if chat_template is None else "--chat-template"
        raise ConfigError(f"--raw goes without the chat template, which {option} is about; give one of them")
    conversations = load_prompts(prompts) if prompts is not None else []
    from volley.types import DiffusionParams

    params = sampling.params(
        stop=tuple(stop or ()),
        diffusion=DiffusionParams.from_words(diffusion) if diffusion else None,
    )
    engine = load_engine(models, decoding, capacity)
    from volley.chat import find_template
    from volley.cli import console

    params = sampling.with_defaults(params, engine)
    if chat_template is not None and engine.tokenizer is not None:
        engine.tokenizer.chat_template = find_template(engine.tokenizer, chat_template)
    if compare:
        console.check_comparable(engine, params)
    if prompts is not None:
        _answer_file(engine, conversations, params, raw=raw, thinking=thinking)
        return
    asked: Any = prompt if raw else engine.encode([{"role": "user", "content": prompt or ""}], thinking=thinking)
    console.stderr().print(console.describe(console.stream(engine, asked, params, console.stdout())), soft_wrap=True)
    if compare:
        _compare_with_plain(engine, asked, params)


def _model_and_prompt(words: list[str], *, has_prompts: bool) -> tuple[str | None, str | None]:
    """Return the target and the prompt that are given as arguments."""
    if len(words) > 2 or (len(words) == 2 and not names_model(words[0])):
        raise ConfigError(
            f"{words[0]!r} names no model: it is no file, folder or hub name (owner/name); if it is part of the prompt, put "
            "the prompt in quotes"
        )
    if len(words) == 1 and names_file(words[0]):
        if not has_prompts:
            raise ConfigError(f"{words[0]} is a model; give a prompt behind it, or start volley chat {words[0]}")
        return words[0], None
    return (words[0] if len(words) > 1 else None), (words[-1] if words else None)


def _check_asked(prompt: str | None, prompts: Path | None, *, compare: bool) -> None:
    if (prompt is None) == (prompts is None):
        raise ConfigError("give either a prompt or --prompts FILE")
    if prompt == "":
        raise InputError("the prompt is empty; give at least one word to answer")
    if compare and prompts is not None:
        raise ConfigError("--compare takes one prompt; for many, use volley bench")


def _compare_with_plain(engine: "Engine", asked: Any, params: "SamplingParams") -> None:
    from volley.bench.run import without_drafter
    from volley.cli import console

    plain = without_drafter(engine)
    console.compare(engine, plain, asked, console.WARM_UP)
    _print_comparison(engine, console.compare(engine, plain, asked, params), asked, greedy=params.temperature == 0)


def _answer_file(
    engine: "Engine", conversations: list[Conversation], params: "SamplingParams", *, raw: bool, thinking: bool | None
) -> None:
    """Write answers as JSONL to standard output, and a line about each to standard error."""
    from volley.cli import console

    answers = console.answer_all(engine, conversations, params, raw=raw, thinking=thinking)
    for conversation, messages, results in answers:
        row = {
            "id": conversation.id,
            "messages": messages,
            "finish_reason": results[-1].finish_reason,
            "acceptance_length": [result.stats.acceptance_length for result in results],
            **console.passes(engine, results),
        }
        print(json.dumps(row, ensure_ascii=False))
        ended = "" if len(results) == conversation.num_answers else "; there was no room for a further turn"
        console.stderr().print(f"{conversation.id}: {console.describe(results[-1])}{ended}", soft_wrap=True)


def _print_comparison(engine: "Engine", compared: "Comparison", prompt: Any, *, greedy: bool) -> None:
    from volley.cli import console

    errors = console.stderr()
    errors.print(console.comparison_table({"this": compared}))
    if compared.identical:
        errors.print("The tokens were identical to plain decoding's.")
    elif greedy:
        explanation = console.explain_difference(engine, compared, prompt)
        errors.print(explanation or console.BUG)
        raise typer.Exit(explanation is None)
    else:
        errors.print("Sampled answers differ from plain decoding's; their distribution is the same.")
