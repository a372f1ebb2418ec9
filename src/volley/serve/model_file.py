"""Model file: a TOML table per model with the options of ``volley serve``, for one server of several models."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from volley.errors import ConfigError, check_keys
from volley.serve.config import OF_THE_SERVER

T = TypeVar("T")


def read_models(path: Path) -> dict[str, dict[str, Any]]:
    """Return the options of each model by name. With several models, each must set its K/V memory, which is not divided
    automatically."""
    try:
        models = tomllib.loads(path.read_text(encoding="utf-8")).get("models", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the models cannot be read from {path} ({error}); give a TOML file") from error
    if not isinstance(models, dict) or not models or not all(isinstance(own, dict) for own in models.values()):
        raise ConfigError(f"{path} describes no model; write a table [models.NAME] for each")
    for name, own in models.items():
        if ":" in name:
            raise ConfigError(f"the model name {name!r} has a colon, which separates adapters; leave it out")
        if shared := OF_THE_SERVER & own.keys():
            option = min(shared)
            raise ConfigError(
                f"{option} of the model {name!r} applies to the whole server; give it on the command line, as "
                f"--{option.replace('_', '-')}"
            )
        if len(models) > 1 and not {"kv_mib", "num_pages"} & own.keys():
            raise ConfigError(
                f"the model {name!r} does not say what its K/V may take; give each of several models kv_mib (or num_pages)"
            )
    return models


def override(name: str, own: Mapping[str, Any], *configs: Any) -> list[Any]:
    """Return the dataclasses ``configs`` with a model's own options applied."""
    known = [{field.name for field in fields(config)} for config in configs]
    check_keys(f"option of the model {name!r}", own, set().union(*known))
    return [
        _override(name, {key: value for key, value in own.items() if key in keys}, config)
        for keys, config in zip(known, configs, strict=True)
    ]


def _override(name: str, own: dict[str, Any], config: T) -> T:
    try:
        return TypeAdapter(type(config)).validate_python(asdict(config) | own)  # type: ignore[call-overload]
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(f"the model {name!r}: {field}: {first['msg']}; see volley serve --help") from None
