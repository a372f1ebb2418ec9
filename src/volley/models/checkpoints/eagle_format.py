"""EAGLE-3 checkpoints of other programs: map their keys to those of ``DrafterConfig``, their tensor names to volley's.

published      by the authors, SpecForge and ModelOpt: a Llama config with ``draft_vocab_size``, perhaps ``eagle_config``
speculators    ``speculators_model_type: eagle3`` with ``transformer_layer_config``; vLLM reads both

Three layers of the target are tapped. ``eagle_aux_hidden_state_layer_ids`` counts outputs of layers from 1 at the top level (0 is
the embedding) and from 0 inside ``eagle_config``. The default is the authors' choice (``usual_taps``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from transformers import AutoConfig

from volley.errors import ConfigError

NUM_TAPS = 3
BLOCK_SIZE = 8
"""Block size, anchor included: the authors draft at most seven tokens in a row."""
_TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
_SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "hidden_act",
    "sliding_window", "layer_types", "attention_bias",
)  # fmt: skip
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_SAYS_NOTHING = {
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_window_layers", "modal_type", "model_type", "pad_token_id", "pretraining_tp", "target_model_type", "tie_word_embeddings",
    "torch_dtype", "transformers_version", "use_cache", "use_aux_hidden_state", "use_sliding_window", "eagle_config",
    "draft_vocab_size", "target_hidden_size", "num_target_layers", _TAPS_KEY, "speculators_config", "speculators_model_type",
    "speculators_version", "transformer_layer_config", "embed_requires_grad", "block_size", "num_aux_hidden_states",
}  # fmt: skip
_USUAL = {
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "next_layer_regular": True,
    "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
}  # fmt: skip
"""ModelOpt's values of keys for a layer that computes like volley's."""
_NAMES = {"midlayer.hidden_norm.weight": "hidden_norm.weight", "layers.0.hidden_norm.weight": "hidden_norm.weight"}


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Switches in which EAGLE-3 checkpoints differ."""

    norm_before_residual: bool = False
    """True if the layer's residual is the normed state."""
    norm_before_fc: bool = False
    """True if the tapped states are normed together before ``fc``."""
    fc_norm: bool = False
    """True if each layer's tapped states are normed separately before ``fc``."""
    norm_output: bool = False
    """True if the next token's step reads the normed state, as the head does."""
    qk_norm: bool = False
    """True if queries and keys are normed, as in Qwen 3. Derived from the tensors."""


SWITCHES = tuple(field.name for field in fields(EagleConfig) if field.name != "qk_norm")


def is_eagle(raw: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` is an EAGLE-3 drafter's."""
    named = str(raw.get("architectures")).lower()
    kind = str(raw.get("speculators_model_type") or "")
    plain = "forcausallm" in named and "draft_vocab_size" in raw and not {"dflash_config", "markov_rank"} & set(raw)
    return kind == "eagle3" or (not kind and ("eagle3" in named or plain))


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """Return the 0-based layers that the authors tap: an early, the middle and a late one."""
    if num_layers < 5:
        raise ConfigError(
            f"the checkpoint does not name the layers it taps, and the usual ones need a target of 5 layers or more, not of "
            f"{num_layers}; write {_TAPS_KEY} into config.json"
        )
    return (1, num_layers // 2 - 1, num_layers - 4)


def from_eagle(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an EAGLE-3 config to z-lab's layout."""
    nested, layers = raw.get("eagle_config") or {}, _filled(raw)
    if not isinstance(nested, Mapping):
        raise ConfigError(f"eagle_config is {nested!r}; it must be an object")
    switches = {key: bool({**raw, **nested}[key]) for key in SWITCHES if key in raw or key in nested}
    _check_known({**raw, **nested}, layers)
    missing = [key for key in _REQUIRED if layers.get(key) is None]
    if missing:
        raise ConfigError(f"EAGLE-3 config lacks {', '.join(map(repr, missing))}; these cannot be guessed")
    heads, head_dim = layers["num_attention_heads"], layers.get("head_dim")
    if head_dim is None and all(isinstance(layers[key], int) for key in _REQUIRED) and heads > 0:
        head_dim = layers["hidden_size"] // heads
    own = {key: layers[key] for key in _SHAPE if layers.get(key) is not None}
    return {
        **own,
        "rope_scaling": _scaling(layers.get("rope_scaling")),
        "num_hidden_layers": layers.get("num_hidden_layers") or 1,
        "num_key_value_heads": layers.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "num_target_layers": raw.get("num_target_layers"),
        "draft_vocab_size": raw.get("draft_vocab_size"),
        "target_hidden_size": raw.get("target_hidden_size"),
        "block_size": raw.get("block_size", BLOCK_SIZE),
        "eagle": switches,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": _taps(raw, nested)},
    }


def own_name(name: str) -> str:
    """Return volley's name of a tensor."""
    bare = name.removeprefix("model.")
    if bare in _NAMES:
        return _NAMES[bare]
    return "layers.0." + bare.removeprefix("midlayer.") if bare.startswith("midlayer.") else name


def _filled(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the layer; speculators omits those equal to the defaults of transformers' config of that type."""
    layers = raw.get("transformer_layer_config", raw)
    if not isinstance(layers, Mapping):
        raise ConfigError(f"transformer_layer_config is {layers!r}; it must be an object")
    if layers is raw:
        return dict(layers)
    kind = layers.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise ConfigError(f"the layer of this EAGLE-3 drafter is of type {kind!r}; volley reads 'llama' and 'qwen3'")
    usual = AutoConfig.for_model(kind).to_dict()
    return {**{key: usual[key] for key in _SHAPE if key in usual and key != "layer_types"}, **layers}


def _check_known(raw: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
    """Refuse unknown keys that may change how the drafter computes; empty or disabled ones are accepted."""
    known = {*_SHAPE, *SWITCHES, *_SAYS_NOTHING}
    found = {**layers, **raw}
    unread = sorted(
        key
        for key, value in found.items()
        if key not in known and value not in (None, False, {}, []) and value != _USUAL.get(key)
    )
    if unread:
        raise ConfigError(
            f"EAGLE-3 config: {', '.join(unread)} are not known to volley and may change what the drafter computes; take "
            "them out of config.json if they do not"
        )
    if found.get("use_aux_hidden_state") is False:
        raise ConfigError(
            "the drafter reads the target's last state alone (use_aux_hidden_state); EAGLE-3 reads three layers"
        )


def _scaling(scaling: object) -> object:
    """Return ``rope_scaling`` with its type under transformers' current key."""
    if not isinstance(scaling, Mapping) or "type" not in scaling:
        return scaling
    rest = {key: value for key, value in scaling.items() if key != "type"}
    return {"rope_type": scaling["type"], **rest}


def _taps(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> list[int]:
    """Return 0-based ids of the tapped layers; none if the target's depth decides."""
    given, first = (nested[_TAPS_KEY], 0) if nested.get(_TAPS_KEY) else (raw.get(_TAPS_KEY) or [], 1)
    if (
        not isinstance(given, list)
        or not all(isinstance(layer, int) for layer in given)
        or len(given) not in (0, NUM_TAPS)
    ):
        raise ConfigError(f"{_TAPS_KEY} is {given!r}; it must be a list of {NUM_TAPS} layer numbers")
    return [layer - first for layer in given]
