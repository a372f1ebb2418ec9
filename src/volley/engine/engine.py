"""Generate text for many requests: ``Engine.step`` is the loop; the rest brings prompts in and results out."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from volley.chat import Prompt, encode_prompt, is_one_prompt
from volley.config import CapacityConfig, DecodingConfig, check_undrafted, read_by_drafters, split_options
from volley.cores import shared_cores
from volley.decode.grammars import Grammars
from volley.decode.work import Proposal, Verdict
from volley.engine.capacity import fit_engine
from volley.engine.core import EngineCore
from volley.engine.deferred_work import DeferredWork
from volley.engine.kv_manager import Snapshot
from volley.engine.memory import report_memory
from volley.engine.requests import check_tokens, make_request
from volley.engine.step import Step, Timings, accept, choose, conclude, propose
from volley.errors import CapacityError, InputError
from volley.files import REFERENCE
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.models.drafters.draft_model import bundled_drafter, load_drafter
from volley.models.drafters.drafter import Drafter, find_drafter
from volley.models.targets.diffusion import load_target
from volley.models.targets.target import Target
from volley.native import TargetWeights, WantedDraftWeights
from volley.params import SamplingParams
from volley.policies.arrivals import Arrivals
from volley.policies.base import Policy
from volley.procedures.make import Procedures
from volley.procedures.request import Procedure, Request
from volley.procedures.speculative import Speculative
from volley.proposers.base import Proposer
from volley.results import GenerationResult, TextChunk

OnVerified = Callable[[Request, Proposal, Verdict], None]
_BUNDLED = object()


class Engine:
    """A target, optionally its drafter, and the requests that they answer. Without a drafter, drafts come from prompt lookup.

    An engine is not thread-safe: one thread steps it. Decoding is lossless, with or without a drafter. Greedy output equals
    the target's own token for token, and sampled output has the target's distribution (see ``decode/verify.py``).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        config: DecodingConfig | None = None,
        capacity: CapacityConfig | None = None,
        proposer: Proposer | None = None,
        **options: Any,
    ) -> None:
        """Make an engine. ``options`` are fields of :class:`DecodingConfig` and :class:`CapacityConfig`, instead of ``config``
        and ``capacity``.

        ``policy`` may also be a :class:`Policy` object of your own. A ``proposer`` drafts instead of the drafter.
        """
        self.target = target
        self.config, sizes = split_options(options, config, capacity)
        self.capacity = fit_engine(sizes, self.config, target, drafter)
        """Sizes as given; the others are chosen to fit the device."""
        self.grammars = Grammars(target.tokenizer, target.vocab_size, target.stop_token_ids)
        """Compiles the grammars of requests. A server calls it early, from other threads."""
        self.on_verified: list[OnVerified] = []
        self.arrivals, self.deferred_work = Arrivals(), DeferredWork(target.device)
        self._timings, self._next_id = Timings(), 0
        self.procedure = Speculative(self.config)
        self.procedures = Procedures(target, self.procedure, self.capacity.max_batch_tokens)
        self.drafter_source: tuple[str | Path, WantedDraftWeights] | None = None
        """Path that the drafter was loaded from, and the format of its weights."""
        self.core = EngineCore(target, drafter, self.config, self.capacity, self.arrivals, proposer)
        """Parts that depend on the drafter. ``engine/reload.py`` replaces them while requests run."""
        self.procedures.use_costs(self.core.pacing.costs.target)

    @classmethod
    @shared_cores(watch=True)
    def from_pretrained(
        cls,
        target: str | Path | Target | None = None,
        drafter: Any = _BUNDLED,
        *,
        dtype: torch.dtype | str = torch.bfloat16,
        device: str | torch.device = "auto",
        weights: TargetWeights = "auto",
        draft_weights: WantedDraftWeights = "auto",
        tensor_parallel: bool = False,
        **options: Any,
    ) -> Self:
        """Load a target and its drafter. Without a ``target``, load the bundled one. Without a ``drafter``, load the bundled
        one of this target, if there is one; ``None`` or "none" drafts by prompt lookup alone.

        ``target`` and ``drafter`` are folders, GGUF files, hub names, names of bundled models or loaded models.
        ``device="auto"`` is the GPU if there is one.

        ``weights`` (target) and ``draft_weights`` (drafter) are bf16; on a CPU also int8 or int4.
        If they are quantised, drafts use a head quantised alike. "auto" keeps bf16, or the quantised weights of a GGUF file.
        For a drafter "auto" is the target's format, or int8 next to a bf16 target on a CPU with AVX512-VNNI.

        ``tensor_parallel`` splits a target over torchrun's processes. Only rank 0 returns; the other ranks follow it and exit
        (SystemExit).
        """
        own = {name: options[name] for name in options.keys() - {"config", "capacity", "proposer"}}
        config, _ = split_options(own, options.get("config"), options.get("capacity"))
        drafts = options.get("proposer") is not None
        is_plain = config.policy == "plain" or config.fixed_block == 1
        if is_ours := drafter is _BUNDLED:
            drafter = REFERENCE / "drafter"
            if target is not None:
                drafter = None if drafts or is_plain else bundled_drafter(target)
        drafter = None if drafter == "none" else drafter
        is_named = isinstance(drafter, str | Path) and not is_ours
        place = find_drafter(drafter) if is_named else drafter  # raise its error before the target is loaded
        if drafter is None and not drafts:  # raise this error before the target is loaded
            check_undrafted([*read_by_drafters(config), *["draft_weights"] * (draft_weights != "auto")])
        target, drafted = target or REFERENCE / "target", drafter is not None
        target = load_target(target, dtype, device, weights, tensor_parallel=tensor_parallel, drafted=drafted)
        loaded = load_drafter(place, target, draft_weights, compiled=config.compile) if drafted else None
        engine = cls(target, loaded, **options)
        engine.drafter_source = None if drafter is None or isinstance(drafter, Drafter) else (drafter, draft_weights)
        report_memory(engine.core)
        return engine

    # -- the loop ------------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    @shared_cores()
    def step(self) -> list[Request]:
        """Run one cycle of every scheduled request. Return the requests that ended."""
        self._timings, core = Timings(), self.core  # no seconds, if this step gives way to a prompt
        step = core.scheduler.schedule(core.pacing, core.async_launch.serves)  # who takes part, and with what drafts
        if not step.works:
            return []
        core.kv_manager.prepare(step)  # make the deferred draft K/V, if anything drafts
        if not (is_launched := core.async_launch.serve(step)):  # drafts and target pass were launched by the last step
            if core.pacing.gives_way(step):  # a prompt arrived, and is read first
                return []
            propose(step, core.proposer)  # drafts, from the drafter or from prompt lookup
            if core.pacing.gives_way(step):
                return []
        core.pacing.trim(step)  # how many draft tokens are worth verifying
        if not is_launched:
            core.runner.forward(step)  # one target pass: logits
        self.deferred_work.run()  # detokenize the step before, while a GPU works
        readings = choose(step)  # the target's tokens, on the device
        core.async_launch.launch(step, readings)  # on a GPU: the next passes, before the host waits for these tokens
        accept(step, readings)  # verdicts: accepted tokens, and K/V to keep
        core.kv_manager.keep(step)  # every state advanced, rolled back and published
        core.pacing.observe(step)  # what the policy learns
        ended = self.commit(step)  # tokens, texts and statistics of the requests
        core.pacing.time(step)  # what the cost tables learn
        return ended

    def commit(self, step: Step) -> list[Request]:
        """Apply the verdicts to the requests. Return the requests that ended.

        If committing one request raises, the other requests are committed first; then the exception is re-raised.
        """
        self._timings = step.timings
        finished, first, now = list[Request](), None, time.perf_counter()
        try:
            for work in step.works:
                try:
                    if conclude(step, work, now):
                        self.deferred_work.write(work.request)
                        for listener in self.on_verified:
                            listener(work.request, work.proposal, work.verdict)
                    if work.request.finish_reason is not None:
                        finished.append(work.request)
                except Exception as error:
                    work.request.error, first = error, first or error
        finally:
            for request in finished:
                self._end(request)
        if first is not None:
            raise first
        return finished

    def _end(self, request: Request) -> None:
        if request.failure is not None:
            self.core.kv_manager.withdraw(request)
        self.core.scheduler.finish(request)
        self.policy.end(request.request_id)
        request.rules, request.canvas = (), None  # some hold tensors as long as the vocabulary

    # -- requests ------------------------------------------------------------------------------------------------------
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        procedure: Procedure | None = None,
        *,
        after: Request | None = None,
    ) -> Request:
        """Queue one prompt, to be answered by ``procedure`` or the engine's default; :meth:`step` works on it from now on.

        ``after`` is a request with the same prompt: the new request waits until that prompt has been read, and shares its
        cached pages.
        """
        request = self._make_request(prompt, params, procedure)
        is_shared = self.capacity.prefix_caching and request.prefix_root is not None
        if is_shared and request.num_prompt > self.capacity.page_size:
            request.after = after
        self.arrivals.came(beside=self.core.scheduler.is_decoding)
        self.core.scheduler.add(request)
        return request

    def _make_request(
        self, prompt: Prompt, params: SamplingParams | None = None, procedure: Procedure | None = None
    ) -> Request:
        params = params or SamplingParams()
        if params.draft_temperature is None and self.config.draft_temperature is not None and params.temperature:
            params = replace(params, draft_temperature=self.config.draft_temperature)
        if procedure is None:
            procedure, params = self.procedures.choose(params)
        token_ids = self.encode(prompt)
        request = make_request(self._next_id, token_ids, params, procedure, self.target, self.core.pool, self.grammars)
        self.set_up(request)
        procedure.check(request)
        self._next_id += 1
        return request

    def abort(self, request: Request) -> None:
        """End a request now and free its pages."""
        request.finish_reason = request.finish_reason or "abort"
        self._end(request)

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[GenerationResult]:
        """Answer one prompt or many. Yield the results in the order of the prompts, each as soon as it is complete.

        A prompt is a string (tokenised without a template), a list of token ids, or a list of chat messages. All prompts are
        checked before the first one runs.
        """
        many = cast(list[Prompt], [prompts] if is_one_prompt(prompts) else list(prompts))
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise InputError(f"{len(many)} prompts came with {len(each)} sampling parameters; give one, or one each")
        return self._results([self._make_request(*pair) for pair in zip(many, each, strict=True)])

    def _results(self, requests: list[Request]) -> Iterator[GenerationResult]:
        """Queue the requests when the first result is asked for, so that an iterator that nobody reads leaves nothing behind."""
        left = deque(requests)
        requests.clear()  # only the caller keeps finished requests
        try:
            for request in left:
                request.writer.is_streamed = False
                self.core.scheduler.add(request)
            while left:
                while left[0].finish_reason is None:
                    self._advance()
                yield left.popleft().result()
        finally:
            for request in left:
                self.abort(request)

    def _advance(self) -> None:
        """Run one step. If it raises, K/V may be half written, so all running requests restart without cached prefixes."""
        try:
            self.step()
        except BaseException as error:
            for request in (failed := self.core.scheduler.begin_anew()):
                self.abort(request)
            self.reset_prefix_cache()
            if all(request.error is not error for request in failed):  # otherwise the failed request's result raises it
                raise

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[TextChunk, None, GenerationResult]:
        """Yield text as it is accepted; the generator returns the :class:`GenerationResult`.

        Raises :class:`NonFiniteError` after the last chunk if the request ended because its logits are not finite.
        """
        request = self.add_request(prompt, params)
        try:
            while request.finish_reason is None:
                self._advance()
                yield from request.take_chunks()
            yield from request.take_chunks()  # chunks from steps that another iterator ran
            if request.failure is not None:
                raise request.failure
            return request.result()
        finally:
            self.abort(request)

    @torch.inference_mode()
    def next_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the target's logits ``[V]`` (fp32) for the token after ``token_ids``, computed in a separate pass."""
        asked = self.procedures.plain.ask_next(token_ids)
        table, size = BlockTable(self.core.pool.page_size), len(asked)
        self.core.async_launch.forget()  # the launched pages may be free now, and taken here
        self.core.pool.check_fits(size)
        if not self.core.pool.grow(table, size):
            raise CapacityError("no pages are free for that many tokens now; finish or abort requests first")
        try:
            batch, rows = RaggedBatch.on_device([Segment(table, 0, size)], asked, [size - 1], self.target.device)
            return self.procedures.plain.choosable(self.target.forward(batch, self.core.runner.store, rows).float())[0]
        finally:
            self.core.pool.release(table)

    def set_up(self, request: Request) -> None:
        """Set the root of a new request's page hashes, and whether its drafting is suspended."""
        request.drafting_suspended = not request.procedure.is_followed(request.params)
        request.prefix_root = request.procedure.prefix_root(request.params, self.capacity.page_size)

    # -- settings ------------------------------------------------------------------------------------------------------
    def reconfigure(self, config: DecodingConfig) -> None:
        """Decode by ``config`` from the next step on. If any field is refused, nothing changes.

        Running requests go on. A policy that stays the same keeps what it has learnt.
        """
        self.core.reconfigure(config, self.config)
        self.config = self.procedure.config = config

    @property
    def drafter(self) -> Drafter | None:
        """Drafter in use, or ``None``."""
        return self.core.drafter

    @property
    def policy(self) -> Policy:
        """Policy that decides how many tokens are drafted and verified. Set it between steps, to a name or an object."""
        return self.core.pacing.policy

    @policy.setter
    def policy(self, value: str | Policy) -> None:
        self.reconfigure(replace(self.config, policy=value, block_size=None))

    @property
    def block_size(self) -> int:
        """Most tokens that a request verifies per cycle, anchor included. Setting it fixes the block size; 1 is plain
        decoding."""
        return self.policy.block_size

    @block_size.setter
    def block_size(self, value: int) -> None:
        self.reconfigure(replace(self.config, policy=None, block_size=value))

    def snapshot(self) -> Snapshot:
        """Return the current load of the engine."""
        scheduler, pool = self.core.scheduler, self.core.pool
        return Snapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=pool.num_used,
            num_pages=pool.num_pages,
            max_tokens=min(self.target.context_length, pool.num_pages * pool.page_size),
            max_running=self.capacity.max_running,
            draft_seconds=self._timings.draft,
            verify_seconds=self._timings.verify,
        )

    def cycle_seconds(self, block_size: int, requests: int) -> float:
        """Measure the seconds of a cycle of ``requests`` with blocks of ``block_size`` (1: no drafts), on made-up text."""
        tokens, proposer = block_size * requests, self.core.proposer if block_size > 1 else None
        return (proposer.seconds(tokens, requests) if proposer else 0.0) + self.core.runner.seconds(tokens, requests)

    def room(self, num_prompt: int, params: SamplingParams) -> int:
        """Return the most tokens that an answer with ``params`` may have after a prompt of ``num_prompt`` tokens."""
        procedure, params = self.procedures.choose(params)
        return max(0, procedure.most_tokens(num_prompt, self.snapshot().max_tokens, params) - num_prompt)

    @property
    def has_work(self) -> bool:
        """True if any request is running or waiting."""
        return self.core.scheduler.has_work

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        if self.target.tokenizer is None:
            raise InputError("this target was loaded without a tokenizer; pass prompts as lists of token ids")
        return self.target.tokenizer

    def encode(self, prompt: Prompt, *, thinking: bool | None = None) -> list[int]:
        """Return the token ids of a prompt; chat messages go through the chat template with the generation prompt.

        ``thinking`` reaches the template as ``enable_thinking``; with ``None`` the template decides.
        """
        token_ids = encode_prompt(self.target.tokenizer, prompt, thinking=thinking)
        check_tokens(self.target, token_ids)
        return token_ids

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes. Running requests keep theirs."""
        self.core.kv_manager.forget()

    def check_integrity(self) -> None:
        """Recount every page; raise ``AssertionError`` if a count is wrong."""
        self.core.kv_manager.check_integrity([*self.core.scheduler.running, *self.core.scheduler.waiting])
