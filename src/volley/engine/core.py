"""Hold everything of an engine that depends on its drafter. Replacing the drafter replaces all of it at once."""

from typing import cast

from volley.config import DecodingConfig
from volley.engine.async_launch import AsyncLaunch
from volley.engine.capacity import Capacity
from volley.engine.exactness import check_exact
from volley.engine.kv_manager import DraftContext, DraftRing, KVManager, TargetPages, draft_span, num_rings, ring_pages
from volley.engine.pacing import Pacing
from volley.engine.recurrent import RecurrentStates, make_recurrent
from volley.engine.runner import Runner
from volley.engine.scheduler import Scheduler
from volley.errors import ConfigError
from volley.memory.kv_cache import PagePool
from volley.memory.kv_store import make_store
from volley.models.drafters.draft_model import DraftModel, check_pair
from volley.models.drafters.drafter import Drafter
from volley.models.targets.target import Target
from volley.policies.arrivals import Arrivals
from volley.policies.base import Policy
from volley.policies.cost import Costs
from volley.policies.make import DEFAULT_POLICY, make_policy
from volley.proposers.base import Proposer
from volley.proposers.make import check_settings, make_draft_model, make_proposer


class EngineCore:
    """States of requests, scheduler, runner, proposer and pacing."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: DecodingConfig,
        capacity: Capacity,
        arrivals: Arrivals,
        proposer: Proposer | None = None,
        before: "EngineCore | None" = None,
    ) -> None:
        """Make empty states and a new policy. ``before`` is the core that is replaced; it lends its stores of K/V, because a
        GPU may not have memory for two."""
        self.target, self.drafter, self.capacity = target, drafter, capacity
        self.pool = PagePool(capacity.num_pages, capacity.page_size)
        store, old_model = (before.runner.store, before.draft_model) if before else (None, None)
        if store is None:
            store = target.make_store(config.kv_dtype, self._num_slots(capacity.num_pages))
        drafts = None if drafter is None else self._make_draft_state(drafter, config, old_model)
        self.draft_model: DraftModel | None = None if drafts is None else drafts.model
        """Drafter in use, bound to the target; ``None``: drafts come from prompt lookup or a given proposer."""
        self.recurrent: RecurrentStates | None = make_recurrent(target, capacity)
        states = [state for state in (drafts, self.recurrent) if state is not None]
        self.kv_manager = KVManager(TargetPages(self.pool, store, prefix_caching=capacity.prefix_caching), states)
        self.scheduler = Scheduler(capacity, self.kv_manager)
        spare = capacity.page_size * capacity.cuda_graphs
        self.runner: Runner = Runner(target, store, self.draft_model, self.recurrent, spare)
        try:
            self.inexact = check_exact(target, store, config)
            """Reason why logits may depend on the batch; ``None`` if they are batch-invariant, bit for bit."""
            if proposer is None and self.draft_model is not None:
                proposer = make_proposer(self.draft_model, config, spare)
            self.proposer = proposer
            """Proposer that makes the drafts: the drafter's, or the one that was given; ``None`` if nothing drafts."""
            if proposer is not None:
                proposer.configure(config)
                proposer.use_store(store)
            self.pacing = self._make_pacing(config, arrivals)
        except BaseException:
            self.runner.close()
            raise
        self.async_launch = AsyncLaunch(self.scheduler, self.runner, self.pacing, proposer, self.draft_model)

    def _num_slots(self, num_pages: int) -> int:
        """Return the number of K/V slots in ``num_pages`` pages, plus one scratch page if CUDA graphs are used."""
        return (num_pages + self.capacity.cuda_graphs) * self.capacity.page_size

    def _make_draft_state(self, drafter: Drafter, config: DecodingConfig, old: DraftModel | None) -> DraftContext:
        """Bind the drafter to the target, and make its K/V: on the target's pages, or on rings under a draft window."""
        target, capacity, size = self.target, self.capacity, self.capacity.page_size
        check_pair(drafter, target)
        span, num_pages = draft_span(drafter, config, cuda_graphs=capacity.cuda_graphs), capacity.num_pages
        if target.world > 1:  # imported here, since it takes PyTorch's distributed tensors
            from volley.models.drafters.divided import part_for

            drafter = part_for(drafter, target)
        drafter.rotary.cover(min(target.context_length, num_pages * size) + span.block_size)
        if span.window is not None:
            num_pages = ring_pages(span.reach, span.window, size) * num_rings(capacity.max_running)
        shapes, num_slots = drafter.kv_shapes, self._num_slots(num_pages)
        if old is not None and (old.drafter.kv_shapes, old.store.num_slots) == (shapes, num_slots):
            store = old.store
        else:
            store = make_store(config.draft_kv_dtype, shapes, num_slots, target.dtype, target.device)
        model = make_draft_model(drafter, store, target, span.window, span.block_size, config)
        if span.window is None:
            return DraftContext(model)
        return DraftRing(model, span.window, size, capacity.max_running, reach=span.reach)

    def _make_pacing(self, config: DecodingConfig, arrivals: Arrivals) -> Pacing:
        check_settings(config, proposer := self.proposer)
        draft_seconds = proposer.seconds if proposer else lambda *_: 0.0
        costs = Costs(draft_seconds, self.runner.seconds, arrivals)
        costs.drafts_on_device = proposer is not None and proposer.drafts_on_device
        can_grow_trees = proposer is not None and proposer.can_grow_trees
        policy = self._make_policy(config, costs)
        return Pacing(policy, costs, can_grow_trees=can_grow_trees, can_suspend=self.kv_manager.can_suspend)

    def _make_policy(self, config: DecodingConfig, costs: Costs) -> Policy:
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

    def reconfigure(self, config: DecodingConfig, before: DecodingConfig) -> None:
        """Decode by ``config`` instead of ``before``. If any field is refused, nothing changes."""
        for name in ("draft_window", "kv_dtype", "draft_kv_dtype", "draft_attention", "compile"):
            if getattr(config, name) != getattr(before, name):
                what = "how K/V are stored" if name.endswith(("window", "dtype")) else "how the drafter runs"
                raise ConfigError(f"{name} decides {what} and cannot change; make another engine to change it")
        check_exact(self.target, self.runner.store, config)
        check_settings(config, self.proposer)
        if self.proposer is not None:
            self.proposer.configure(config)
        try:
            if self._policy_spec(config) != self._policy_spec(before) or config.policy is not before.policy:
                self.pacing.policy = self._make_policy(config, self.pacing.costs)
        except BaseException:
            if self.proposer is not None:
                self.proposer.configure(before)
            raise
