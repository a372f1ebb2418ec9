"""Speculation by the environment alone: ``VOLLEY_DRAFTER=DRAFTER vllm serve MODEL``.

vLLM calls :func:`register` in each of its processes, before an engine is configured. With a drafter in the environment,
:func:`configure` then makes the configuration: it tries two ways to draft, and leaves vLLM plain if neither works.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import typer

from volley.config import DecodingConfig, DraftingConfig
from volley.errors import ConfigError, VolleyError
from volley.models.checkpoints.formats import drafter_folder
from volley.models.drafters.export import TargetShape
from volley.options import PREFIX, expand
from volley.vllm.options import (
    LOGGER,
    VARIABLE,
    PluginOptions,
    block_drafter,
    built_in_args,
    check_tested,
    engine_args,
    repair_sampler,
)

NOTHING = "volley drafts nothing"
Configured = TypeVar("Configured")


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings(DraftingConfig):
    """Settings that the environment has for vLLM: ``VOLLEY_`` and the name of an option, as for the ``volley`` commands."""

    drafter: str = "none"
    """Drafter: its folder or its name. Without one, and with 'none', vLLM is left as it is."""
    block_size: int | None = None
    """Tokens verified per cycle, anchor included; 1 is plain decoding. Short for a fixed policy."""
    compile: bool = False
    """Compile the drafter with torch.compile."""

    @classmethod
    def from_environment(cls) -> "EnvironmentSettings":
        """Read the variables as the options of a command without arguments. Errors name the variable."""
        found: list[EnvironmentSettings] = []

        def take(settings: EnvironmentSettings) -> None:
            found.append(settings)

        app = typer.Typer(add_completion=False)
        app.command()(expand(take))
        try:
            typer.main.get_command(app).main([], standalone_mode=False)
        except typer.BadParameter as error:
            raise ConfigError(f"{error.param.envvar if error.param else PREFIX}: {error.message}") from None
        return found[0]

    def options(self) -> PluginOptions:
        """Return the plugin's options, with the block size as a fixed policy. Raises ConfigError if nothing is to be drafted."""
        if self.drafter == "none":
            raise ConfigError(f"{VARIABLE} names no drafter")
        if self.policy == "plain" or DecodingConfig(policy=self.policy, block_size=self.block_size).fixed_block == 1:
            raise ConfigError("plain decoding was asked for, by the block size or the policy")
        own = {field.name: getattr(self, field.name) for field in fields(DraftingConfig)}
        own["policy"] = f"fixed:{self.block_size}" if self.block_size else self.policy
        return PluginOptions(drafter=str(drafter_folder(Path(self.drafter))), **own)


def register() -> None:
    """Prepare a process of vLLM (vLLM's general plugin): repair the CPU build's sampler, and activate the drafter, if any."""
    import vllm

    try:
        check_tested(vllm.__version__)
    except VolleyError as error:
        LOGGER.warning("%s: %s", NOTHING, error)
        return
    repair_sampler()
    if os.environ.get(VARIABLE, "none") in ("", "none"):
        return
    from vllm.engine.arg_utils import EngineArgs

    plain = EngineArgs.create_engine_config
    if hasattr(plain, "of_volley"):  # vLLM may load a plugin repeatedly
        return

    @wraps(plain)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, line = configure(self, partial(plain, self, *args, **kwargs))
        (LOGGER.warning if line.startswith(NOTHING) else LOGGER.info)(line)
        return config

    create_engine_config.of_volley = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def configure(args: Any, make: Callable[[], Configured]) -> tuple[Configured, str]:
    """Return the configuration that ``make`` makes of vLLM's ``EngineArgs``, and a line: what drafts, or why nothing does.

    The first way to draft whose configuration can be made is taken. If none can, vLLM's own, plain one is made.
    """
    given, errors = dict(vars(args)), list[Exception]()
    try:
        settings, options = _read(args)
        for way in (_built_in, _proposer):
            try:
                line = way(args, settings, options)
                return make(), line
            except Exception as error:
                errors.append(error)
                vars(args).clear()
                vars(args).update(given)
    except Exception as error:  # a server that cannot draft must start nevertheless
        errors.append(error)
    reasons = dict.fromkeys(" ".join(str(error).split()) or type(error).__name__ for error in errors)
    return make(), f"{NOTHING}: {'; '.join(reasons)}"


def _built_in(args: Any, _: EnvironmentSettings, options: PluginOptions) -> str:
    """Give vLLM the drafter for its built-in method, which is compiled with the target."""
    vars(args).update(built_in_args(options))
    return _drafting(f"vLLM's built-in dflash, {'eagerly' if args.enforce_eager else 'compiled'},", options, args)


def _proposer(args: Any, settings: EnvironmentSettings, options: PluginOptions) -> str:
    """Give vLLM volley's class as the proposer, or its built-in method without some options if its processes share the target."""
    found = engine_args(
        options, tensor_parallel_size=args.tensor_parallel_size, pipeline_parallel_size=args.pipeline_parallel_size
    )
    found["additional_config"] = {**(args.additional_config or {}), **found.get("additional_config", {})}
    vars(args).update(found)
    if found["speculative_config"]["method"] == "dflash":
        return _drafting("vLLM's built-in dflash, without the other settings,", options, args)
    return _drafting("volley's proposer, eagerly," + " without torch.compile," * settings.compile, options, args)


def _read(args: Any) -> tuple[EnvironmentSettings, PluginOptions]:
    """Return the settings; an error unless there is a drafter of this target and vLLM was not told how to speculate."""
    if any(
        vars(args).get(name) is not None for name in ("speculative_config", "spec_method", "spec_model", "spec_tokens")
    ):
        raise ConfigError(f"vLLM's own options say how to speculate, so {VARIABLE} is not looked at")
    settings = EnvironmentSettings.from_environment()
    options = settings.options()
    TargetShape.from_pretrained(args.model).check(block_drafter(Path(options.drafter)))
    return settings, options


def _drafting(what: str, options: PluginOptions, args: Any) -> str:
    size = 1 + args.speculative_config["num_speculative_tokens"]
    return f"volley: {what} drafts with {options.drafter}, in blocks of up to {size} tokens"


def explain(target: str) -> str:
    """Return the line that ``vllm serve TARGET`` says in this environment, without loading weights."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=target)
    create = EngineArgs.create_engine_config
    return configure(args, partial(getattr(create, "__wrapped__", create), args))[1]
