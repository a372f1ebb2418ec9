"""Traits of a target's layers, read from its config."""

from typing import Any

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # config keys of the number of experts
_BY_LENGTH = {"dynamic", "longrope"}  # types of rotary embedding that depend on the last position of a pass


def has_experts(config: Any) -> bool:
    """Return whether each token chooses some of many experts, so that tokens may need different weights."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in _EXPERTS)


def turns_by_length(config: Any) -> bool:
    """Return whether the rotary embedding of a token depends on other positions of its pass."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return any(one.get("rope_type") in _BY_LENGTH for one in (rope, *rope.values()) if isinstance(one, dict))
