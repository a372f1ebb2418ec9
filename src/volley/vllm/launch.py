"""vLLM's OpenAI server: checks that it is installed, reads its command line, and makes the command that starts it."""

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from volley.errors import ConfigError, UnsupportedModelError

MODULE = "vllm.entrypoints.openai.api_server"
INSTALL = "pip install 'volley-llm[vllm]'"
_OURS = {
    "--model": "name the target with --target or right after --engine vllm",
    "--speculative-config": "it is made from --drafter and --policy; start vLLM itself to write your own",
    "-sc": "it is made from --drafter and --policy; start vLLM itself to write your own",
}


def check_installed(tested: str) -> str:
    """The version of the vLLM in this environment; an error without one or with one outside ``tested`` (such as "0.32")."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"vLLM is not installed in this environment; install it with {INSTALL}")
    names = _distributions()
    version = importlib.metadata.version(names[0]) if names else "of an unknown version"
    if version.split(".")[:2] != tested.split("."):
        raise UnsupportedModelError(f"this is vLLM {version}; volley is tested with {tested}.x: {INSTALL}")
    return version


def is_cpu_build() -> bool:
    """Whether the vLLM in this environment runs on CPUs: it goes by another name, or has a version of its own."""
    return any("cpu" in f"{name} {importlib.metadata.version(name)}" for name in _distributions())


def _distributions() -> Sequence[str]:
    return importlib.metadata.packages_distributions().get("vllm", [])


def split_target(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """The target, where the arguments begin with one, and vLLM's own options; those that volley sets are refused."""
    rest = list(args)
    target = rest.pop(0) if rest and not rest[0].startswith("-") else None
    for argument in rest:
        reason = _OURS.get(argument.partition("=")[0].replace("_", "-"))
        if reason:
            raise ConfigError(f"{argument.partition('=')[0]} cannot be given here: {reason}")
    return target, rest


def option(args: Sequence[str], *names: str) -> str | None:
    """The last value of an option in vLLM's arguments, as ``--name value`` or ``--name=value``; dashes and underscores alike."""
    found = None
    for index, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        if name.startswith("-") and name.replace("_", "-") in names:
            found = value if equals else args[index + 1] if index + 1 < len(args) else None
    return found


def size_option(args: Sequence[str], *names: str) -> int:
    """A number of processes in vLLM's arguments; 1 if it is not there."""
    value = option(args, *names) or "1"
    if not value.isdecimal():
        raise ConfigError(f"{names[0]} is {value!r}; it must be a number")
    return int(value)


def command_line(target: str, engine_args: Mapping[str, Any], args: Sequence[str]) -> list[str]:
    """The command line of vLLM's server: ``engine_args`` (of ``vllm.LLM``), then ``args`` as they were given."""
    made: list[str] = []
    for name, value in engine_args.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "additional_config" and option(args, flag) is not None:
            raise ConfigError(f"{flag} cannot be given here: volley's plugin reads its options there")
        switch = {True: flag, False: f"--no-{flag[2:]}"}
        made += [switch[value]] if isinstance(value, bool) else [flag, json.dumps(value)]
    return [sys.executable, "-m", MODULE, "--model", target, *made, *args]
