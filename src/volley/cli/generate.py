"""Command ``volley generate``: answers a prompt."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from volley.cli.models import Capacity, ModelOptions, load_engine, names_file, names_model, with_target
from volley.cli.sampling import SamplingOptions
from volley.config import DecodingConfig
from volley.errors import ConfigError, InputError
from volley.options import expand
from volley.params import DiffusionParams, SamplingParams

if TYPE_CHECKING:
    from volley.cli.console import Comparison
    from volley.engine.engine import Engine


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
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    diffusion: Annotated[
        list[str] | None,
        typer.Option(help="Setting of a diffusion model, such as threshold=0.8; may be repeated."),
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
    """Answer a prompt. A terminal colours drafted text. Statistics go to standard error. For many prompts: volley collect."""
    model, prompt = _model_and_prompt(words or [])
    models = with_target(models, model)
    if raw and (thinking is not None or chat_template is not None):
        option = "--thinking" if chat_template is None else "--chat-template"
        raise ConfigError(f"--raw goes without the chat template, which {option} is about; give one of them")
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
    asked: Any = prompt if raw else engine.encode([{"role": "user", "content": prompt}], thinking=thinking)
    console.stderr().print(console.describe(console.stream(engine, asked, params, console.stdout())), soft_wrap=True)
    if compare:
        _compare_with_plain(engine, asked, params)


def _model_and_prompt(words: list[str]) -> tuple[str | None, str]:
    """Return the target, if one is given, and the prompt of the arguments."""
    if len(words) > 2 and names_model(words[0]):
        raise ConfigError(f"{len(words) - 1} words follow {words[0]}; put the prompt in quotes")
    if len(words) > 2 or (len(words) == 2 and not names_model(words[0])):
        raise ConfigError(
            f"{words[0]!r} names no model: it is no file, folder or hub name (owner/name); if it is part of the prompt, put "
            "the prompt in quotes"
        )
    if len(words) == 1 and names_file(words[0]):
        raise ConfigError(f"{words[0]} is a model; give a prompt behind it, or start volley chat {words[0]}")
    if not words:
        raise ConfigError("there is no prompt; give one in quotes")
    if words[-1] == "":
        raise InputError("the prompt is empty; give at least one word to answer")
    prompt = sys.stdin.read().rstrip("\n") if words[-1] == "-" else words[-1]
    return (words[0] if len(words) > 1 else None), prompt


def _compare_with_plain(engine: "Engine", asked: Any, params: SamplingParams) -> None:
    from volley.bench.run import without_drafter
    from volley.cli import console

    plain = without_drafter(engine)
    console.compare(engine, plain, asked, console.WARM_UP)
    _print_comparison(engine, console.compare(engine, plain, asked, params), asked, greedy=params.temperature == 0)


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
