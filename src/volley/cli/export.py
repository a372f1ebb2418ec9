"""Command ``volley export``: writes a drafter in another engine's format."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from volley.errors import ConfigError
from volley.options import expand


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export; each is an argument of ``models.export.export``."""

    to: Literal["zlab", "speculators", "sglang", "transformers", "gguf"]
    """Format to write. volley and vLLM read zlab; sglang is zlab, checked for what SGLang cannot use; gguf is llama.cpp's."""
    out: Path
    """Folder to write; a file for gguf."""
    target: str | None = None
    """Target of the drafter, to check that they fit: folder, hub name or GGUF file."""
    with_embeddings: bool = False
    """Put the target's embedding and head into the checkpoint."""
    draft_vocab_size: int | None = None
    """Draft only this many tokens, the most frequent in --data. Answers may still contain any token."""
    drop_head: bool = False
    """Leave out a sequential head: the drafter then has a lower acceptance."""


@expand
def export(
    options: ExportOptions,
    drafter: Annotated[Path, typer.Argument(help="Folder of the drafter, in any of the formats.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Responses of volley collect, for --draft-vocab-size; may be repeated.")
    ] = None,
) -> None:
    """Write a drafter in the format that another engine loads. Weights are copied or left out, never changed."""
    if (options.draft_vocab_size is None) != (not data):
        raise ConfigError("--draft-vocab-size keeps the tokens that are frequent in --data; give both or neither")
    from volley.models.drafters.export import export as run

    counts = _token_counts(options.target, data) if options.target is not None and data else None
    written = run(drafter, counts=counts, **asdict(options)).config
    own = written.draft_vocab_size
    typer.echo(f"written to {options.out}" + (f", drafting {own} of {written.vocab_size} tokens" if own else ""))
    if options.drop_head:
        typer.echo("Without its sequential head the drafter accepts less: measure it with volley bench.", err=True)


def _token_counts(target: str, data: list[Path]) -> list[int]:
    """Return how often the target wrote each token."""
    from volley.models.drafters.export import TargetShape
    from volley.models.targets.loading import auto_tokenizer
    from volley.train.data import count_response_tokens, read_rows

    vocab_size = TargetShape.from_pretrained(target).vocab_size  # read first: its error explains a wrong name
    tokenizer = auto_tokenizer(target)
    stop = {tokenizer.eos_token_id} - {None}
    return count_response_tokens(tokenizer, read_rows(data), stop, vocab_size)
