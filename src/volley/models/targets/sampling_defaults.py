"""Sampling defaults of a model, from its generation_config.json or GGUF file."""

from typing import Any

from transformers import GenerationConfig

from volley.errors import ConfigError
from volley.params import SamplingParams

_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of a generation config, and the fields of :class:`SamplingParams` that they set; vLLM reads the same ones."""


def sampling_defaults(config: GenerationConfig | None) -> dict[str, Any]:
    """Return the fields of :class:`SamplingParams` that a model's generation config sets, without those that change nothing.

    Raise :class:`ConfigError` if a value cannot be used.
    """
    found = {own: getattr(config, name, None) for name, own in _NAMES.items()}
    given = {name: value for name, value in found.items() if value is not None}
    if getattr(config, "do_sample", None):
        given.setdefault("temperature", 1.0)
    if given.get("top_k") == -1:
        given["top_k"] = 0
    try:
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(
                value, int if name in ("top_k", "max_tokens") else int | float
            ):
                raise ConfigError(f"{name} is {value!r}; it must be a number")
        SamplingParams(**given)
    except ConfigError as error:
        raise ConfigError(
            f"the model's generation config cannot be used ({error}); mend it, or start with --generation-config none"
        ) from error
    return given
