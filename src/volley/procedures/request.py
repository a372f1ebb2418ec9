"""Define a request, from arrival to result, and its decoding method, which turns target passes into tokens."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from volley.decode.canvas import Canvas
from volley.decode.lookup import CERTAIN, Lookup, match_confidence
from volley.decode.on_device import Reading
from volley.decode.rules import TokenRule, constraints, forced_tokens
from volley.decode.sampling import PositionNoise, Score
from volley.decode.work import NO_DRAFT, DraftSpec, Phase, Work
from volley.errors import NonFiniteError
from volley.memory.batch import Segment
from volley.memory.kv_cache import BlockTable
from volley.params import SamplingParams
from volley.policies.base import View
from volley.procedures.text import TextWriter
from volley.results import CanvasDraft, FinishReason, GenerationResult, GenerationStats, TextChunk


class Procedure(ABC):
    """Base class of decoding methods. One object serves all requests that use it; the state of a request is in the request."""

    reads_on_device = False
    """True if :meth:`verify` accepts drafts that are still on the device (``decode/on_device.py``)."""

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
        spec = NO_DRAFT if view is None else view.draft(0)
        return Work(request, spec, Phase.PREFILL, num_tokens)

    @abstractmethod
    def next_work(self, request: "Request", spec: DraftSpec) -> Work["Request"]:
        """Make the work of a request that has been read; ``spec`` is the policy's decision about its view."""

    @abstractmethod
    def segment(self, work: Work["Request"]) -> tuple[list[int], Segment]:
        """Return the tokens that the target computes for a work, and their segment."""

    @abstractmethod
    def num_rows(self, work: Work["Request"]) -> int:
        """Return how many of the segment's last tokens need logits."""

    @abstractmethod
    def verify(self, works: "Works", logits: Tensor) -> Reading | None:
        """Fill in the verdict of every work from its rows of ``logits [R, V]``: tokens to emit and K/V to keep.

        If the host has to read values of the device for that, return them; reading them completes the verdicts.
        """


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
    writer: TextWriter
    table: BlockTable
    draft_table: BlockTable
    """Drafter's pages: the same table, or a separate ring under a draft window."""
    procedure: Procedure
    pool_slots: int
    """Number of slots in the pool, which is also the most that this request can use."""
    rules: tuple[TokenRule, ...] = ()
    """Logits processors: penalties, biases, a grammar, rules of the caller."""
    tapped: Tensor | None = None
    """Target features ``[taps · H]`` of the last token that has K/V; only for drafters that write token by token."""
    drafting_suspended: bool = False
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
    denoised_at: int = 0
    """Scheduler step in which its canvas was last denoised or committed."""
    lookup: Lookup = field(default_factory=Lookup)
    noise_used_until: int = 0
    """Position before which a draft may have used the target's noise."""
    page_hashes: list[bytes] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    """Scores of the output tokens, if requested."""
    prompt_scores: list[Score] = field(default_factory=list)
    """Scores of the prompt's tokens from the second on, if requested."""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """Exception raised while its tokens or its text were processed."""
    failure: NonFiniteError | None = None
    """Reason why it ended with ``finish_reason`` "error"."""
    stats: GenerationStats = field(default_factory=GenerationStats)
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
        scored = len(self.prompt_scores)
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
            found, agreed = self.lookup.find(self.token_ids, most)
            return found, match_confidence(agreed, len(found))
        forced = forced_tokens(self.rules, [], most)
        found, agreed = self.lookup.find(self.token_ids + forced, most - len(forced))
        for rule in constraints(self.rules):
            found = found[: max(0, rule.num_allowed(forced + found) - len(forced))]
        return forced + found, [CERTAIN] * len(forced) + match_confidence(agreed, len(found))

    @property
    def is_torn(self) -> bool:
        """True if an error came while its tokens were taken."""
        return self.stats.output_tokens != self.num_output

    def append(self, token_ids: list[int], num_from_draft: int) -> int:
        """Take the tokens of one cycle until the request ends; return how many were taken.

        :meth:`write` makes their text. It is called here only if a stop string may end the request.
        """
        remaining, rules, writer = self.remaining, self.rules, self.writer
        for taken, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            for rule in rules:
                rule.take(token)
            if token in self.stop_token_ids or (rules and any(rule.is_complete for rule in rules)):
                self.finish_reason = "stop"
            elif taken == remaining:
                self.finish_reason = "length"
            writer.waiting.append((token, taken <= num_from_draft))
            if writer.stops is not None:
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
        """Make the text of the tokens that have none yet. A stop string in it ends the request."""
        self.finish_reason = self.writer.write(self.finish_reason)

    def take_chunks(self) -> list[TextChunk]:
        """Return the chunks since the last call, with the canvas draft if it is streamed."""
        self.write()
        chunks, draft = self.writer.take(), self.take_draft()
        return chunks if draft is None else [*chunks, TextChunk("", [], from_draft=False, draft=draft)]

    def take_draft(self) -> CanvasDraft | None:
        """Return the part of the canvas that belongs to the answer, if the request streams drafts and a pass has changed it.

        Call this after :meth:`write`.
        """
        canvas, own = self.canvas, self.params.diffusion
        if own is None or not own.stream_drafts or canvas is None or self.finish_reason is not None:
            return None
        return self.writer.draft(canvas, canvas.draft()[max(0, self.length - canvas.start) :][: self.remaining])

    def result(self) -> GenerationResult:
        """Return the result. Raises the error that ended the request, if there was one."""
        if self.error is not None:
            raise self.error
        assert self.finish_reason is not None
        self.write()
        params, scores, prompt = self.params, self.scores, self.prompt_scores
        return GenerationResult(
            text=self.writer.text,
            token_ids=self.token_ids[self.num_prompt :],
            finish_reason=self.finish_reason,
            stats=self.stats,
            logprobs=[score.logprob for score in scores] if params.logprobs else None,
            top_logprobs=[score.likeliest for score in scores] if params.logprobs and params.top_logprobs else None,
            prompt_logprobs=None if params.prompt_logprobs is None else [score.logprob for score in prompt],
            prompt_top_logprobs=[score.likeliest for score in prompt] if params.prompt_logprobs else None,
            error=None if self.failure is None else str(self.failure),
        )


Works = Sequence[Work[Request]]
