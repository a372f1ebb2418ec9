"""The engine: ``step`` is the loop, everything else brings prompts in and results out."""

import inspect
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from volley.decode.block_size import BlockSizePolicy, Fixed
from volley.decode.processors import TokenCounts
from volley.decode.sampling import PositionNoise
from volley.engine.pacing import Pacer, make_policy
from volley.engine.request import Detokenizer, Request
from volley.engine.runner import DraftingOptions, Runner
from volley.engine.scheduler import Scheduled, Scheduler, SchedulerConfig
from volley.errors import CapacityError, ConfigError, InputError, check_keys
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable, PagePool
from volley.memory.kv_store import KVDtype, bytes_per_token
from volley.models.accelerate import accelerate
from volley.models.adapter import Adapter
from volley.models.drafter import Drafter
from volley.models.target import Target
from volley.types import GenerationResult, Proposal, SamplingParams, TextChunk, Verdict

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
OnVerified = Callable[[Request, Proposal, Verdict], None]

REFERENCE = Path(__file__).parent.parent / "reference"
_BUNDLED = object()
DEFAULT_POLICY = "goodput"
_DEFAULT_POOL_BYTES = 2**30
_DEFAULT_POOL_TOKENS = 2**16


class Engine:
    """A target, optionally its drafter, and the requests they are answering.

    Not thread-safe: one thread steps it. Losslessness: with or without a drafter, greedy output is the target's own,
    token for token, and sampled output has the target's law (see ``decode/verify.py``).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        policy: str | BlockSizePolicy | None = None,
        block_size: int | None = None,
        denoising_steps: int = 1,
        denoising_schedule: str = "cosine",
        tree_nodes: int | None = None,
        verification: str = "auto",
        page_size: int = 16,
        num_pages: int | None = None,
        max_batch_tokens: int = 512,
        max_running: int = 64,
        prefix_caching: bool = True,
        draft_window: int | None = None,
        kv_dtype: KVDtype = "auto",
        draft_kv_dtype: KVDtype = "auto",
    ) -> None:
        """``policy`` decides how much is drafted and verified: ``goodput`` (the default), ``feedback``, ``pilot``,
        ``fixed``, ``fixed:8`` or a :class:`BlockSizePolicy`; ``block_size=8``, anchor included, is short for ``fixed:8``, and
        1 is plain decoding. ``tree_nodes`` verifies the best tree of so many tokens, anchor included, instead of a chain; its
        levels are fixed unless a policy is named; ``None`` leaves it to the policy. ``denoising_steps``,
        ``denoising_schedule`` and ``verification`` are described in :class:`DraftingOptions`. ``num_pages`` pages of
        ``page_size`` tokens hold all K/V; ``prefix_caching`` lets prompts that begin alike share them. ``draft_window``
        bounds the drafter's context, and its cache, to that many tokens before the block. ``max_running`` requests decode
        at once; ``max_batch_tokens`` bounds a target pass: prompts, trees and copies share what chains leave of it
        (prompts get an eighth in any case).
        ``kv_dtype`` and ``draft_kv_dtype`` say how the K/V of target and drafter are kept: "auto" (the model's dtype),
        "int8" or "int4". A quantised target pool changes what the target computes, with a drafter and without alike.
        """
        self.target = target
        self.drafter = drafter
        self.on_verified: list[OnVerified] = []
        self._next_id = 0
        largest_block = drafter.config.block_size if drafter else 1
        if policy is not None and block_size is not None:
            raise ConfigError("block_size fixes the block and policy decides it; give one of them")
        _check_sizes(max_batch_tokens, max_running, draft_window, page_size)
        self.kv_dtype: KVDtype = kv_dtype
        if num_pages is None:
            num_pages = _default_pages(target, drafter, page_size, kv_dtype, draft_kv_dtype)
        self.pool = PagePool(num_pages, page_size)
        ring_pages, ring_pool = 0, None
        if drafter is not None and draft_window is not None:
            ring_pages = self.pool.pages_for(draft_window + largest_block) + 1
            ring_pool = PagePool(ring_pages * max_running, page_size)
        config = SchedulerConfig(
            max_running=max_running, max_batch_tokens=max_batch_tokens, prefix_caching=prefix_caching
        )
        self.scheduler = Scheduler(config, self.pool, ring_pool, ring_pages, draft_window or 0)
        self.runner = Runner(
            target,
            drafter,
            DraftingOptions(
                denoising_steps=denoising_steps, denoising_schedule=denoising_schedule, verification=verification
            ),
            num_slots=self.pool.num_pages * page_size,
            num_ring_slots=ring_pool.num_pages * page_size if ring_pool else 0,
            draft_window=draft_window,
            kv_dtype=kv_dtype,
            draft_kv_dtype=draft_kv_dtype,
        )
        self.tree_nodes = tree_nodes
        self._adapters: dict[str, Adapter] = {}
        self.pacer = Pacer(self.runner, largest_block)
        if block_size is not None:
            self.block_size = block_size
        else:
            self.policy = policy or (DEFAULT_POLICY if drafter and not tree_nodes else "fixed")

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | Target | None = None,
        drafter: Any = _BUNDLED,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> Self:
        """Load a pair. No ``target``: the bundled one, with its drafter unless another (or ``None``) is given.

        ``target`` and ``drafter`` are folders, hub names (target) or loaded models; ``options`` are the constructor's.
        """
        known = inspect.signature(cls).parameters.keys() - {"target", "drafter"}
        check_keys("engine option", options, known)
        if drafter is _BUNDLED:
            drafter = REFERENCE / "drafter" if target is None else None
        if not isinstance(target, Target):
            target = Target.from_pretrained(target or REFERENCE / "target", dtype=dtype, device=device)
        if isinstance(drafter, Drafter):
            drafter.to(device=target.device, dtype=target.dtype).eval()
        elif drafter is not None:
            drafter = Drafter.from_pretrained(drafter, dtype=target.dtype).to(target.device)
            accelerate(drafter)
        return cls(target, drafter, **options)

    # -- the loop ------------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One cycle for every scheduled request; returns those that finished."""
        started = time.perf_counter()
        self.pacer.before_drafting(self.scheduler.running, len(self.scheduler.waiting))
        plan = self.scheduler.schedule(self.block_size)
        if not plan:
            return []
        proposals = self.pacer.after_drafting(plan, self.runner.draft(plan))
        logits = self.runner.verify(plan, proposals)
        self.pacer.after_prefill(plan, proposals, logits)
        verdicts = self.runner.judge(plan, proposals, logits)
        self.runner.compact(plan, verdicts)
        self.runner.inject(plan, verdicts)
        finished = [
            scheduled.request
            for scheduled, proposal, verdict in zip(plan, proposals, verdicts, strict=True)
            if self._commit(scheduled, proposal, verdict, time.perf_counter() - started)
        ]
        self.pacer.after_judging(plan, verdicts)
        for request in finished:
            self._end(request)
        return finished

    def _end(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.policy.end(request.request_id)

    def _commit(self, scheduled: Scheduled, proposal: Proposal, verdict: Verdict, seconds: float) -> bool:
        """Make one verdict final: K/V length, tokens, pages, statistics. True when the request ended."""
        request, stats, timings = scheduled.request, scheduled.request.stats, self.runner.timings
        is_cycle = request.is_decoding
        request.computed += scheduled.num_known + verdict.accepted
        if is_cycle:
            stats.draft_seconds += timings.draft
            stats.walk_seconds += timings.walk
            stats.verify_seconds += timings.verify
        else:
            stats.prefill_seconds += seconds
        if verdict.token_ids:
            taken = request.append(verdict.token_ids, verdict.accepted)
            request.computed = min(request.computed, len(request.token_ids))  # it may have ended inside the block
            if is_cycle:
                stats.accepted_lengths.append(taken)
                stats.block_sizes.append(1 + len(proposal.token_ids))
            request.trim_logprobs()
            now = time.perf_counter() - request.arrived
            stats.time_to_first_token = stats.time_to_first_token or now
            stats.total_seconds = now
            for listener in self.on_verified:
                listener(request, proposal, verdict)
        self.pool.rollback(request.table, request.computed)
        self._publish(request)
        return request.finish_reason is not None

    def _publish(self, request: Request) -> None:
        """Offer the request's full pages to later prompts."""
        size = self.pool.page_size
        while self.scheduler.config.prefix_caching and (done := len(request.page_hashes)) < request.computed // size:
            parent = request.page_hashes[-1] if done else request.prefix_root
            digest = self.pool.page_hash(parent, request.token_ids[done * size : (done + 1) * size])
            request.page_hashes.append(digest)
            self.pool.publish(request.table.pages[done], digest)

    # -- requests ------------------------------------------------------------------------------------------------------
    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queue one prompt; :meth:`step` works on it from now on."""
        request = self._make_request(prompt, params)
        self.scheduler.add(request)
        return request

    def _make_request(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        params = params or SamplingParams()
        token_ids = self.encode(prompt)
        limit = self.target.context_length
        if len(token_ids) >= limit:
            raise InputError(
                f"the prompt has {len(token_ids)} tokens and the target's context is {limit}; shorten the prompt"
            )
        outside = [token for token, _ in params.logit_bias if not 0 <= token < self.target.vocab_size]
        if outside:
            raise InputError(
                f"logit_bias names token {outside[0]}; the vocabulary is 0 to {self.target.vocab_size - 1}"
            )
        counts = None
        if params.changes_logits:
            counts = TokenCounts(token_ids, self.target.vocab_size, self.target.device)
        max_length = min(len(token_ids) + params.max_tokens, limit)
        self.pool.check_fits(max_length)
        table = BlockTable(self.pool.page_size)
        adapter = self._find_adapter(params.draft_adapter)
        in_ring = self.scheduler.ring_pool is not None  # then pages hold the target's K/V only, whatever drafts
        request = Request(
            request_id=self._next_id,
            token_ids=token_ids,
            params=params,
            noise=PositionNoise(secrets.randbits(63) if params.seed is None else params.seed),
            max_length=max_length,
            stop_token_ids=self._stop_tokens(params),
            detokenizer=Detokenizer(self.target.tokenizer),
            table=table,
            draft_table=table,
            counts=counts,
            adapter=adapter,
            prefix_root=b"" if adapter is None or in_ring else adapter.digest,
            is_coupled=self.runner.options.matches(params),
        )
        self._next_id += 1
        return request

    def abort(self, request: Request) -> None:
        """End a request now; its pages are free at once."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self._end(request)

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[GenerationResult]:
        """Answer one prompt or many; yields one result a prompt, in order, as soon as it and those before it are done.

        A prompt is a string (tokenised as it is), a list of token ids, or a list of chat messages. All prompts are
        checked before the first one runs.
        """
        many = cast(list[Prompt], [prompts] if _is_one_prompt(prompts) else list(prompts))
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise InputError(f"{len(many)} prompts came with {len(each)} sampling parameters; give one, or one each")
        return self._results([self._make_request(prompt, own) for prompt, own in zip(many, each, strict=True)])

    def _results(self, requests: list[Request]) -> Iterator[GenerationResult]:
        """Queues the requests only when it is first asked, so that an iterator nobody reads leaves nothing behind."""
        try:
            for request in requests:
                self.scheduler.add(request)
            for request in requests:
                while request.finish_reason is None:
                    self.step()
                yield request.result()
        finally:
            for request in requests:
                self.abort(request)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[TextChunk, None, GenerationResult]:
        """Text as it is accepted; the generator's return value is the :class:`GenerationResult`."""
        request = self.add_request(prompt, params)
        try:
            while request.finish_reason is None:
                self.step()
                yield from request.chunks
                request.chunks.clear()
            return request.result()
        finally:
            self.abort(request)

    @torch.inference_mode()
    def next_logits(self, token_ids: Sequence[int]) -> Tensor:
        """The target's logits ``[V]`` (fp32) for the token after ``token_ids``, in one pass beside what is running."""
        table = BlockTable(self.pool.page_size)
        self.pool.check_fits(len(token_ids))
        if not self.pool.grow(table, len(token_ids)):
            raise CapacityError(f"no {len(token_ids)} tokens of K/V are free now; finish or abort requests first")
        try:
            batch = RaggedBatch([Segment(table, 0, len(token_ids))], torch.tensor(token_ids, device=self.target.device))
            last = torch.tensor([len(token_ids) - 1], device=self.target.device)
            return self.target.forward(batch, self.runner.store, last)[0].float()
        finally:
            self.pool.release(table)

    # -- adapters ------------------------------------------------------------------------------------------------------
    def load_adapter(self, name: str, path: str | Path) -> None:
        """Let requests choose the adapter in folder ``path``, by ``SamplingParams(draft_adapter=name)``.

        It takes the memory of one more drafter. A name in use gets the new adapter; requests that run keep theirs.
        """
        if self.drafter is None:
            raise ConfigError(f"adapter {name!r} has no drafter to adapt; give the engine one")
        self._adapters[name] = self.runner.load_adapter(path)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that run with it keep it until they end."""
        self._find_adapter(name)
        del self._adapters[name]

    @property
    def adapters(self) -> list[str]:
        """Names that requests may choose."""
        return sorted(self._adapters)

    def _find_adapter(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        if name not in self._adapters:
            known = ", ".join(self.adapters) or "none is"
            raise InputError(f"no adapter {name!r} is loaded (of those, {known}); load it with Engine.load_adapter")
        return self._adapters[name]

    # -- settings ------------------------------------------------------------------------------------------------------
    @property
    def block_size(self) -> int:
        """Most tokens a request verifies per cycle, anchor included. Setting it fixes the block: 1 is plain decoding."""
        return self.policy.block_size

    @block_size.setter
    def block_size(self, value: int) -> None:
        if value < 1:
            raise ConfigError(f"block_size {value} cannot be used; it is 1 (plain decoding) or more, with a drafter")
        self.policy = Fixed(value)

    @property
    def policy(self) -> BlockSizePolicy:
        """What decides how much is drafted and verified. May be set between steps, by name or to an object."""
        return self.pacer.policy

    @policy.setter
    def policy(self, value: str | BlockSizePolicy) -> None:
        self.pacer.policy = make_policy(value, self.drafter)

    @property
    def denoising_steps(self) -> int:
        """Draft passes per cycle; 1 is DFlash. May be set between steps."""
        return self.runner.options.denoising_steps

    @denoising_steps.setter
    def denoising_steps(self, value: int) -> None:
        self.runner.options = replace(self.runner.options, denoising_steps=value)

    @property
    def tree_nodes(self) -> int | None:
        """Tokens of the draft tree verified per cycle, anchor included; ``None`` leaves it to the policy, whose choice for most
        is a chain. May be set between steps."""
        return self.runner.options.tree_nodes

    @tree_nodes.setter
    def tree_nodes(self, value: int | None) -> None:
        if value is not None and self.drafter is None:
            raise ConfigError(f"tree_nodes is {value} and there is no drafter to grow a tree; name one or use None")
        self.runner.options = replace(self.runner.options, tree_nodes=value)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        if self.target.tokenizer is None:
            raise InputError("this target was loaded without a tokenizer; pass prompts as lists of token ids")
        return self.target.tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; chat messages go through the chat template with the generation prompt."""
        if isinstance(prompt, str):
            token_ids = list(self.tokenizer(prompt)["input_ids"])
        elif prompt and all(isinstance(part, Mapping) for part in prompt):
            token_ids = _encode_chat(self.tokenizer, cast(Sequence[Message], prompt))
        elif all(isinstance(part, int) for part in prompt):
            token_ids = list(cast(Sequence[int], prompt))
        else:
            raise InputError("a prompt is a string, a list of token ids, or a list of chat messages; this is a mixture")
        if not token_ids:
            raise InputError("the prompt is empty; give at least one token to continue from")
        outside = [token for token in token_ids if not 0 <= token < self.target.vocab_size]
        if outside:
            raise InputError(f"token id {outside[0]} is outside the target's vocabulary of {self.target.vocab_size}")
        return token_ids

    def _stop_tokens(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset() if params.ignore_eos else self.target.stop_token_ids
        return own | frozenset(params.stop_token_ids)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; requests in flight keep theirs."""
        self.pool.forget()

    def check_integrity(self) -> None:
        """Recount every page; raises ``AssertionError`` if the books are wrong."""
        self.scheduler.check_integrity()


def _encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    for message in messages:
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"a chat message has 'role' and 'content'; this one has {sorted(message)}")
    if not tokenizer.chat_template:
        raise InputError("the target's tokenizer has no chat template; pass the prompt as a string")
    text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (
        isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int | Mapping)
    )


def _check_sizes(max_batch_tokens: int, max_running: int, draft_window: int | None, page_size: int) -> None:
    if max_batch_tokens < 1 or max_running < 1:
        raise ConfigError("max_batch_tokens and max_running must be at least 1")
    if draft_window is not None and draft_window < 1:
        raise ConfigError(f"draft_window is {draft_window}; give at least 1 token, or None for the whole context")
    if page_size < 1:
        raise ConfigError(f"page_size is {page_size}; a page holds at least 1 token")


def _default_pages(
    target: Target, drafter: Drafter | None, page_size: int, kv_dtype: KVDtype, draft_kv_dtype: KVDtype
) -> int:
    """A pool of at most 64k tokens and 1 GiB, and at least one full context of up to 4k tokens."""
    per_token = bytes_per_token(kv_dtype, target.kv_shapes, target.dtype)
    if drafter is not None:
        per_token += bytes_per_token(draft_kv_dtype, drafter.kv_shapes, target.dtype)
    tokens = min(_DEFAULT_POOL_TOKENS, _DEFAULT_POOL_BYTES // per_token)
    return -(-max(tokens, min(target.context_length, 4096)) // page_size)
