"""Define all errors that volley raises at its public boundary. Each message names the fault and the remedy.

VolleyError
├── ConfigError         an option, key or value that volley does not know or cannot use   (also a ValueError)
│   └── WriteError      a file that the disk does not take
├── InputError          a prompt or request that cannot be served as it is                (also a ValueError)
├── CheckpointError     a file that is truncated, incomplete or not what it claims to be
├── MismatchError       a drafter that does not fit its target
├── UnsupportedModelError   an architecture that cannot run losslessly on the paged cache
├── CapacityError       a pool too small for a single request
├── NonFiniteError      a request for which the target computes NaN or infinite numbers
├── ParallelError       processes of one target that are lost or out of step
└── EndpointError       a remote endpoint that did not answer usefully
"""

import difflib
from collections.abc import Collection, Iterable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


class VolleyError(Exception):
    """Base class of volley's errors. ``field`` is the request parameter at fault, if any."""

    def __init__(self, *args: object, field: str | None = None) -> None:
        super().__init__(*args)
        self.field = field


class ConfigError(VolleyError, ValueError):
    """Raised for an unknown or unusable option."""


class WriteError(ConfigError):
    """Raised if the disk refuses a file."""


class InputError(VolleyError, ValueError):
    """Raised for a prompt or request that cannot be served."""


class CheckpointError(VolleyError):
    """Raised for a checkpoint that cannot be read completely."""


class MismatchError(VolleyError):
    """Raised for a drafter trained for another target."""


class UnsupportedModelError(VolleyError):
    """Raised for a target whose architecture volley cannot run losslessly."""


class CapacityError(VolleyError):
    """Raised if the configured K/V pool cannot hold one request."""


class NonFiniteError(VolleyError):
    """Raised for a request whose logits are not finite, which ended early."""


class ParallelError(VolleyError):
    """Raised if the processes of a tensor-parallel target cannot continue together."""


class EndpointError(VolleyError):
    """Raised if a remote endpoint failed after all retries."""


def check_keys(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse unknown keys."""
    for key in given:
        if key not in known:
            raise unknown_key(what, str(key), known)


def check_fields(config: object, *checks: tuple[str, bool, str]) -> None:
    """Refuse a bad value. Each check has a field's name, whether its value is good, and what it must be."""
    for name, is_good, want in checks:
        if not is_good:
            raise ConfigError(f"{name} is {getattr(config, name)!r}; it must be {want}")


def names_unknown_fields(cls: type[T]) -> type[T]:
    """Decorate a dataclass so that an unknown keyword raises ConfigError instead of Python's TypeError."""
    construct: Any = cls.__init__

    @wraps(construct)
    def checked(self: T, *args: Any, **given: Any) -> None:
        check_keys(f"field of {cls.__name__}", given, [field.name for field in fields(cls)])  # type: ignore[arg-type]
        construct(self, *args, **given)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls


def unknown_key(what: str, key: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown key, which names the nearest known one."""
    known = sorted(known)
    remedy = did_you_mean(key, known) or f"known: {', '.join(known)}"
    return ConfigError(f"unknown {what} {key!r}; {remedy}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name nearest to ``name``; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""
