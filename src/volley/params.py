"""Parameters of a request: sampling, and options of diffusion language models."""

import hashlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, Self, get_args

from volley.errors import ConfigError, check_keys, names_unknown_fields, unknown_key
from volley.grammar import Grammar

DiffusionMode = Literal["diffusion", "autoregressive", "self"]
Strategy = Literal[
    "low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded", "entropy_renoise"
]


@names_unknown_fields
@dataclass(frozen=True, kw_only=True)
class DiffusionParams:
    """Options of a diffusion language model for one request. ``None`` is the checkpoint's own setting (``docs/diffusion.md``).

    ``mode``: denoise canvases, decode one token at a time, or draft with canvases and verify token by token (``self``).
    ``canvas_length`` tokens are denoised together in at most ``max_steps`` passes. ``strategy`` selects the tokens that a pass
    reveals: those with a probability above ``threshold`` within the current ``sub_block``; a fixed number; the leftmost; or as
    many as ``entropy_bound`` (nats) allows. ``entropy_renoise`` is DiffusionGemma's strategy: temperatures from ``t_max`` to
    ``t_min``, until the best tokens have not changed for ``stability_threshold`` passes and the mean entropy is below
    ``confidence_threshold``.
    """

    mode: DiffusionMode | None = None
    canvas_length: int | None = None
    max_steps: int | None = None
    strategy: Strategy | None = None
    threshold: float | None = None
    sub_block: int | None = None
    entropy_bound: float | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: int | None = None
    confidence_threshold: float | None = None
    stream_drafts: bool | None = None
    """Stream the canvas after each pass as a :class:`CanvasDraft`."""

    def __post_init__(self) -> None:
        for name in [own.name for own in fields(self)]:
            value, (want, kind) = getattr(self, name), _KINDS.get(name, ("a number", Real))
            if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
                raise ConfigError(f"diffusion.{name} is {value!r}; it must be {want}")
        for name, known in (("mode", get_args(DiffusionMode)), ("strategy", get_args(Strategy))):
            if (value := getattr(self, name)) is not None and value not in known:
                raise unknown_key(f"diffusion {name}", str(value), known)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not (value >= least and math.isfinite(value)):
                raise ConfigError(f"DiffusionParams.{name} is {value!r}; it must be a finite number ≥ {least}")
        if self.threshold is not None and self.threshold > 1:
            raise ConfigError(f"DiffusionParams.threshold is {self.threshold!r}; it is a probability, at most 1")
        if self.t_min is not None and self.t_max is not None and self.t_min > self.t_max:
            raise ConfigError(
                f"DiffusionParams: t_min {self.t_min} is above t_max {self.t_max}; steps go from t_max down"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Create the options from settings by name; an error for an unknown one names the nearest known."""
        check_keys("diffusion setting", values, [field.name for field in fields(cls)])
        return cls(**values)

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Self:
        """Create the options from words such as ``threshold=0.8``."""
        values: dict[str, Any] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals:
                raise ConfigError(f"{word!r} sets nothing; write NAME=VALUE, such as threshold=0.8")
            values[name] = value
            for read in (float, json.loads):  # JSON has no .8
                with suppress(ValueError):
                    values[name] = read(value)
        return cls.from_mapping(values)

    def over(self, defaults: "DiffusionParams") -> "DiffusionParams":
        """Return these settings, with ``defaults`` for those not set."""
        said = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        return replace(defaults, **said)


_KINDS: dict[str, tuple[str, type]] = {
    **dict.fromkeys(("mode", "strategy"), ("a string", str)),
    **dict.fromkeys(("canvas_length", "max_steps", "sub_block", "stability_threshold"), ("a whole number", Integral)),
    "stream_drafts": ("true or false", bool),
}
_LEAST: dict[str, float] = {
    **dict.fromkeys(("canvas_length", "max_steps", "sub_block"), 1),
    **dict.fromkeys(("threshold", "confidence_threshold", "stability_threshold"), 0),
    "entropy_bound": 0,
    "t_min": 0,
    "t_max": 1e-3,
}


_NUMBERS: dict[str, tuple[type, bool]] = {
    **dict.fromkeys(("top_k", "max_tokens", "top_logprobs", "priority"), (Integral, False)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty"), (Real, False)),
    **dict.fromkeys(("frequency_penalty", "repetition_penalty"), (Real, False)),
    "prompt_logprobs": (Integral, True),
    "draft_temperature": (Real, True),
}
"""Type of each number, and whether it may be ``None``."""


@names_unknown_fields
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with OpenAI's names where it has them.

    ``temperature`` 0 is greedy, and so is anything below 1e-5, by which logits cannot be divided. ``top_k`` 0, ``top_p`` 1 and
    ``min_p`` 0 keep every token. ``seed`` ``None`` draws one. ``max_tokens`` 0 only reads the prompt.

    ``stop`` strings end the text before they appear in it, or before tokens that spell them but are hidden from the text.
    ``stop_token_ids`` add to the model's own end tokens, which ``ignore_eos`` switches off; the text hides them. Without
    ``skip_special_tokens`` the text shows other special tokens.

    ``logprobs`` records the log-probability of each chosen token under the target's unmodified distribution, and those of the
    ``top_logprobs`` likeliest. ``prompt_logprobs`` (``None``: none) does so for every prompt token but the first, with that many
    of the likeliest; such a prompt does not use the prefix cache.

    ``presence_penalty`` and ``frequency_penalty`` (each in [-2, 2]) lower the logits of tokens in the output.
    ``repetition_penalty`` (1: none) divides those of tokens in prompt or output. ``logit_bias`` maps token ids to values added to
    their logits.

    ``draft_temperature`` (``None``: equal to ``temperature``) changes speed, never the distribution. Requests of a lower
    ``priority`` are served first and preempted last.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias; a mapping is converted."""
    draft_temperature: float | None = None
    priority: int = 0
    grammar: Grammar | None = None
    """Constraint on the whole text. The request ends when the text is complete, or at the model's end token where the text may
    end."""
    rules: tuple[Any, ...] = ()
    """Factories of custom token rules: ``make(prompt, vocab_size, device)`` returns a ``TokenRule`` (``decode/rules.py``)."""
    diffusion: DiffusionParams | None = None
    """Options of diffusion language models; a mapping is converted."""

    def __post_init__(self) -> None:
        given: object = self.stop
        stop = (given,) if isinstance(given, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        self._take_numbers()
        for name, (kind, may_be_none) in _NUMBERS.items():
            value, what = getattr(self, name), "a whole number" if kind is Integral else "a number"
            if isinstance(value, bool) or not (isinstance(value, kind) or (value is None and may_be_none)):
                raise ConfigError(f"SamplingParams.{name} is {value!r}; it must be {what}" + " or None" * may_be_none)
        diffusion: object = self.diffusion
        if isinstance(diffusion, Mapping):
            object.__setattr__(self, "diffusion", DiffusionParams.from_mapping(diffusion))
        for name in ("temperature", "draft_temperature"):
            if 0 < (getattr(self, name) or 0) < 1e-5:
                object.__setattr__(self, name, 0.0)
        checks = [
            ("temperature", 0 <= self.temperature < math.inf, "a finite number ≥ 0"),
            ("top_k", self.top_k >= 0, "0 (keep all) or a positive count"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("max_tokens", self.max_tokens >= 0, "0 (only read the prompt) or a positive count"),
            ("stop", all(isinstance(own, str) and own for own in self.stop), "non-empty strings"),
            ("logprobs", isinstance(self.logprobs, bool), "True or False; top_logprobs asks for alternatives"),
            ("top_logprobs", self.top_logprobs >= 0, "0 or a positive count"),
            ("top_logprobs", self.logprobs or not self.top_logprobs, "0 without logprobs=True"),
            ("prompt_logprobs", (self.prompt_logprobs or 0) >= 0, "None, 0 or a positive count"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "in [0.01, 100]"),
            ("logit_bias", all(-100 <= bias <= 100 for _, bias in self.logit_bias), "biases in [-100, 100]"),
            (
                "grammar",
                isinstance(self.grammar, Grammar | None),
                "a Grammar, such as Grammar.json_schema({...}), or None",
            ),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "a non-negative 63-bit integer"),
            ("draft_temperature", 0 <= (self.draft_temperature or 0) < math.inf, "a finite number ≥ 0, or None"),
        ]
        for name, good, want in checks:
            if not good:
                raise ConfigError(f"SamplingParams.{name} is {getattr(self, name)!r}; it must be {want}")

    def _take_numbers(self) -> None:
        """Convert other integer types, such as NumPy's, to Python's. Token ids in biases may be strings, as in JSON."""
        try:
            if self.seed is not None:
                object.__setattr__(self, "seed", operator.index(self.seed))
            ends: Any = self.stop_token_ids
            ends = (ends,) if isinstance(ends, Integral) else tuple(map(operator.index, ends or ()))
            object.__setattr__(self, "stop_token_ids", ends)
            given: object = self.logit_bias
            pairs = given.items() if isinstance(given, Mapping) else self.logit_bias
            bias = tuple((int(token) if isinstance(token, str) else operator.index(token), own) for token, own in pairs)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"SamplingParams: seed, stop_token_ids and the tokens of logit_bias must be whole numbers ({error})"
            ) from None
        if len(dict(bias)) < len(bias):
            raise ConfigError("SamplingParams.logit_bias has two values for one token; give each token once")
        object.__setattr__(self, "logit_bias", bias)

    @property
    def distribution(self) -> tuple[float | None, ...]:
        """Return the parameters that turn logits into a distribution, for target and drafter. Requests that share them are
        sampled together."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.draft_temperature

    @property
    def is_whole(self) -> bool:
        """Return whether no truncation removes tokens from the distribution."""
        return self.top_k <= 0 and self.top_p >= 1 and self.min_p <= 0

    @property
    def is_penalised(self) -> bool:
        """Return whether any penalty changes logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def within(self, most: int) -> "SamplingParams":
        """Return the parameters of an answer of at most ``most`` tokens."""
        return self if self.max_tokens <= most else replace(self, max_tokens=most)

    def for_choice(self, index: int) -> "SamplingParams":
        """Return the parameters of answer ``index`` to a prompt, which differ in the seed. Index 0 keeps the request's seed."""
        if self.seed is None or index == 0:
            return self
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(digest) >> 1)
