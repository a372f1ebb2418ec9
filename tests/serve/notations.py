"""A call as models write it whose arguments are no JSON."""

import json
from collections.abc import Mapping
from typing import Any


def call_text(form: str, name: str, arguments: Mapping[str, Any]) -> str:
    """In the notation of a format: ``gemma4``, ``qwen3_5``, ``glm4_5`` or ``glm4_7``."""
    if form == "gemma4":
        return f"<|tool_call>call:{name}{_quoted(arguments)}<tool_call|>"
    texts = {
        key: own if isinstance(own, str) else json.dumps(own, separators=(",", ":")) for key, own in arguments.items()
    }
    if form == "qwen3_5":
        inside = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"
    return glm_text(name, texts, {"glm4_5": "\n", "glm4_7": ""}[form])


def glm_text(name: str, texts: Mapping[str, str], space: str) -> str:
    """In GLM's notation, with ``space`` between the tags."""
    inside = "".join(
        f"<arg_key>{key}</arg_key>{space}<arg_value>{text}</arg_value>{space}" for key, text in texts.items()
    )
    return f"<tool_call>{name}{space}{inside}</tool_call>"


def _quoted(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_quoted(own)}" for key, own in value.items()) + "}"
    return "[" + ",".join(map(_quoted, value)) + "]" if isinstance(value, list) else json.dumps(value)
