"""Output of a request: result, statistics and chunks of streamed text."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass
class GenerationStats:
    """Statistics of one request. Seconds are wall time of the steps in which it took part."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    accepted_lengths: list[int] = field(default_factory=list)
    """Tokens gained by each decoding cycle, bonus token included."""
    block_sizes: list[int] = field(default_factory=list)
    """Tokens verified by each decoding cycle, anchor included."""
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    walk_seconds: float = 0.0
    """Part of ``draft_seconds`` that a sequential head takes. On a GPU, for a lattice it includes the wait for the drafter,
    and for a walk only the launch."""
    verify_seconds: float = 0.0
    time_to_first_token: float = 0.0
    total_seconds: float = 0.0
    preemptions: int = 0
    denoising_steps: int = 0
    """Number of passes that denoised a canvas of this request."""
    commit_passes: int = 0
    """Number of passes of a diffusion request after its prompt that denoised nothing: they committed a block or verified a
    draft."""
    canvas_steps: list[int] = field(default_factory=list)
    """Number of passes over each canvas whose tokens were output."""
    first_tokens: int = 1
    """Number of output tokens at ``time_to_first_token``: more than one from a canvas."""
    last_tokens: int = 0
    """Number of output tokens of the last pass that yielded any."""

    def add(self, draft: float, walk: float, verify: float) -> None:
        """Add the seconds of one decoding cycle."""
        self.draft_seconds += draft
        self.walk_seconds += walk
        self.verify_seconds += verify

    @property
    def canvases(self) -> int:
        """Number of canvases whose tokens were output, without drafts of mode ``self``."""
        return len(self.canvas_steps)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens gained per cycle of draft and verification (τ), bonus token included; 1.0 is plain decoding."""
        return sum(self.accepted_lengths) / len(self.accepted_lengths) if self.accepted_lengths else 1.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens gained per target pass after the prompt; τ for a request without a canvas."""
        passes = self.denoising_steps + self.commit_passes
        return self.output_tokens / passes if passes else self.acceptance_length

    @property
    def tokens_per_forward(self) -> float:
        """Output tokens per denoising pass without commits, as transformers defines it; 0 without a canvas."""
        return self.output_tokens / self.denoising_steps if self.denoising_steps else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Output tokens after the first ones per second after these; if all came at once, all tokens per second."""
        seconds, tokens = self.total_seconds - self.time_to_first_token, self.output_tokens - self.first_tokens
        if tokens == 0 and self.first_tokens > 1:
            return self.output_tokens / self.total_seconds
        return tokens / seconds if seconds > 0 and tokens > 0 else 0.0


@dataclass
class GenerationResult:
    """Result of one finished request."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: GenerationStats
    logprobs: list[float] | None = None
    """Natural log-probability of each output token, if requested."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """Likeliest tokens and their log-probabilities at each output token, if requested."""
    prompt_logprobs: list[float] | None = None
    """Log-probability of each prompt token except the first, given those before it, if requested."""
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
    """Likeliest tokens at each of these prompt tokens."""
    error: str | None = None
    """Error message if ``finish_reason`` is "error": the logits were not finite. The tokens before are correct."""


MASKED = "░"
"""Character shown for a mask in a draft's text."""


@dataclass(frozen=True)
class CanvasDraft:
    """Current canvas after the text so far; all of it may still change."""

    step: int
    """Number of passes over the canvas so far."""
    text: str
    """Text of the canvas, with masks as :data:`MASKED`."""
    token_ids: list[int | None]
    """Token ids of the canvas; ``None`` for a mask."""


@dataclass
class TextChunk:
    """Piece of streamed text. ``from_draft`` is true if its tokens were drafted, by the drafter or by prompt lookup.

    With ``DiffusionParams(stream_drafts=True)`` chunks follow other passes too: without text, but with a ``draft`` that differs
    from the previous one. Each draft replaces the previous one and is replaced by the next chunk.
    """

    text: str
    token_ids: list[int]
    from_draft: bool
    draft: CanvasDraft | None = None
