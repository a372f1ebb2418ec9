"""Launch of vLLM's OpenAI server: check the installation, read its options, and build its command."""

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from volley.errors import ConfigError, UnsupportedModelError

MODULE = "vllm.entrypoints.openai.api_server"
VARIABLE = "VOLLEY_DRAFTER"
"""Variable that activates the plugin in a plain ``vllm serve`` (``activation.py``)."""
INSTALL = "pip install 'vllm==0.32.*'"
_OURS = {
    "--model": "name the target with --target or right after --engine vllm",
    "--speculative-config": "it is made from --drafter and --policy; start vLLM itself to write your own",
    "-sc": "it is made from --drafter and --policy; start vLLM itself to write your own",
}


def check_installed(tested: str) -> str:
    """Return the installed vLLM's version. Raises an error without vLLM or for a version outside ``tested`` (such as "0.32")."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"vLLM is not installed in this environment; install it with {INSTALL}")
    names = _distributions()
    version = importlib.metadata.version(names[0]) if names else "of an unknown version"
    if version.split(".")[:2] != tested.split("."):
        raise UnsupportedModelError(f"this is vLLM {version}; volley is tested with {tested}.x: {INSTALL}")
    return version


def is_cpu_build() -> bool:
    """Return whether the installed vLLM runs on CPUs; this build has another name or its own version."""
    return any("cpu" in f"{name} {importlib.metadata.version(name)}" for name in _distributions())


def loads_plugin() -> bool:
    """Return whether vLLM loads volley's plugin: it is installed, and ``VLLM_PLUGINS`` names it or is not set."""
    allowed = os.environ.get("VLLM_PLUGINS")
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="volley")
    return bool(found) and (allowed is None or "volley" in allowed.split(","))


def _distributions() -> Sequence[str]:
    return importlib.metadata.packages_distributions().get("vllm", [])


def split_target(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the target, if the arguments begin with one, and vLLM's own options. Options that volley sets are refused."""
    rest = list(args)
    target = rest.pop(0) if rest and not rest[0].startswith("-") else None
    for argument in rest:
        reason = _OURS.get(argument.partition("=")[0].replace("_", "-"))
        if reason:
            raise ConfigError(f"{argument.partition('=')[0]} cannot be given here: {reason}")
    return target, rest


def option(args: Sequence[str], *names: str) -> str | None:
    """Return the last value of an option, given as ``--name value`` or ``--name=value`` with dashes or underscores."""
    found = None
    for index, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        if name.startswith("-") and name.replace("_", "-") in names:
            found = value if equals else args[index + 1] if index + 1 < len(args) else None
    return found


def size_option(args: Sequence[str], *names: str) -> int:
    """Return a number of processes in vLLM's arguments; 1 by default."""
    value = option(args, *names) or "1"
    if not value.isdecimal():
        raise ConfigError(f"{names[0]} is {value!r}; it must be a number")
    return int(value)


def command_line(target: str, engine_args: Mapping[str, Any], args: Sequence[str]) -> list[str]:
    """Return the command line of vLLM's server: ``engine_args`` (of ``vllm.LLM``), then ``args`` unchanged."""
    made: list[str] = []
    for name, value in engine_args.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "additional_config" and option(args, flag) is not None:
            raise ConfigError(f"{flag} cannot be given here: volley's plugin reads its options there")
        switch = {True: flag, False: f"--no-{flag[2:]}"}
        made += [switch[value]] if isinstance(value, bool) else [flag, json.dumps(value)]
    return [sys.executable, "-m", MODULE, "--model", target, *made, *args]
