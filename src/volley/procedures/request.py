"""Define a request, from arrival to result, and its decoding method, which turns target passes into tokens."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from volley.decode.canvas import Canvas
from volley.decode.detokenize import Detokenizer
from volley.decode.lookup import CERTAIN, Lookup, found_confidence
from volley.decode.rules import TokenRule, constraints, forced_tokens
from volley.decode.sampling import PositionNoise
from volley.decode.stops import StopFinder
from volley.decode.work import NO_DRAFT, Ask, Kind, Work
from volley.errors import NonFiniteError
from volley.memory.batch import Segment
from volley.memory.kv_cache import BlockTable
from volley.policies.base import View
from volley.types import (
    MASKED,
    CanvasDraft,
    FinishReason,
    GenerationResult,
    GenerationStats,
    SamplingParams,
    TextChunk,
)


class Procedure(ABC):
    """Base class of decoding methods. One object serves all requests that use it; the state of a request is in the request."""

    reads_late = False
    """True if :meth:`absorb` accepts drafts that are still on the device (``decode/late.py``)."""

    def check(self, request: "Request") -> None:
        """Raise an error for a new request whose parameters are not supported."""

    def prefill_end(self, request: "Request") -> int:
        """Return the number of positions to compute before decoding: the prompt, or after a preemption everything but the
        anchor."""
        return request.num_prompt if request.num_output == 0 else request.length - 1

    def matchable(self, request: "Request") -> int:
        """Return how many of the first tokens may come from the prefix cache: all but the last, whose logits are needed."""
        return request.length - 1

    def most_tokens(self, num_prompt: int, context_length: int, params: SamplingParams) -> int:
        """Return how long a request may become, prompt included, if ``context_length`` tokens fit."""
        return context_length

    def reach(self, num_prompt: int, max_length: int, params: SamplingParams) -> int:
        """Return the number of positions that a request of ``max_length`` tokens needs."""
        return max_length

    def is_followed(self, params: SamplingParams) -> bool:
        """Return True if draft K/V are made for the text, for this request or for others that share its pages."""
        return True

    def prefix_root(self, params: SamplingParams, page_size: int) -> bytes | None:
        """Return the root of the request's page hashes. Requests with one root share pages; with ``None`` no pages are shared."""
        return b""

    def view(self, request: "Request", largest: int) -> View | None:
        """Return the policy's view, with blocks of at most ``largest``; ``None`` if nothing is drafted for this request."""
        return None

    def read(self, request: "Request", num_tokens: int) -> Work["Request"]:
        """Make the work that computes the next ``num_tokens`` of a prompt, or of tokens whose K/V a preemption dropped."""
        view = self.view(request, 1)
        ask = NO_DRAFT if view is None else view.draft(0)
        return Work(request, ask, Kind.PREFILL, num_tokens)

    @abstractmethod
    def next_work(self, request: "Request", ask: Ask) -> Work["Request"]:
        """Make the work of a request that has been read; ``ask`` is the policy's decision about its view."""

    @abstractmethod
    def segment(self, work: Work["Request"]) -> tuple[list[int], Segment]:
        """Return the tokens that the target computes for a work, and their segment."""

    @abstractmethod
    def num_rows(self, work: Work["Request"]) -> int:
        """Return how many of the segment's last tokens need logits."""

    @abstractmethod
    def absorb(self, works: Sequence[Work["Request"]], logits: Tensor) -> None:
        """Fill in the verdict of every work from its rows of ``logits [R, V]``: tokens to emit and K/V to keep."""


@dataclass(eq=False, slots=True)
class Request:
    """One prompt being answered.

    ``token_ids`` holds prompt and output. K/V of both models exist for positions ``[0, computed)``. Outside a step, a request
    that is decoding has ``computed == len(token_ids) - 1``: its last token is the anchor of the next cycle.
    """

    request_id: int
    token_ids: list[int]
    params: SamplingParams
    noise: PositionNoise
    max_length: int
    """Number of tokens, prompt included, at which the request ends for length."""
    stop_token_ids: frozenset[int]
    detokenizer: Detokenizer
    table: BlockTable
    draft_table: BlockTable
    """Drafter's pages: the same table, or a separate ring under a draft window."""
    procedure: Procedure
    room: int
    """Number of slots in the pool, which is also the most that this request can use."""
    stops: StopFinder = field(default_factory=lambda: StopFinder((), {}))
    """Finder of its stop strings."""
    rules: tuple[TokenRule, ...] = ()
    """Logits processors: penalties, biases, a grammar, rules of the caller."""
    tapped: Tensor | None = None
    """Target features ``[taps · H]`` of the last token that has K/V; only for drafters that write token by token."""
    rests: bool = False
    """True if drafting is suspended: no draft K/V are made for its tokens."""
    drafts_from: int = 0
    """Length at which drafting begins again after a suspension."""
    plain_at: int = -1
    """Length at which the next token is computed without a draft, because a draft may have made the last pass non-finite."""
    prefix_root: bytes | None = b""
    """Parent of the first page's hash (:meth:`Procedure.prefix_root`); ``None``: its pages are not shared."""
    after: "Request | None" = None
    """Request with the same prompt. This one waits until that prompt has been read, and then shares its pages."""
    num_prompt: int = 0
    computed: int = 0
    canvas: Canvas | None = None
    """Canvas that a diffusion language model is denoising; a preemption does not drop it."""
    shown: tuple[int, int] = (0, 0)
    """Start and step of the canvas when its draft was last streamed."""
    drafted: tuple[str, list[int | None]] = ("", [])
    """Text and tokens of the draft that was streamed last."""
    denoised_at: int = 0
    """Scheduler step in which its canvas was last denoised or committed."""
    lookup: Lookup = field(default_factory=Lookup)
    foreseen: int = 0
    """Position before which a draft may have used the target's noise."""
    page_hashes: list[bytes] = field(default_factory=list)
    text: str = ""
    """Text of the tokens that :meth:`write` has processed."""
    emitted_text: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_ranks: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """Exception raised while its tokens or its text were processed."""
    failure: NonFiniteError | None = None
    """Reason why it ended with ``finish_reason`` "error"."""
    stats: GenerationStats = field(default_factory=GenerationStats)
    chunks: list[TextChunk] = field(default_factory=list)
    unwritten: list[tuple[int, bool]] = field(default_factory=list)
    """Output tokens without text so far, each with True if it comes from a draft."""
    is_streamed: bool = True
    """True if its chunks may be taken. Otherwise no chunks are made, and the tokens of a step become text together."""
    arrived: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.num_prompt = self.stats.prompt_tokens = len(self.token_ids)

    @property
    def anchor(self) -> int:
        return self.token_ids[-1]

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def prefill_end(self) -> int:
        """Number of positions to compute before decoding."""
        return self.procedure.prefill_end(self)

    @property
    def first_unscored(self) -> int | None:
        """First position whose logits are still needed for the prompt's log-probabilities; ``None`` if there is none."""
        scored = len(self.prompt_logprobs)
        return scored if self.params.prompt_logprobs is not None and scored < self.num_prompt - 1 else None

    @property
    def is_decoding(self) -> bool:
        return self.computed == self.prefill_end

    @property
    def remaining(self) -> int:
        """Number of tokens that the request may still emit."""
        return self.max_length - len(self.token_ids)

    def find(self, most: int) -> tuple[list[int], list[float]]:
        """Return at most ``most`` tokens that may come next, found without a model, and the confidence of each.

        The tokens that a grammar forces come first, then what followed these tokens in the text (prompt lookup).
        """
        if not self.rules:
            copied, agreed = self.lookup.find(self.token_ids, most)
            return copied, found_confidence(agreed, len(copied))
        forced = forced_tokens(self.rules, [], most)
        copied, agreed = self.lookup.find(self.token_ids + forced, most - len(forced))
        for rule in constraints(self.rules):
            copied = copied[: max(0, rule.num_allowed(forced + copied) - len(forced))]
        return forced + copied, [CERTAIN] * len(forced) + found_confidence(agreed, len(copied))

    @property
    def is_torn(self) -> bool:
        """True if an error came while its tokens were taken."""
        return self.stats.output_tokens != self.num_output

    def append(self, token_ids: list[int], num_from_draft: int) -> int:
        """Take the tokens of one cycle until the request ends; return how many were taken.

        :meth:`write` makes their text. It is called here only if a stop string may end the request.
        """
        room, rules, has_stop = self.remaining, self.rules, bool(self.params.stop)
        for taken, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            for rule in rules:
                rule.take(token)
            if token in self.stop_token_ids or (rules and any(rule.is_complete for rule in rules)):
                self.finish_reason = "stop"
            elif taken == room:
                self.finish_reason = "length"
            self.unwritten.append((token, taken <= num_from_draft))
            if has_stop:
                self.write()
            if self.finish_reason is not None:
                break
        return taken

    def fail(self) -> None:
        """End the request, because the target's logits for the next token are not finite."""
        self.finish_reason = "error"
        self.failure = NonFiniteError(
            f"the target's logits behind {self.length} tokens are not finite (NaN or infinite), so the request ended; look "
            "for NaN in the weights of the tokens that it uses, or load the target in another dtype, such as float32"
        )

    def write(self) -> None:
        """Make the text of the tokens that have none yet, with a chunk for each. A token whose text fails stays."""
        has_stop = bool(self.params.stop)
        if not (self.is_streamed or has_stop):
            self._write_together()
        while self.unwritten:
            token, from_draft = self.unwritten[0]
            known = len(self.text)
            is_last = len(self.unwritten) == 1 and self.finish_reason in ("stop", "length")
            if token in self.stop_token_ids:
                self.text += self.detokenizer.flush()
            else:
                self.text += self.detokenizer.push(token, last=is_last)
            if has_stop and (end := self.stops.find(self.text, known, token)) is not None:
                self.text, self.finish_reason = self.text[:end], "stop"
            self._emit(token, from_draft=from_draft)
            del self.unwritten[0]

    def _write_together(self) -> None:
        """Make the text of all such tokens at once, without chunks and without stop strings."""
        tokens = [token for token, _ in self.unwritten]
        is_last = self.finish_reason in ("stop", "length")
        if tokens and tokens[-1] in self.stop_token_ids:
            self.text += self.detokenizer.push_all(tokens[:-1]) + self.detokenizer.flush()
        elif tokens:
            self.text += self.detokenizer.push_all(tokens, last=is_last)
        self.unwritten.clear()

    def _emit(self, token: int, *, from_draft: bool) -> None:
        """Emit text, but hold back an end that may begin a stop string."""
        ready = self.stops.ready(self.text) if self.finish_reason is None else len(self.text)
        piece = self.text[self.emitted_text : ready]
        self.emitted_text = max(self.emitted_text, ready)
        self.chunks.append(TextChunk(piece, [token], from_draft))

    def take_chunks(self) -> list[TextChunk]:
        """Return the chunks since the last call, with the canvas draft if it is streamed."""
        self.write()
        chunks, self.chunks = self.chunks, []
        draft = self.take_draft()
        return chunks if draft is None else [*chunks, TextChunk("", [], from_draft=False, draft=draft)]

    def take_draft(self) -> CanvasDraft | None:
        """Return the part of the canvas that belongs to the answer, if the request streams drafts. ``None`` if no pass has
        changed it."""
        canvas, own = self.canvas, self.params.diffusion
        if own is None or not own.stream_drafts or canvas is None or self.finish_reason is not None:
            return None
        now = (canvas.start, canvas.step)
        if canvas.step == 0 or now == self.shown:
            return None
        if canvas.start != self.shown[0]:  # text has replaced the last draft
            self.drafted = ("", [])
        self.shown = now
        self.write()
        tokens = canvas.draft()[max(0, self.length - canvas.start) :][: self.remaining]
        ends = [place for place, token in enumerate(tokens) if token in self.stop_token_ids]
        tokens = tokens[: ends[0]] if ends else tokens
        text = self.text[self.emitted_text :] + self.detokenizer.peek(tokens, MASKED)
        if (text, tokens) == self.drafted:  # the answer's part of the canvas did not change
            return None
        self.drafted = (text, tokens)
        return CanvasDraft(canvas.step, text, tokens)

    def result(self) -> GenerationResult:
        """Return the result. Raises the error that ended the request, if there was one."""
        if self.error is not None:
            raise self.error
        assert self.finish_reason is not None
        self.write()
        return GenerationResult(
            text=self.text,
            token_ids=self.token_ids[self.num_prompt :],
            finish_reason=self.finish_reason,
            stats=self.stats,
            logprobs=self.logprobs if self.params.logprobs else None,
            top_logprobs=self.top_logprobs if self.params.logprobs and self.params.top_logprobs else None,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs if self.params.prompt_logprobs else None,
            error=None if self.failure is None else str(self.failure),
        )
