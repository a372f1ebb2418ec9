"""What the config of a target says of its layers."""

from typing import Any

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what configs call their number
_BY_LENGTH = {"dynamic", "longrope"}  # kinds of rotary embedding that look at the last position of a pass


def has_experts(config: Any) -> bool:
    """Whether each token chooses some of many experts, so that another one may need other weights."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in _EXPERTS)


def turns_by_length(config: Any) -> bool:
    """Whether the rotary embedding of a token depends on other positions of its pass."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return any(one.get("rope_type") in _BY_LENGTH for one in (rope, *rope.values()) if isinstance(one, dict))
