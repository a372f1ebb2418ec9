"""Command ``volley pilot``: trains a policy that chooses block sizes."""

from typing import Annotated

from volley.cli.models import ModelOptions, load_engine
from volley.options import Without, expand
from volley.prompts import load_prompts
from volley.train.options import PilotOptions

INTERNAL = ("batch", "eval_share", "input", "labels", "layers", "learning_rate", "width")
"""Settings for Python: BlockPilot's ablations vary most of them."""


@expand
def pilot(options: Annotated[PilotOptions, Without(*INTERNAL)], models: ModelOptions) -> None:
    """Train the pilot policy of a drafter, which chooses a request's block size by the end of its prompt."""
    for source in options.prompts:
        load_prompts(source, options.data_dir, 1)  # report bad prompts before loading a model
    engine = load_engine(models)
    from volley.cli import console
    from volley.train.pilot import train_pilot

    errors = console.stderr()

    def report(done: int, total: int) -> None:
        errors.print(f"{done}/{total} prompts labelled", end="\r" if errors.is_terminal else "\n")

    folder, outcome = train_pilot(engine, options, report)
    size, fixed = max(outcome.fixed.items(), key=lambda pair: pair[1])
    errors.print(
        f"On prompts it was not trained on: {outcome.pilot:.1f} tokens/s, {fixed:.1f} with blocks of {size} for all, "
        f"{outcome.oracle:.1f} with the best of each; it finds that {outcome.agreement:.0%} of the time."
    )
    errors.print(f"Written to {folder}/")
