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
from volley.decode.work import Work
from volley.engine.ahead import Ahead
from volley.engine.capacity import fit_engine
from volley.engine.exactness import check_exact
from volley.engine.holdings import report_memory
from volley.engine.overlap import Overlap
from volley.engine.pacing import Pacing
from volley.engine.recurrent import make_recurrent
from volley.engine.requests import check_tokens, make_request
from volley.engine.runner import Runner
from volley.engine.scheduler import Scheduler
from volley.engine.states import (
    DraftContext,
    DraftRing,
    Sequences,
    SequenceState,
    Snapshot,
    TargetPages,
    blocks_in_ring,
    num_rings,
    ring_pages,
)
from volley.engine.step import Step, Timings, accept, conclude, propose
from volley.errors import CapacityError, ConfigError, InputError
from volley.files import REFERENCE
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable, PagePool
from volley.memory.kv_store import KVStore, make_store
from volley.models.drafters.draft_model import DraftModel, check_pair, load_drafter
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.pilot import largest_block
from volley.models.targets.diffusion import load_target
from volley.models.targets.target import Target
from volley.native import TargetWeights, WantedDraftWeights
from volley.policies.arrivals import Arrivals
from volley.policies.base import Policy
from volley.policies.cost import Costs
from volley.policies.make import DEFAULT_POLICY, make_policy
from volley.procedures.make import Procedures
from volley.procedures.request import Procedure, Request
from volley.procedures.speculative import Speculative
from volley.proposers.base import Proposer
from volley.proposers.make import check_settings, make_draft_model, make_proposer
from volley.types import GenerationResult, Proposal, SamplingParams, TextChunk, Verdict

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
        self.arrivals, self.overlap = Arrivals(), Overlap(target.device)
        self._timings, self._next_id = Timings(), 0
        self.procedure = Speculative(self.config, lambda works, tokens: self.ahead.launch(works, tokens))
        self.procedures = Procedures(target, self.procedure, self.capacity.max_batch_tokens)
        self.drafter_source: tuple[str | Path, WantedDraftWeights] | None = None
        """Path that the drafter was loaded from, and the format of its weights."""
        self.draft_model: DraftModel | None = None
        self._store: KVStore | None = None
        self.use_drafter(drafter, proposer)

    def use_drafter(self, drafter: Drafter | None, proposer: Proposer | None = None) -> None:
        """Start over with this drafter: empty states and a new policy. Use ``engine/reload.py`` while requests run."""
        self.drafter = drafter
        self.draft_model = self._make_states()
        self.inexact = check_exact(self.target, self.runner.store, self.config)
        """Reason why logits may depend on the batch; ``None`` if they are batch-invariant, bit for bit."""
        if proposer is None and self.draft_model is not None:
            proposer = make_proposer(self.draft_model, self.config, self.capacity.page_size * self.capacity.cuda_graphs)
        self.proposer = proposer
        """Proposer that makes the drafts: the drafter's, or the one that was given; ``None`` if nothing drafts."""
        only_copies = proposer is None and self.target.diffusion is None
        draft_seconds = proposer.seconds if proposer else lambda *_: 0.0
        costs = Costs(draft_seconds, self.runner.seconds, self.arrivals, only_copies=only_copies)
        costs.drafts_late = proposer is not None and proposer.drafts_late
        self.procedures.use_costs(costs.target)
        self._can_grow_trees = proposer is not None and proposer.can_grow_trees and self.sequences.can_fork
        policy, can_rest = self._make_policy(self.config, costs), self.sequences.can_rest
        self.pacing = Pacing(policy, costs, can_grow_trees=self._can_grow_trees, can_rest=can_rest)
        self.ahead = Ahead(self.scheduler, self.runner, self.pacing, proposer, self.draft_model)

    def _make_states(self) -> DraftModel | None:
        """Make the K/V pages of target and drafter, the scheduler and the runner. Return the drafter in use."""
        config, capacity, target, drafter = self.config, self.capacity, self.target, self.drafter
        num_pages, size = capacity.num_pages, capacity.page_size
        self.pool = PagePool(num_pages, size)
        if self._store is None:  # the store is kept when the drafter is replaced
            self._store = target.make_store(config.kv_dtype, self._num_slots(num_pages))
        store = self._store
        pages = TargetPages(self.pool, store, prefix_caching=capacity.prefix_caching)
        model, others, window = None, list[SequenceState](), None
        if drafter is not None:
            check_pair(drafter, target)
            window = drafter.config.window_for(config.draft_window)
            if target.world > 1:  # imported here, since it takes PyTorch's distributed tensors
                from volley.models.drafters.divided import part_for

                drafter = part_for(drafter, target)
            block = largest_block(config, drafter.config.block_size, drafter.folder)
            blocks = blocks_in_ring(capacity.cuda_graphs)
            drafter.rotary.cover(min(target.context_length, num_pages * size) + block)
            if window is not None:
                num_pages = ring_pages(blocks * block, window, size) * num_rings(capacity.max_running)
            kv = self._make_draft_store(drafter, self._num_slots(num_pages))
            model = make_draft_model(drafter, kv, target, window, config)
            most = capacity.max_running
            ring = window and DraftRing(model, window, size, most, block_size=block, num_blocks=blocks)
            others.append(ring or DraftContext(model))
        self.recurrent = make_recurrent(target, capacity)
        self.sequences = Sequences(pages, [*others, self.recurrent] if self.recurrent else others)
        self.scheduler = Scheduler(capacity, self.sequences)
        self.runner = Runner(target, store, model, self.recurrent, size * capacity.cuda_graphs)
        return model

    def _num_slots(self, num_pages: int) -> int:
        """Return the number of K/V slots in ``num_pages`` pages, plus one scratch page if CUDA graphs are used."""
        return (num_pages + self.capacity.cuda_graphs) * self.capacity.page_size

    def _make_draft_store(self, drafter: Drafter, num_slots: int) -> KVStore:
        """Return a store for the drafter's K/V. A store of the same shape is reused, because a GPU may not have memory for
        two."""
        held, target = self.draft_model, self.target
        if held is not None and (held.drafter.kv_shapes, held.store.num_slots) == (drafter.kv_shapes, num_slots):
            return held.store
        return make_store(self.config.draft_kv_dtype, drafter.kv_shapes, num_slots, target.dtype, target.device)

    @classmethod
    @shared_cores(watch=True)
    def from_pretrained(
        cls,
        target: str | Path | Target | None = None,
        drafter: Any = _BUNDLED,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "auto",
        weights: TargetWeights = "auto",
        draft_weights: WantedDraftWeights = "auto",
        tensor_parallel: bool = False,
        **options: Any,
    ) -> Self:
        """Load a target and its drafter. Without a ``target``, load the bundled one, with its drafter unless another (or
        ``None``) is given.

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
        if drafter is _BUNDLED:
            drafter = REFERENCE / "drafter" if target is None else None
        if drafter is None and options.get("proposer") is None:  # raise this error before the target is loaded
            check_undrafted([*read_by_drafters(config), *["draft_weights"] * (draft_weights != "auto")])
        target, drafted = target or REFERENCE / "target", drafter is not None
        target = load_target(target, dtype, device, weights, tensor_parallel=tensor_parallel, drafted=drafted)
        loaded = load_drafter(drafter, target, draft_weights, compiled=config.compile) if drafted else None
        engine = cls(target, loaded, **options)
        engine.drafter_source = None if drafter is None or isinstance(drafter, Drafter) else (drafter, draft_weights)
        report_memory(engine)
        return engine

    # -- the loop ------------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    @shared_cores()
    def step(self) -> list[Request]:
        """Run one cycle of every scheduled request. Return the requests that ended."""
        self._timings = Timings()  # stays empty if this step gives way to a prompt
        step = self.scheduler.schedule(self.pacing, self.ahead.serves)  # who takes part, and with how many draft tokens
        if not step.works:
            return []
        self.sequences.prepare(step)  # make the deferred draft K/V, if anything drafts
        if not (is_launched := self.ahead.serve(step)):  # drafts and target pass were launched by the last step
            if self.pacing.gives_way(step):  # a prompt arrived, and is read first
                return []
            propose(step, self.proposer)  # drafts, from the drafter or from prompt lookup
            if self.pacing.gives_way(step):
                return []
        self.pacing.trim(step)  # how many draft tokens are worth verifying
        if not is_launched:
            self.runner.forward(step)  # one target pass: logits
        self.overlap.run()  # detokenize the step before, while a GPU works
        accept(step)  # verdicts: accepted tokens, and K/V to keep; on a GPU this also launches the next pass
        self.sequences.keep(step)  # every state advanced, rolled back and published
        self.pacing.observe(step)  # what the policy learns
        ended = self.commit(step)  # tokens, texts and statistics of the requests
        self.pacing.time(step)  # what the cost tables learn
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
                    self._conclude(step, work, now)
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

    def _conclude(self, step: Step, work: Work[Request], now: float) -> None:
        if conclude(step, work, now):
            self.overlap.write(work.request)
            for listener in self.on_verified:
                listener(work.request, work.proposal, work.verdict)

    def _end(self, request: Request) -> None:
        if request.failure is not None:
            self.sequences.withdraw(request)
        self.scheduler.finish(request)
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
        self.arrivals.came(beside=self.scheduler.is_decoding)
        self.scheduler.add(request)
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
        request = make_request(self._next_id, token_ids, params, procedure, self.target, self.pool, self.grammars)
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
                request.is_streamed = False
                self.scheduler.add(request)
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
            for request in (failed := self.scheduler.begin_anew()):
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
        table, size = BlockTable(self.pool.page_size), len(asked)
        self.ahead.forget()  # the launched pages may be free now, and taken here
        self.pool.check_fits(size)
        if not self.pool.grow(table, size):
            raise CapacityError("no pages are free for that many tokens now; finish or abort requests first")
        try:
            batch, rows = RaggedBatch.on_device([Segment(table, 0, size)], asked, [size - 1], self.target.device)
            return self.procedures.plain.choosable(self.target.forward(batch, self.runner.store, rows).float())[0]
        finally:
            self.pool.release(table)

    def set_up(self, request: Request) -> None:
        """Set the root of a new request's page hashes, and whether its drafting is suspended."""
        request.rests = not request.procedure.is_followed(request.params)
        request.prefix_root = request.procedure.prefix_root(request.params, self.capacity.page_size)

    # -- settings ------------------------------------------------------------------------------------------------------
    def reconfigure(self, config: DecodingConfig) -> None:
        """Decode by ``config`` from the next step on. If any field is refused, nothing changes.

        Running requests go on. A policy that stays the same keeps what it has learnt.
        """
        for name in ("draft_window", "kv_dtype", "draft_kv_dtype", "draft_attention", "compile"):
            if getattr(config, name) != getattr(self.config, name):
                what = "how K/V are stored" if name.endswith(("window", "dtype")) else "how the drafter runs"
                raise ConfigError(f"{name} decides {what} and cannot change; make another engine to change it")
        check_exact(self.target, self.runner.store, config)
        check_settings(config, self.proposer, can_grow_trees=self._can_grow_trees)
        if self.proposer is not None:
            self.proposer.configure(config)
        try:
            if self._policy_spec(config) != self._policy_spec(self.config) or config.policy is not self.config.policy:
                self.pacing.policy = self._make_policy(config, self.pacing.costs)
        except BaseException:
            if self.proposer is not None:
                self.proposer.configure(self.config)
            raise
        self.config = self.procedure.config = config

    def _make_policy(self, config: DecodingConfig, costs: Costs) -> Policy:
        check_settings(config, self.proposer, can_grow_trees=self._can_grow_trees)
        policy = make_policy(self._policy_spec(config), self.drafter)
        policy.attach(self.proposer.block_size if self.proposer else 1, costs)
        policy.rehearse()
        return policy

    def _policy_spec(self, config: DecodingConfig) -> str | Policy:
        if config.block_size is not None:
            return f"fixed:{config.block_size}"
        drafts_in_canvases = self.proposer is None and self.target.diffusion is not None
        usual = "fixed" if drafts_in_canvases or config.tree_nodes is not None else DEFAULT_POLICY
        return cast(str | Policy, config.policy or usual)

    @property
    def policy(self) -> Policy:
        """Policy that decides how many tokens are drafted and verified. Set it between steps, to a name or an object."""
        return self.pacing.policy

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
        return Snapshot(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages_used=self.pool.num_used,
            num_pages=self.pool.num_pages,
            max_tokens=min(self.target.context_length, self.pool.num_pages * self.pool.page_size),
            max_running=self.capacity.max_running,
            draft_seconds=self._timings.draft,
            verify_seconds=self._timings.verify,
        )

    def cycle_seconds(self, block_size: int, requests: int) -> float:
        """Measure the seconds of a cycle of ``requests`` with blocks of ``block_size`` (1: no drafts), on made-up text."""
        tokens, proposer = block_size * requests, self.proposer if block_size > 1 else None
        return (proposer.seconds(tokens, requests) if proposer else 0.0) + self.runner.seconds(tokens, requests)

    def room(self, num_prompt: int, params: SamplingParams) -> int:
        """Return the most tokens that an answer with ``params`` may have after a prompt of ``num_prompt`` tokens."""
        procedure, params = self.procedures.choose(params)
        return max(0, procedure.most_tokens(num_prompt, self.snapshot().max_tokens, params) - num_prompt)

    @property
    def has_work(self) -> bool:
        """True if any request is running or waiting."""
        return self.scheduler.has_work

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
        self.sequences.forget()

    def check_integrity(self) -> None:
        """Recount every page; raise ``AssertionError`` if a count is wrong."""
        self.sequences.check_integrity([*self.scheduler.running, *self.scheduler.waiting])
