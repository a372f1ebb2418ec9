"""Commands that take a drafter to other programs. ``cli.py`` puts them on the command line."""

import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from volley.errors import ConfigError
from volley.options import expand

if TYPE_CHECKING:
    from volley.models.checkpoint import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What to write, and where; each is an argument of ``models.export.export``."""

    to: Literal["zlab", "speculators", "sglang", "transformers"]
    """Format to write. zlab is what volley and vLLM read; sglang is the same, checked for what SGLang cannot use."""
    out: Path
    """Folder to write."""
    target: str | None = None
    """The drafter's target, folder or hub name: they are checked to fit."""
    with_embeddings: bool = False
    """Put the target's embedding and head into the checkpoint."""
    draft_vocab_size: int | None = None
    """Draft only so many tokens, the most frequent in --data. Answers may still hold any token."""
    drop_head: bool = False
    """Leave a sequential head out: the plain drafter, whose acceptance is lower."""


@dataclass(frozen=True, kw_only=True)
class VLLMOptions:
    """What volley tells vLLM."""

    engine: Literal["vllm"]
    """Whose server to start."""
    target: str | None = None
    """Target, folder or hub name; it may also stand right after --engine vllm. By default the bundled one."""
    drafter: str | None = None
    """Drafter: folder, or 'none' for plain decoding; the bundled target comes with its own."""
    policy: str | None = None
    """goodput, feedback or fixed:8, as in volley serve. Without one, or fixed, vLLM's built-in dflash drafts if it can."""
    denoising_steps: int = 1
    """Denoising passes of the drafter for each block; more than one needs volley's plugin."""
    draft_window: int | None = None
    """Tokens of context that the drafter sees; a window needs volley's plugin."""
    record: Path | None = None
    """Draft nothing and record the target's features of every prompt in this folder, for volley train --feature-server."""
    taps: str | None = None
    """With --record: the layers, by number or how many, as volley train's. By default what it would tap."""
    record_final: bool = False
    """With --record: the final states too, for volley train's --soft-targets and --total-variation."""
    greedy_only: bool = False
    """Every request will have temperature 0: the plugin asks for this on CPUs, where vLLM 0.32 verifies others wrongly."""
    dry_run: bool = False
    """Check everything, print vLLM's command and do not run it."""


def inspect(
    path: Annotated[Path, typer.Argument(help="Folder of a drafter.")],
    target: Annotated[
        str | None, typer.Option(help="Check that the drafter fits this target: folder or hub name.")
    ] = None,
) -> None:
    """Say what a drafter's checkpoint is, for which target, and what is wrong with it. Exit code 1 if anything is."""
    from volley.models.diagnosis import diagnose

    found = diagnose(path, target)
    typer.echo(f"{path}: {found.title}")
    for name, fact in found.facts.items():
        typer.echo(f"  {name}: {fact}")
    for problem in found.problems:
        typer.echo(f"  wrong: {problem}")
    if found.problems:
        raise typer.Exit(1)
    typer.echo("  nothing is wrong with it" + (f"; it fits {target}" if target else ""))


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
    from volley.models.export import export as run

    counts = _token_counts(options.target, data) if options.target is not None and data else None
    written = run(drafter, counts=counts, **asdict(options)).config
    own = written.draft_vocab_size
    typer.echo(f"written to {options.out}" + (f", drafting {own} of {written.vocab_size} tokens" if own else ""))
    if options.drop_head:
        typer.echo("Without its sequential head the drafter accepts less: measure it with volley bench.", err=True)


def _token_counts(target: str, data: list[Path]) -> list[int]:
    """How often the target wrote each token."""
    from transformers import AutoTokenizer

    from volley.models.export import TargetShape
    from volley.train.data import count_response_tokens, read_rows

    vocab_size = TargetShape.from_pretrained(target).vocab_size  # first: it says what is wrong with a name
    tokenizer = AutoTokenizer.from_pretrained(target)
    stop = {tokenizer.eos_token_id} - {None}
    return count_response_tokens(tokenizer, read_rows(data), stop, vocab_size)


@expand
def serve_vllm(context: typer.Context, options: VLLMOptions) -> None:
    """Serve a target with vLLM's OpenAI server and a drafter of volley's. All further options are vLLM's own.

    Such as --tensor-parallel-size 2 --port 8000.
    """
    from volley.engine.engine import REFERENCE
    from volley.models.checkpoint import read_json
    from volley.models.export import TargetShape
    from volley.models.formats import detect, parse_config
    from volley.serve.vllm_server import check_installed, command, split_target
    from volley.vllm.options import TESTED

    named, args = split_target(context.args)
    if named is not None and options.target is not None:
        raise ConfigError(f"two targets are named, {named} and {options.target}; name one")
    check_installed(TESTED)
    target, drafter = options.target or named, options.drafter
    if target is None:
        target = str(REFERENCE / "target")
        drafter = drafter if drafter or options.record else str(REFERENCE / "drafter")
    engine_args: dict[str, Any] = {}
    if options.record is not None or options.taps is not None or options.record_final:
        engine_args = _recording(options, TargetShape.from_pretrained(target).num_layers)
    elif drafter is not None and drafter != "none":
        raw = read_json(Path(drafter) / "config.json")
        config = parse_config(raw)
        TargetShape.from_pretrained(target).check(config)
        engine_args = _speculation(drafter, config, options, args)
        if engine_args["speculative_config"]["method"] == "dflash" and detect(raw) == "transformers":
            raise ConfigError(
                f"vLLM does not read {drafter}, which is in transformers' format; volley export it --to zlab"
            )
    line = command(target, engine_args, args)
    typer.echo(shlex.join(line), err=not options.dry_run)
    if not options.dry_run:
        os.execv(line[0], line)


def _recording(options: VLLMOptions, num_layers: int) -> dict[str, Any]:
    """vLLM's arguments for a target whose features are recorded."""
    from volley.train.options import parse_taps
    from volley.train.shape import choose_taps
    from volley.vllm.recorder import RecordOptions, recorder_args

    if options.record is None:
        raise ConfigError("taps and record_final say what to record; give --record FOLDER")
    for name in ("drafter", "policy", "denoising_steps", "draft_window", "greedy_only"):
        if getattr(options, name) != VLLMOptions.__dataclass_fields__[name].default:
            raise ConfigError(f"a vLLM that records does not draft; leave out --{name.replace('_', '-')}, or --record")
    taps = choose_taps(parse_taps(options.taps), num_layers)
    return recorder_args(RecordOptions(record=str(options.record.resolve()), taps=taps, final=options.record_final))


def _speculation(drafter: str, config: "DrafterConfig", options: VLLMOptions, args: list[str]) -> dict[str, Any]:
    """vLLM's arguments for the drafter: its built-in method where that does all that is asked, volley's plugin otherwise."""
    from volley.engine.pacing import make_policy
    from volley.models.drafter import Drafter
    from volley.serve.vllm_server import size_option
    from volley.vllm.options import PluginOptions, engine_args

    fixed, _, size = (options.policy or "fixed").partition(":")
    plain = config.head is None and options.denoising_steps == 1 and options.draft_window is None
    if fixed == "fixed" and plain:
        block_size = int(size) if size.isdecimal() else config.block_size
        if not 2 <= block_size <= config.block_size or (size and not size.isdecimal()):
            raise ConfigError(f"policy is {options.policy!r}; this drafter has blocks of 2 to {config.block_size}")
        return {"speculative_config": {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}}
    make_policy(options.policy or "goodput", Drafter.from_pretrained(drafter))
    plugin = PluginOptions(
        drafter=drafter,
        policy=options.policy or "goodput",
        denoising_steps=options.denoising_steps,
        draft_window=options.draft_window,
        greedy_only=options.greedy_only,
    )
    return engine_args(
        plugin,
        eager="--no-enforce-eager" not in args,
        tensor_parallel_size=size_option(args, "--tensor-parallel-size", "-tp"),
        pipeline_parallel_size=size_option(args, "--pipeline-parallel-size", "-pp"),
    )
