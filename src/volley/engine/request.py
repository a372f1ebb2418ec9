"""The state of one request, from arrival to its result."""

import time
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from volley.decode.lookup import Lookup
from volley.decode.processors import TokenCounts
from volley.decode.sampling import PositionNoise
from volley.memory.kv_cache import BlockTable
from volley.models.adapter import Adapter
from volley.types import FinishReason, GenerationResult, GenerationStats, SamplingParams, TextChunk


class Detokenizer:
    """Turns a growing list of tokens into text without ever taking back a character."""

    _CONTEXT = 6  # tokens decoded again with the new ones, for merges and multi-byte characters across their border

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._start = 0  # decoding begins here
        self._emitted = 0  # tokens whose text is out

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def push(self, token_id: int, *, last: bool = False) -> str:
        """The new text that ``token_id`` completes; empty while a multi-byte character is unfinished."""
        self._token_ids.append(token_id)
        before = self._decode(self._token_ids[self._start : self._emitted])
        after = self._decode(self._token_ids[self._start :])
        if after.endswith("\ufffd") and not last:
            return ""
        self._emitted = len(self._token_ids)
        self._start = max(self._start, self._emitted - self._CONTEXT)
        return after[len(before) :]


@dataclass(eq=False, slots=True)
class Request:
    """One prompt being answered.

    ``token_ids`` is prompt and output; K/V exist for positions ``[0, computed)``, of both models. Outside a step,
    a request that is decoding has ``computed == len(token_ids) - 1``: its last token is the anchor of the next cycle.
    """

    request_id: int
    token_ids: list[int]
    params: SamplingParams
    noise: PositionNoise
    max_length: int
    """Tokens, prompt included, at which the request ends for length."""
    stop_token_ids: frozenset[int]
    detokenizer: Detokenizer
    table: BlockTable
    draft_table: BlockTable
    """The drafter's pages: the same table, or a ring of its own under a draft window."""
    counts: TokenCounts | None = None
    """Kept only where penalties or biases ask for it."""
    adapter: Adapter | None = None
    """Drafts for this request; ``None``: the drafter as it is."""
    prefix_root: bytes = b""
    """The parent of the first page's hash: pages are shared among requests that have the same."""
    num_prompt: int = 0
    computed: int = 0
    draft_slots: int = 0
    """Slots the block-size policy wants drafted in the next step."""
    draft_nodes: int = 0
    """Nodes of the tree it wants grown of them, at most; 0 is a chain."""
    lookup: Lookup = field(default_factory=Lookup)
    found: list[int] = field(default_factory=list)
    """What may follow, going by the text so far, if the policy wants to know."""
    copied: int = 0
    """How many of these are verified in the next step, instead of a draft."""
    is_coupled: bool = False
    """Whether a sampled request is verified by sample-and-match, with drafts that know the noise its target will use."""
    foreseen: int = 0
    """Positions before this one whose noise a draft may have known. They must be sampled with it: how far that draft was right
    depends on it."""
    page_hashes: list[bytes] = field(default_factory=list)
    text: str = ""
    emitted_text: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)
    chunks: list[TextChunk] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.num_prompt = self.stats.prompt_tokens = len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def prefill_end(self) -> int:
        """Positions to compute before decoding: the prompt, or after a preemption everything but the anchor."""
        return self.num_prompt if self.num_output == 0 else len(self.token_ids) - 1

    @property
    def is_decoding(self) -> bool:
        return self.num_output > 0 and self.computed == len(self.token_ids) - 1

    @property
    def remaining(self) -> int:
        """Tokens the request may still emit."""
        return self.max_length - len(self.token_ids)

    def append(self, token_ids: list[int], num_from_draft: int) -> int:
        """Take the tokens of one cycle until the request ends; returns how many were taken."""
        for taken, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            if self.counts is not None:
                self.counts.add(token)
            if token in self.stop_token_ids:
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            self.text += self.detokenizer.push(token, last=self.finish_reason is not None)
            self._cut_at_stop_string()
            self._emit(token, from_draft=taken <= num_from_draft)
            if self.finish_reason is not None:
                break
        self.stats.output_tokens = self.num_output
        return taken

    def _cut_at_stop_string(self) -> None:
        found = [index for stop in self.params.stop if (index := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.finish_reason = "stop"

    def _emit(self, token: int, *, from_draft: bool) -> None:
        """Release text, holding back an end that may turn out to begin a stop string."""
        ready = len(self.text)
        if self.finish_reason is None:
            for stop in self.params.stop:
                for size in range(min(len(stop) - 1, ready), 0, -1):
                    if self.text.endswith(stop[:size]):
                        ready = min(ready, len(self.text) - size)
                        break
        piece = self.text[self.emitted_text : ready]
        self.emitted_text = max(self.emitted_text, ready)
        self.chunks.append(TextChunk(piece, [token], from_draft))

    def trim_logprobs(self) -> None:
        """Forget those of tokens after the end."""
        del self.logprobs[self.num_output :]
        del self.top_logprobs[self.num_output :]

    def result(self) -> GenerationResult:
        assert self.finish_reason is not None
        return GenerationResult(
            text=self.text,
            token_ids=self.token_ids[self.num_prompt :],
            finish_reason=self.finish_reason,
            stats=self.stats,
            logprobs=self.logprobs if self.params.logprobs else None,
            top_logprobs=self.top_logprobs if self.params.logprobs and self.params.top_logprobs else None,
        )
