"""Every error volley raises at its public boundary. Each message names what was wrong and the remedy.

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
    """Base of all errors raised by volley. ``field`` is the parameter of a request at fault, if it is one."""

    def __init__(self, *args: object, field: str | None = None) -> None:
        super().__init__(*args)
        self.field = field


class ConfigError(VolleyError, ValueError):
    """An unknown or unusable option."""


class WriteError(ConfigError):
    """A file that the disk does not take."""


class InputError(VolleyError, ValueError):
    """A prompt or request that cannot be served."""


class CheckpointError(VolleyError):
    """A checkpoint that cannot be read whole."""


class MismatchError(VolleyError):
    """A drafter trained for another target."""


class UnsupportedModelError(VolleyError):
    """A target whose architecture volley cannot run losslessly."""


class CapacityError(VolleyError):
    """The configured KV pool cannot hold even one request."""


class NonFiniteError(VolleyError):
    """A request whose logits are not finite, which ended without being answered to its end."""


class ParallelError(VolleyError):
    """The processes of a divided target cannot go on together."""


class EndpointError(VolleyError):
    """A remote endpoint failed after all retries."""


def check_keys(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse a key nobody reads."""
    for key in given:
        if key not in known:
            raise unknown_key(what, str(key), known)


def names_unknown_fields(cls: type[T]) -> type[T]:
    """A dataclass decorator: an unknown keyword is a ConfigError, where Python's own is a bare TypeError."""
    construct: Any = cls.__init__

    @wraps(construct)
    def checked(self: T, *args: Any, **given: Any) -> None:
        check_keys(f"field of {cls.__name__}", given, [field.name for field in fields(cls)])  # type: ignore[arg-type]
        construct(self, *args, **given)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls


def unknown_key(what: str, key: str, known: Iterable[str]) -> ConfigError:
    """The error for a key nobody reads; names the nearest known one."""
    known = sorted(known)
    remedy = did_you_mean(key, known) or f"known: {', '.join(known)}"
    return ConfigError(f"unknown {what} {key!r}; {remedy}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the known name nearest to ``name``; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""
