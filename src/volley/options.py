"""Command-line options from a dataclass: every field is an option, with its docstring as help and its default.

Each option is thus written once, where it is used. Tuples are comma-separated lists, and a union of types is read as text. Each
option can also come from the environment, as ``VOLLEY_`` and its name in capitals. A field whose metadata have ``python`` is no
option.
"""

import ast
import functools
import inspect
import math
import os
import textwrap
import types
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from volley.errors import ConfigError

PREFIX = "VOLLEY_"


_running: ContextVar[typer.Context] = ContextVar("running")
"""Context of the running command."""


class Without:
    """Marker in ``Annotated[Config, Without("name")]``: fields that are no options of this command and keep their defaults."""

    def __init__(self, *names: str) -> None:
        self.names = frozenset(names)


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every dataclass parameter of ``command`` by one option per field; every option can come from the environment.

    A field is left out, and keeps its default, if an earlier parameter or dataclass has an option of its name, or if its
    dataclass comes :class:`Without` it.
    """
    parameters: list[inspect.Parameter] = []
    configs: dict[str, tuple[Any, list[str]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        config_class, *notes = _unannotated(parameter.annotation)
        if is_dataclass(config_class):
            left_out = {option.name for option in parameters}.union(
                *(note.names for note in notes if isinstance(note, Without))
            )
            options = [option for option in _options(config_class) if option.name not in left_out]
            configs[parameter.name] = config_class, [option.name for option in options]
            parameters += options
        else:
            for note in notes:
                if isinstance(note, OptionInfo):
                    note.envvar, note.show_envvar = _variable(parameter.name), False
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    parameters.append(inspect.Parameter("running", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        _running.set(given.pop("running"))
        for key, value in given.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"--{key.replace('_', '-')} is {value}; give a finite number")
        built = {}
        for name, (config_class, names) in configs.items():
            hints = get_type_hints(config_class)
            built[name] = config_class(**{key: _parse(key, given.pop(key), hints[key]) for key in names})
        command(**given, **built)

    parameters.sort(key=lambda p: p.default is not inspect.Parameter.empty)
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    del wrapper.__wrapped__  # otherwise the signature of ``command`` would take precedence
    return wrapper


def _unannotated(annotation: Any) -> tuple[Any, ...]:
    """Return the type and the metadata of ``Annotated``."""
    return get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)


def field_docs(config_class: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass and its base classes."""
    docs: dict[str, str] = {}
    for base in config_class.__bases__:
        if is_dataclass(base):
            docs |= field_docs(base)
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = getattr(getattr(following, "value", None), "value", None)
            if isinstance(following, ast.Expr) and isinstance(text, str):
                docs[statement.target.id] = " ".join(text.replace("``", "").split())
    return docs


def _options(config_class: Any) -> list[inspect.Parameter]:
    hints, docs = get_type_hints(config_class), field_docs(config_class)
    on_command_line = (field for field in fields(config_class) if not field.metadata.get("python"))
    return [_option(field, hints[field.name], docs.get(field.name, "")) for field in on_command_line]


def _option(field: "Field[Any]", hint: Any, doc: str) -> inspect.Parameter:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    shown = _command_line_type(hint)
    names = [f"--{field.name.replace('_', '-')}"] if default is False else []  # nothing to switch off
    if get_origin(hint) is tuple:
        doc += " Several are separated by commas, or given one by one."
    if isinstance(default, tuple):
        text = ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in default)
        default = [text] if text else []
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[
            shown,
            typer.Option(
                *names,
                help=doc,
                show_default=default not in (None, "", False, []),
                envvar=_variable(field.name),
                show_envvar=False,
            ),
        ],
    )


def _variable(name: str) -> str:
    """Return the environment variable of an option."""
    return f"{PREFIX}{name.upper()}"


def on_command_line(name: str) -> bool:
    """Return whether an option of the running command was given on the command line. A variable may be meant for other
    commands."""
    source = _running.get().get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _command_line_type(hint: Any) -> Any:
    """Return the type to show: tuples and unions are text, parsed by ``_parse`` or by the dataclass."""
    if get_origin(hint) in (Union, types.UnionType):
        members = [member for member in get_args(hint) if member is not type(None)]
        shown = members[0] if len(members) == 1 and get_origin(members[0]) is not tuple else str
        return shown | None
    return list[str] if get_origin(hint) is tuple else hint


def _parse(name: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is not tuple:
        return value
    kind, variable = get_args(hint)[0], os.environ.get(_variable(name), "")
    text = variable if list(value) == variable.split() else ",".join(value)  # file names may contain spaces
    try:
        parts = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        if kind is float and not all(map(math.isfinite, parts)):
            raise ValueError
        return parts
    except ValueError:
        kinds = f"{'finite ' * (kind is float)}{kind.__name__} values"
        raise ConfigError(f"--{name.replace('_', '-')} is {text!r}; give {kinds} separated by commas") from None
