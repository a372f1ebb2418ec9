"""Command ``volley serve --engine vllm``: checks a pair and starts vLLM's server with it."""

import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import typer

from volley.config import DraftingConfig, check_undrafted
from volley.errors import ConfigError
from volley.files import REFERENCE, find_target
from volley.options import expand
from volley.vllm import launch
from volley.vllm.launch import VARIABLE


@dataclass(frozen=True, kw_only=True)
class VLLMOptions:
    """Options for serving with vLLM."""

    engine: Literal["vllm"]
    """Server to start."""
    target: str | None = None
    """Target: folder or hub name, also accepted right after --engine vllm. By default the bundled one."""
    drafter: str | None = None
    """Drafter: folder, or 'none' for plain decoding; the bundled target comes with its own."""
    dry_run: bool = False
    """Check everything and print vLLM's command without running it."""


@expand
def serve_vllm(context: typer.Context, options: VLLMOptions, drafting: DraftingConfig) -> None:
    """Serve a target with vLLM's OpenAI server and a drafter of volley's. All further options are vLLM's own.

    Such as --tensor-parallel-size 2 --port 8000. Without a --policy, or with a fixed one, vLLM's built-in dflash drafts if it
    supports all given options; otherwise volley's plugin does.
    """
    from volley.vllm.options import TESTED

    named, args = launch.split_target(context.args)
    if named is not None and options.target is not None:
        raise ConfigError(f"two targets are named, {named} and {options.target}; name one")
    launch.check_installed(TESTED)
    target, drafter = options.target or named, options.drafter
    if target is None:
        target = str(REFERENCE / "target")
        drafter = drafter or str(REFERENCE / "drafter")
    target = str(find_target(target))
    engine_args: dict[str, Any] = {}
    if drafter is not None and drafter != "none":
        engine_args = _speculation(target, drafter, drafting, args)
    else:
        check_undrafted(drafting.given())
    line = launch.command_line(target, engine_args, args)
    typer.echo(shlex.join(line), err=not options.dry_run)
    if not options.dry_run:
        os.environ.pop(VARIABLE, None)  # the command line is complete, and the plugin in vLLM must not add to it
        os.execv(line[0], line)


def _speculation(target: str, drafter: str, drafting: DraftingConfig, args: list[str]) -> dict[str, Any]:
    """Return vLLM's arguments for a drafter: its built-in method if that supports all options, else volley's plugin."""
    from volley.models.checkpoints.formats import drafter_folder
    from volley.models.drafters.export import TargetShape
    from volley.vllm.options import PluginOptions, block_drafter, speculation, wrong_sampler

    drafter = str(drafter_folder(Path(drafter)))
    TargetShape.from_pretrained(target).check(block_drafter(Path(drafter)))
    if launch.is_cpu_build() and not launch.loads_plugin():
        raise wrong_sampler()
    return speculation(
        PluginOptions(drafter=drafter, **asdict(drafting)),
        eager="--no-enforce-eager" not in args,
        tensor_parallel_size=launch.size_option(args, "--tensor-parallel-size", "-tp"),
        pipeline_parallel_size=launch.size_option(args, "--pipeline-parallel-size", "-pp"),
    )
