"""Settings by keyword: a name that a dataclass does not have is an error that names the nearest one it has."""

from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from volley.errors import check_keys

T = TypeVar("T")


def names_unknown_fields(cls: type[T]) -> type[T]:
    """A dataclass decorator: an unknown keyword is a ConfigError, where Python's own is a bare TypeError."""
    construct: Any = cls.__init__

    @wraps(construct)
    def checked(self: T, *args: Any, **given: Any) -> None:
        check_keys(f"field of {cls.__name__}", given, [field.name for field in fields(cls)])  # type: ignore[arg-type]
        construct(self, *args, **given)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls
