"""What passes between the layers: sampling parameters, proposals, verdicts and results."""

import hashlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from volley.errors import ConfigError, check_keys, names_unknown_fields, unknown_key
from volley.grammar import Grammar

FinishReason = Literal["stop", "length", "abort", "error"]
DiffusionMode = Literal["diffusion", "autoregressive", "self"]
Strategy = Literal[
    "low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded", "editing", "entropy_renoise"
]


@names_unknown_fields
@dataclass(frozen=True, kw_only=True)
class DiffusionParams:
    """How a diffusion language model answers one request. ``None`` is the checkpoint's own setting (``docs/diffusion.md``).

    ``mode``: by denoising canvases, one token at a time, or by drafting with the one and verifying with the other (``self``).
    ``canvas_length`` tokens are denoised together in at most ``max_steps`` passes. ``strategy`` says which tokens a pass
    reveals: those with a probability above ``threshold``, of which ``sub_block`` limits where they are looked for; a fixed
    number; the leftmost; or as many as ``entropy_bound`` (nats) allows. ``editing`` replaces revealed tokens where another is
    likelier than ``edit_threshold``. ``entropy_renoise`` is DiffusionGemma's: temperatures from ``t_max`` to ``t_min``, until
    the best tokens have been the same for ``stability_threshold`` passes and the mean entropy is below
    ``confidence_threshold``.
    """

    mode: DiffusionMode | None = None
    canvas_length: int | None = None
    max_steps: int | None = None
    strategy: Strategy | None = None
    threshold: float | None = None
    sub_block: int | None = None
    entropy_bound: float | None = None
    edit_threshold: float | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: int | None = None
    confidence_threshold: float | None = None
    stream_drafts: bool | None = None
    """Show what stands on the canvas after each pass, in a stream: :class:`CanvasDraft`."""

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
        for name in ("threshold", "edit_threshold"):
            if (value := getattr(self, name)) is not None and value > 1:
                raise ConfigError(f"DiffusionParams.{name} is {value!r}; it is a probability, at most 1")
        if self.t_min is not None and self.t_max is not None and self.t_min > self.t_max:
            raise ConfigError(
                f"DiffusionParams: t_min {self.t_min} is above t_max {self.t_max}; steps go from t_max down"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From settings by name; an unknown one is an error that names the nearest known."""
        check_keys("diffusion setting", values, [field.name for field in fields(cls)])
        return cls(**values)

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Self:
        """From words such as ``threshold=0.8``."""
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
        """These settings, and those of ``defaults`` where nothing was said."""
        said = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        return replace(defaults, **said)


_KINDS: dict[str, tuple[str, type]] = {
    **dict.fromkeys(("mode", "strategy"), ("a string", str)),
    **dict.fromkeys(("canvas_length", "max_steps", "sub_block", "stability_threshold"), ("a whole number", Integral)),
    "stream_drafts": ("true or false", bool),
}
_LEAST = {
    "canvas_length": 1,
    "max_steps": 1,
    "threshold": 0,
    "sub_block": 1,
    "entropy_bound": 0,
    "edit_threshold": 0,
    "t_min": 0,
    "t_max": 1e-3,
    "stability_threshold": 0,
    "confidence_threshold": 0,
}


@names_unknown_fields
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Names are OpenAI's where OpenAI has one.

    ``temperature`` 0 is greedy, and so is anything below 1e-5, which logits could not be divided by. ``top_k`` 0, ``top_p`` 1
    and ``min_p`` 0 keep every token. ``seed`` ``None`` draws one.
    ``stop`` strings end the text before they appear in it, or before tokens that they spell and that the text does not show;
    ``stop_token_ids`` add to the model's own end tokens, which
    ``ignore_eos`` switches off; the text shows none of them. Without ``skip_special_tokens`` it shows other special tokens.
    ``logprobs`` records the log-probability of each chosen token under the target's
    unmodified distribution, and of the ``top_logprobs`` likeliest beside it. ``prompt_logprobs`` (``None``: none) does the
    same for every token of the prompt but the first, with so many of the likeliest; such a prompt takes nothing from the
    prefix cache. ``max_tokens`` 0 only reads the prompt. ``presence_penalty`` and
    ``frequency_penalty`` (each in [-2, 2]) lower the logits of tokens the output has, ``repetition_penalty`` (1: none)
    divides those of tokens that prompt or output have, ``logit_bias`` maps token ids to what is added to their logits.
    ``draft_temperature`` (``None``: the same as ``temperature``) and ``draft_adapter`` (the name of an adapter that the engine
    has loaded; ``None``: the drafter as it is) change speed, never the distribution. Requests of a lower ``priority`` are
    served first, and lose their pages last.
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
    """Pairs of token id and bias; a mapping will do."""
    draft_temperature: float | None = None
    draft_adapter: str | None = None
    priority: int = 0
    grammar: Grammar | None = None
    """What the whole text must be. The request ends where the text is complete, or by the model's end token where it may be."""
    rules: tuple[Any, ...] = ()
    """Makers of token rules of one's own: ``make(prompt, vocab_size, device)`` gives a ``TokenRule`` (``decode/rules.py``)."""
    diffusion: DiffusionParams | None = None
    """For diffusion language models; a mapping will do."""

    def __post_init__(self) -> None:
        given: object = self.stop
        stop = (given,) if isinstance(given, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._take_numbers()
        diffusion: object = self.diffusion
        if isinstance(diffusion, Mapping):
            object.__setattr__(self, "diffusion", DiffusionParams.from_mapping(diffusion))
        for name in ("temperature", "draft_temperature"):
            if 0 < (getattr(self, name) or 0) < 1e-5:
                object.__setattr__(self, name, 0.0)
        checks = [
            ("temperature", self.temperature >= 0 and math.isfinite(self.temperature), "a finite number ≥ 0"),
            ("top_k", self.top_k >= 0, "0 (keep all) or a positive count"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("max_tokens", self.max_tokens >= 0, "0 (only read the prompt) or a positive count"),
            ("stop", all(self.stop), "non-empty strings"),
            ("top_logprobs", self.top_logprobs >= 0, "0 or a positive count"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or self.prompt_logprobs >= 0,
                "None, 0 or a positive count",
            ),
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
            (
                "draft_temperature",
                self.draft_temperature is None
                or (self.draft_temperature >= 0 and math.isfinite(self.draft_temperature)),
                "a finite number ≥ 0, or None",
            ),
        ]
        for name, good, want in checks:
            if not good:
                raise ConfigError(f"SamplingParams.{name} is {getattr(self, name)!r}; it must be {want}")

    def _take_numbers(self) -> None:
        """Whole numbers of other kinds, such as NumPy's, become Python's; tokens of biases may be texts, as in JSON."""
        try:
            if self.seed is not None:
                object.__setattr__(self, "seed", operator.index(self.seed))
            given: object = self.logit_bias
            pairs = given.items() if isinstance(given, Mapping) else self.logit_bias
            bias = tuple((int(token) if isinstance(token, str) else operator.index(token), own) for token, own in pairs)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"SamplingParams: seed and the tokens of logit_bias must be whole numbers ({error})"
            ) from None
        if len(dict(bias)) < len(bias):
            raise ConfigError("SamplingParams.logit_bias has two values for one token; give each token once")
        object.__setattr__(self, "logit_bias", bias)

    @property
    def distribution(self) -> tuple[float | None, ...]:
        """What turns logits into a distribution, for target and drafter; requests that share it are sampled together."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.draft_temperature

    @property
    def is_whole(self) -> bool:
        """Whether every token keeps its place in the distribution."""
        return self.top_k <= 0 and self.top_p >= 1 and self.min_p <= 0

    @property
    def is_penalised(self) -> bool:
        """Whether any penalty changes logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def within(self, room: int) -> "SamplingParams":
        """The parameters of an answer that there is room for: of ``room`` tokens at most."""
        return self if self.max_tokens <= room else replace(self, max_tokens=room)

    def for_choice(self, index: int) -> "SamplingParams":
        """The parameters of one of several answers to a prompt: the same, with a seed of its own. 0 keeps the request's."""
        if self.seed is None or index == 0:
            return self
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(digest) >> 1)


@dataclass(slots=True)
class Late:
    """A draft that only the device knows yet (``decode/late.py``)."""

    token_ids: Tensor
    """``[k]``"""
    confidence: Tensor | None = None
    """``[k]`` in double precision, or ``None`` where nobody asks for it."""

    def first(self, size: int) -> "Late":
        return Late(self.token_ids[:size], None if self.confidence is None else self.confidence[:size])


@dataclass(slots=True)
class Proposal:
    """What the drafter proposes to follow one request's anchor.

    ``token_ids`` ``[k]``; ``draft_probs`` ``[k, n]`` is the distribution each token was drawn from given the ones before
    it, after temperature and truncation, over the tokens ``drafted [n]`` or the whole vocabulary; ``None`` when no such
    distribution is known (multi-step denoising, trees) or needed (greedy). ``parents [k]`` makes the tokens a tree:
    ``parents[i]`` is what token i follows, 0 for the anchor and ``j + 1`` for token ``j < i``. ``None``: every token follows
    the one before it.
    """

    token_ids: list[int]
    draft_probs: Tensor | None = None
    parents: tuple[int, ...] | None = None
    confidence: list[float] = field(default_factory=list)
    """The drafter's largest probability in each slot, in its first pass, if it was asked for. In a greedy walk it is the
    probability given the token before, among the candidates. In a tree it is each node's probability, ancestors included."""
    late: Late | None = None
    """Where the tokens are until the host has read them; ``token_ids`` are zeros till then."""
    drafted: Tensor | None = None

    def first(self, size: int) -> "Proposal":
        """The first tokens of a chain. What is known of the confidences stays known of all."""
        known, late = self.draft_probs, self.late
        probs = None if known is None else known[:size]
        return replace(self, token_ids=self.token_ids[:size], draft_probs=probs, late=late and late.first(size))


@dataclass(slots=True)
class Lattice:
    """The candidates of every slot of one block, and each one's logit after every candidate of the slot before.

    ``tokens [k, C]`` are distinct within a slot. ``scores [k, C, C]``: ``scores[i, c, j]`` is the drafter's logit of
    ``tokens[i, j]`` after ``tokens[i − 1, c]``; in slot 0, which follows the anchor, all c are alike. ``[k, 1, C]`` where no
    slot depends on the one before.
    """

    tokens: NDArray[np.int64]
    scores: NDArray[np.float32]


@dataclass(slots=True)
class Verdict:
    """What verification keeps of one proposal: ``accepted`` draft tokens, then the target's own next token."""

    accepted: int
    token_ids: list[int]
    """The accepted draft tokens followed by the bonus token: ``accepted + 1`` tokens."""
    path: tuple[int, ...] | None = None
    """The accepted nodes of a tree, numbered as in ``Proposal.parents``; ``None`` for a chain, which keeps its first tokens."""


@dataclass
class GenerationStats:
    """Where the time of one request went. Seconds are wall time of the steps the request took part in."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    accepted_lengths: list[int] = field(default_factory=list)
    """Tokens gained by each decoding cycle, bonus token included."""
    block_sizes: list[int] = field(default_factory=list)
    """Tokens verified by each decoding cycle, anchor included."""
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    walk_seconds: float = 0.0
    """The part of ``draft_seconds`` that a sequential head takes. On a GPU a lattice waits there for the drafter to finish, and a
    walk is only started."""
    verify_seconds: float = 0.0
    time_to_first_token: float = 0.0
    total_seconds: float = 0.0
    preemptions: int = 0
    denoising_steps: int = 0
    """Passes that denoised a canvas of this request."""
    commit_passes: int = 0
    """Passes of a diffusion request behind its prompt that denoised nothing: they committed a block, or verified a draft."""
    canvas_steps: list[int] = field(default_factory=list)
    """Passes over each canvas whose tokens came out."""
    first_tokens: int = 1
    """Output tokens that came together after ``time_to_first_token``: more than one from a canvas."""
    last_tokens: int = 0
    """Output tokens of the last pass that brought any."""

    def add(self, draft: float, walk: float, verify: float) -> None:
        """The seconds of one more decoding cycle."""
        self.draft_seconds += draft
        self.walk_seconds += walk
        self.verify_seconds += verify

    @property
    def canvases(self) -> int:
        """Canvases whose tokens came out, without drafts of mode ``self``."""
        return len(self.canvas_steps)

    @property
    def acceptance_length(self) -> float:
        """τ: mean tokens gained per cycle of draft and verification, bonus token included; 1.0 is plain decoding."""
        return sum(self.accepted_lengths) / len(self.accepted_lengths) if self.accepted_lengths else 1.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens gained per target pass behind the prompt; of a request without a canvas τ."""
        passes = self.denoising_steps + self.commit_passes
        return self.output_tokens / passes if passes else self.acceptance_length

    @property
    def tokens_per_forward(self) -> float:
        """Output tokens per denoising pass, commits not counted: transformers' definition; 0 without a canvas."""
        return self.output_tokens / self.denoising_steps if self.denoising_steps else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Output tokens behind those that came first, per second after these; all per second where all came at once."""
        seconds, tokens = self.total_seconds - self.time_to_first_token, self.output_tokens - self.first_tokens
        if tokens == 0 and self.first_tokens > 1:
            return self.output_tokens / self.total_seconds
        return tokens / seconds if seconds > 0 and tokens > 0 else 0.0


@dataclass
class GenerationResult:
    """One finished request."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: GenerationStats
    logprobs: list[float] | None = None
    """Log-probability (natural) of each output token, if asked for."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """The likeliest tokens and their log-probabilities where each output token stands, if asked for."""
    prompt_logprobs: list[float] | None = None
    """Log-probability of each prompt token but the first, given those before it, if asked for."""
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
    """The likeliest tokens where each of these stands."""
    error: str | None = None
    """Why the request ended, if ``finish_reason`` is "error": its logits are not finite. The tokens before are right."""


MASKED = "░"
"""Stands for a mask in the text of a draft."""


@dataclass(frozen=True)
class CanvasDraft:
    """What stands on a canvas behind the text so far; all of it may still change."""

    step: int
    """Passes over the canvas so far."""
    text: str
    """Masks are shown as :data:`MASKED`."""
    token_ids: list[int | None]
    """``None`` where a mask stands."""


@dataclass
class TextChunk:
    """A piece of streamed text. ``from_draft`` tells whether its tokens had been drafted, or found in the text.

    With ``DiffusionParams(stream_drafts=True)`` chunks come after other passes too: without text, but with a ``draft``, where it
    is another than the one before. It takes that one's place, and gives way to the next chunk.
    """

    text: str
    token_ids: list[int]
    from_draft: bool
    draft: CanvasDraft | None = None
