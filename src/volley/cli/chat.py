"""Command ``volley chat``: a conversation in the terminal."""

from typing import Annotated

import typer

from volley.cli.models import Capacity, ModelArgument, ModelOptions, load_engine, with_target
from volley.cli.sampling import SamplingOptions
from volley.config import DecodingConfig
from volley.options import expand


@expand
def chat(
    models: ModelOptions,
    decoding: DecodingConfig,
    capacity: Capacity,
    sampling: SamplingOptions,
    model: ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="System message; /system changes it.")] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="Passed to the chat template; by default the template decides."),
    ] = None,
) -> None:
    """Chat with a model in the terminal: streamed answers, their speed, and which text was drafted. Pipes work too."""
    params = sampling.params(max_tokens=1024)
    engine = load_engine(with_target(models, model), decoding, capacity)
    from volley.cli import console
    from volley.cli.dialogue import Dialogue, converse

    out, params = console.stdout(), sampling.with_defaults(params, engine)
    converse(Dialogue(engine, params, out, console.stderr(), system=system, thinking=thinking), out)
