"""Config of a drafter checkpoint in z-lab's format, a Qwen3 config with ``dflash_config``, and the checkpoint with tensors."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from volley.errors import ConfigError, MismatchError, check_keys, unknown_key
from volley.models.checkpoints.eagle_format import NUM_TAPS, EagleConfig
from volley.models.checkpoints.variants import CONVOLUTION_KEYS, plain

ARCHITECTURE = "DFlashDraftModel"

# Keys of Qwen3 configs that do not affect how a drafter computes.
_IGNORED_KEYS = {
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "max_window_layers",
    "model_type", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_DFLASH_KEYS = {"mask_token_id", "target_layer_ids", "block_size", "use_swa", "swa_window_size"}
HEADS = ("residual", "markov", "dspark", "selector", "domino")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sequential head (``heads.py``); in ``config.json`` the object ``head``."""

    type: str
    """``residual``; ``markov``: residual without the context; ``dspark``: a Markov head as two tables;
    ``selector``: DFlash 2; ``domino`` (``domino.py``)."""
    rank: int
    candidates: int = 32
    """Number of candidate tokens of each position in trees; in chains too for DFlash 2's selector."""
    state: int | None = None
    """Size of Domino's state."""
    uncorrected: int = 0
    """Number of first positions of a block whose logits Domino does not correct."""

    def __post_init__(self) -> None:
        if self.type not in HEADS:
            raise unknown_key("drafter head", str(self.type), HEADS)
        for name in ("rank", "candidates"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"drafter config: head.{name} is {value!r}; it must be a positive integer")
        if (self.type == "domino") != (isinstance(self.state, int) and self.state > 0):
            raise ConfigError(
                f"drafter config: head.state is {self.state!r}; Domino's head has a state, of a positive size"
            )
        if not isinstance(self.uncorrected, int) or self.uncorrected < 0:
            raise ConfigError(f"drafter config: head.uncorrected is {self.uncorrected!r}; it must be 0 or more")

    def to_json(self) -> dict[str, Any]:
        """Return the object ``head``; keys for Domino are left out of other heads."""
        domino = () if self.type == "domino" else ("state", "uncorrected")
        return {key: value for key, value in asdict(self).items() if key not in domino}

    @classmethod
    def from_json(cls, raw: object) -> "HeadConfig":
        """Parse ``head``; unknown and missing keys are errors that name them."""
        if not isinstance(raw, Mapping):
            raise ConfigError(f"drafter config: head is {raw!r}; it must be an object with 'type' and 'rank'")
        known = cls.__dataclass_fields__
        check_keys("drafter head key", raw, known)
        missing = [name for name in ("type", "rank") if name not in raw]
        if missing:
            raise ConfigError(f"drafter config: head lacks {', '.join(map(repr, missing))}; these cannot be guessed")
        return cls(**raw)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of a DFlash drafter; field names are the checkpoint's. Source: DFlash §4.1, §A.1."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Vocabulary size of the target."""
    num_target_layers: int | None
    """Number of the target's layers; ``None`` if the checkpoint does not say."""
    block_size: int
    """Largest block, anchor included."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """0-based ids of the target's decoder layers whose outputs are tapped, in the order that ``fc`` expects. The embedding is -1,
    so ``(-1,)`` is the drafter without target features (DFlash Table 8)."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 40_960
    hidden_act: str = "silu"
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = field(default=())
    attention_bias: bool = False
    """True if queries, keys, values and attention's outputs have biases, as in drafters for gpt-oss."""
    head: HeadConfig | None = None
    """Sequential head; ``None``: plain DFlash."""
    draft_vocab_size: int | None = None
    """Rows of the drafter's own LM head; fewer than ``vocab_size`` are a reduced vocabulary. ``None``: the target's head."""
    sample_from_anchor: bool = False
    """True if the anchor's own position predicts the first draft token, as in DSpark drafters; a block has one mask fewer."""
    causal_layers: tuple[bool, ...] = ()
    """True for each layer whose positions see only those before them; empty if all layers see the whole block."""
    conv_kernel_size: int | None = None
    """Number of positions that DFlash 2's convolutions mix, their own included; ``None``: there are no convolutions."""
    conv_group_size: int | None = None
    """Number of channels that share the input-dependent part of a convolution's kernel."""
    target_hidden_size: int | None = None
    """Width of the target's states if the drafter's differs; then embedding and head are the drafter's own."""
    final_logit_softcapping: float | None = None
    """Cap of the logits, which become ``cap · tanh(logits / cap)``, as in drafters for Gemma."""
    draft_window: int | None = None
    """Tokens of context that suffice for its drafts, measured in training; ``None``: not measured."""
    target_fingerprint: str | None = None
    """Digest of the target that it was trained on (``fingerprint.py``); ``None``: unknown."""
    eagle: EagleConfig | None = None
    """Switches of an EAGLE-3 drafter. It ignores block, mask token and head; the target's depth may choose its taps."""
    confidence_width: int | None = None
    """Input width of DSpark's confidence head: a state and perhaps a row of the Markov head. Derived from its tensors."""
    own_embedding: bool = False
    """True if the checkpoint has input embeddings. Derived from its tensors, so not part of ``config.json``."""

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        if self.target_hidden_size == self.hidden_size:
            object.__setattr__(self, "target_hidden_size", None)
        if not self.final_logit_softcapping:
            object.__setattr__(self, "final_logit_softcapping", None)
        if not any(self.causal_layers):
            object.__setattr__(self, "causal_layers", ())
        for wrong, message in (*self._problems_of_drafting(), *self._problems_of_layers()):
            if wrong:
                raise ConfigError(f"drafter config: {message}")

    def _problems_of_drafting(self) -> list[tuple[bool, str]]:
        cap = self.final_logit_softcapping
        return [
            (self.block_size < 2, f"block_size is {self.block_size}; a block needs an anchor and at least one slot"),
            (
                self.eagle is not None and self.num_hidden_layers != 1,
                f"num_hidden_layers is {self.num_hidden_layers}; volley reads EAGLE-3 drafters of one layer",
            ),
            (
                self.eagle is not None and self.attention_bias,
                "attention_bias is true; volley reads EAGLE-3 drafters without biases",
            ),
            (
                not self.target_layer_ids and self.eagle is None,
                "target_layer_ids is empty; name the target layers the drafter was trained on",
            ),
            (
                any(not -1 <= i < (self.num_target_layers or i + 1) for i in self.target_layer_ids),
                f"target_layer_ids {list(self.target_layer_ids)} do not all lie in a target of "
                f"{self.num_target_layers or 'any number of'} layers",
            ),
            (
                cap is not None and not (isinstance(cap, int | float) and cap > 0),
                f"final_logit_softcapping is {self.final_logit_softcapping!r}; it must be a positive number",
            ),
            (
                not 0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}",
            ),
            (
                self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size,
                f"draft_vocab_size is {self.draft_vocab_size}; it must be between 1 and the vocabulary of {self.vocab_size}",
            ),
        ]

    def _problems_of_layers(self) -> list[tuple[bool, str]]:
        return [
            (self.hidden_act != "silu", f"hidden_act {self.hidden_act!r} is not supported; drafters use 'silu'"),
            (
                self.num_attention_heads % self.num_key_value_heads != 0,
                f"num_attention_heads is {self.num_attention_heads}; it must be a multiple of num_key_value_heads, "
                f"{self.num_key_value_heads}",
            ),
            (
                not set(self.layer_types) <= {"full_attention", "sliding_attention"},
                f"layer_types are {', '.join(map(str, self.layer_types))}; a layer is full_attention or sliding_attention",
            ),
            (
                len(self.layer_types) != self.num_hidden_layers,
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers",
            ),
            (
                len(self.causal_layers) not in (0, self.num_hidden_layers),
                f"causal_layers has {len(self.causal_layers)} entries for {self.num_hidden_layers} layers",
            ),
            (
                self.confidence_width
                not in (None, self.hidden_size, self.hidden_size + (self.head.rank if self.head else 0)),
                f"the confidence head reads {self.confidence_width} numbers; it must be a state of {self.hidden_size}, or that "
                "and a row of the Markov head",
            ),
            (
                (self.conv_kernel_size is None) != (self.conv_group_size is None),
                "conv_kernel_size and conv_group_size belong together; give both, or neither",
            ),
            (
                "sliding_attention" in self.layer_types and not self.sliding_window,
                "layer_types has 'sliding_attention' but sliding_window is not set; give the window in tokens",
            ),
        ]

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids) or NUM_TAPS

    def window_for(self, asked: int | None) -> int | None:
        """Return the tokens of context to draft from (``None``: all) for ``asked``: 0 means all, ``None`` the drafter's own."""
        return (self.draft_window if asked is None else asked) or None

    def check_target(self, *, hidden_size: int, vocab_size: int, num_layers: int) -> None:
        """Refuse a target that the drafter was not trained for."""
        mismatches = self.mismatches(hidden_size=hidden_size, vocab_size=vocab_size, num_layers=num_layers)
        if mismatches:
            raise MismatchError(
                f"{'; '.join(mismatches)}; use the drafter of this target or train one with `volley train`"
            )

    def mismatches(self, *, hidden_size: int, vocab_size: int, num_layers: int) -> list[str]:
        """Return the differences that keep the drafter from drafting for a target of this shape."""
        pairs = [
            ("hidden size", self.target_hidden_size or self.hidden_size, hidden_size),
            ("vocabulary", self.vocab_size, vocab_size),
            ("number of target layers", self.num_target_layers or num_layers, num_layers),
        ]
        found = [
            f"the drafter was trained for a target whose {what} is {drafted}, this target's is {have}"
            for what, drafted, have in pairs
            if drafted != have
        ]
        if max(self.target_layer_ids, default=0) >= num_layers:
            found.append(f"the drafter taps layer {max(self.target_layer_ids)}, this target has {num_layers} layers")
        return found

    @property
    def untrained(self) -> str | None:
        """Return a feature of the drafter that volley decodes with, but neither trains nor exports; ``None`` if it has none."""
        parts = [
            (self.head is not None and self.head.type == "selector", "DFlash 2's selector"),
            (self.head is not None and self.head.type == "domino", "Domino's head"),
            (self.conv_kernel_size is not None, "DFlash 2's convolutions"),
            (bool(self.causal_layers), "causal blocks"),
            (self.eagle is not None, "EAGLE-3's layer"),
            (self.target_hidden_size is not None, "a width of its own"),
        ]
        return " and ".join(name for there, name in parts if there) or None

    @property
    def is_trained_here(self) -> bool:
        """Return whether volley trains such drafters: none with tables of transitions, none that draft from the anchor."""
        has_tables = self.head is not None and self.head.type == "dspark"
        return self.untrained is None and not has_tables and not self.sample_from_anchor

    @property
    def own_keys(self) -> dict[str, Any]:
        """Return the keys that every format's config has for volley alone; other programs ignore them."""
        own = {"target_fingerprint": self.target_fingerprint, "draft_window": self.draft_window}
        return {key: value for key, value in own.items() if value}

    def to_json(self) -> dict[str, Any]:
        """Return the config in z-lab's form; keys that readers expect in different places are in both."""
        rope = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
                **({"causal": False} if self.sliding_window else {}),  # other programs treat sliding layers as causal
            },
            **{name: getattr(self, name) for name in _SHAPE},
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": self.hidden_act,
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            "layer_types": list(self.layer_types),
            "attention_bias": self.attention_bias,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            **({"draft_vocab_size": self.draft_vocab_size} if self.draft_vocab_size else {}),
            **({"head": self.head.to_json()} if self.head else {}),
            **({"sample_from_anchor": True} if self.sample_from_anchor else {}),
            **({"target_hidden_size": self.target_hidden_size} if self.target_hidden_size else {}),
            **({"final_logit_softcapping": cap} if (cap := self.final_logit_softcapping) else {}),
            **({"causal_layers": list(self.causal_layers)} if self.causal_layers else {}),
            **self.own_keys,
            **{key: getattr(self, key) for key in CONVOLUTION_KEYS if getattr(self, key) is not None},
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "DrafterConfig":
        """Parse a z-lab config of any kind; unknown and missing keys are errors that name them."""
        raw = plain(raw)
        own = set(cls.__dataclass_fields__) - {"mask_token_id", "target_layer_ids", "own_embedding", "confidence_width"}
        read = own | {"dflash_config", "rope_parameters", "use_sliding_window"}
        check_keys("drafter config key", [key for key in raw if key not in _IGNORED_KEYS], read)
        dflash = raw.get("dflash_config")
        if not isinstance(dflash, Mapping):
            raise ConfigError("drafter config has no 'dflash_config'; is this a DFlash drafter in z-lab's format?")
        check_keys("dflash_config key", dflash, _DFLASH_KEYS)
        values = {key: raw[key] for key in own if key in raw}
        for key in ("rope_parameters", "rope_scaling", "layer_types", "causal_layers", "eagle"):
            if (
                not isinstance(raw.get(key), dict if key.startswith(("rope", "eagle")) else list)
                and raw.get(key) is not None
            ):
                raise ConfigError(f"drafter config: {key} is {raw[key]!r}, which is not of the type it must have")
        rope = raw.get("rope_parameters") or {}
        values.setdefault("rope_theta", rope.get("rope_theta", 10_000.0))
        scaling = {("rope_type" if k == "type" else k): v for k, v in (raw.get("rope_scaling") or rope).items()}
        scaling.pop("rope_theta", None)
        values["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
        values.update({key: dflash[key] for key in ("mask_token_id", "block_size") if key in dflash})
        if "target_layer_ids" in dflash:
            taps = dflash["target_layer_ids"]
            if not isinstance(taps, list) or not all(isinstance(tap, int) for tap in taps):
                raise ConfigError(f"dflash_config.target_layer_ids is {taps!r}; it must be a list of layer numbers")
            values["target_layer_ids"] = tuple(taps)
        if dflash.get("use_swa"):
            values["sliding_window"] = dflash.get("swa_window_size", raw.get("sliding_window"))
        _check_types(values)
        values["layer_types"] = tuple(raw.get("layer_types") or ())
        values["causal_layers"] = tuple(map(bool, raw.get("causal_layers") or ()))
        if dflash.get("use_swa"):
            values["layer_types"] = ("sliding_attention",) * int(raw.get("num_hidden_layers", 0))
        if "sliding_attention" not in values["layer_types"]:
            values["sliding_window"] = None
        if raw.get("head") is not None:
            values["head"] = HeadConfig.from_json(raw["head"])
        if raw.get("eagle") is not None:
            check_keys("eagle key", raw["eagle"], EagleConfig.__dataclass_fields__)
            values["eagle"] = EagleConfig(**raw["eagle"])
        required = {name for name, f in cls.__dataclass_fields__.items() if f.default is f.default_factory}
        missing = sorted(required - set(values))
        if missing:
            raise ConfigError(
                f"drafter config lacks {', '.join(map(repr, missing))}; these cannot be guessed, "
                "take them from the training run that made the checkpoint"
            )
        return cls(**values)


_SHAPE = (
    "num_target_layers", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
_COUNTS = (
    *_SHAPE, "block_size", "mask_token_id", "max_position_embeddings", "sliding_window", "draft_vocab_size",
    "target_hidden_size", "draft_window", *CONVOLUTION_KEYS,
)  # fmt: skip
_MAY_BE_NULL = (
    "num_target_layers", "sliding_window", "draft_vocab_size", "target_hidden_size", "draft_window", *CONVOLUTION_KEYS,
)  # fmt: skip


def _check_types(values: Mapping[str, Any]) -> None:
    """Refuse values of wrong types, because a config may come from anywhere."""
    for name in _COUNTS:
        value, least = values.get(name, 1), 0 if name == "mask_token_id" else 1
        if value is None and name in _MAY_BE_NULL:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"drafter config: {name} is {value!r}; it must be an integer of at least {least}")
    if not isinstance(values.get("attention_bias", False), bool):
        raise ConfigError(f"drafter config: attention_bias is {values['attention_bias']!r}; it must be true or false")
    if not isinstance(values.get("target_fingerprint"), str | None):
        raise ConfigError(f"drafter config: target_fingerprint is {values['target_fingerprint']!r}; it must be text")
    for name in ("rms_norm_eps", "rope_theta"):
        value = values.get(name, 1.0)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ConfigError(f"drafter config: {name} is {value!r}; it must be a number above 0")


@dataclass(frozen=True)
class Checkpoint:
    """Stored drafter: config and tensors by volley's names, in their stored dtype."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]

    @property
    def dtype(self) -> str:
        return str(self.tensors["fc.weight"].dtype).removeprefix("torch.")
