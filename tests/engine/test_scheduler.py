"""Who takes part in a step: within the budget, in line, and everybody in the end."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.made_up import costs, random_path, random_tree, request, with_batch
from volley.config import CapacityConfig
from volley.decode.work import DraftSpec, Phase, Proposal, Shape, Verdict, Work
from volley.engine.kv_manager import KVManager, TargetPages
from volley.engine.pacing import Pacing
from volley.engine.scheduler import Scheduler
from volley.engine.step import Step
from volley.memory.kv_cache import PagePool
from volley.memory.kv_store import DenseKVStore
from volley.params import SamplingParams
from volley.policies.base import Policy, View
from volley.policies.cost import Costs
from volley.policies.fixed import Fixed
from volley.procedures.request import Request

SIZE, PAGES, BLOCK, VOCAB = 4, 12, 5, 3


class Whims(Policy):
    """Chains, trees and copies of all sizes."""

    uses_lookup = True

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
        return [self.spec(view) for view in views]

    def spec(self, view: View) -> DraftSpec:
        if view.lookup_confidence and self.chance.random() < 0.4:
            return view.lookup(self.chance.randint(1, 20))
        return view.draft(self.chance.randrange(BLOCK), self.chance.choice([0, 0, 3, 9]))


class World:
    """A scheduler and made-up passes."""

    def __init__(
        self,
        policy: Policy,
        chance: random.Random,
        pages: int = PAGES,
        *,
        block_size: int = BLOCK,
        made_costs: Costs | None = None,
        **sizes: int,
    ) -> None:
        self.chance = chance
        self.now = 0.0
        """By the scheduler's clock."""
        self.capacity = CapacityConfig(**{"page_size": SIZE, "max_running": 3, "max_batch_tokens": 10, **sizes})
        store = DenseKVStore([(1, 1)], pages * SIZE, torch.float32, torch.device("cpu"))
        self.pool = PagePool(pages, SIZE)
        self.kv_manager = KVManager(TargetPages(self.pool, store, prefix_caching=True), ())
        self.scheduler = Scheduler(self.capacity, self.kv_manager, lambda: self.now)
        policy.attach(block_size, made_costs or costs())
        self.pacing = Pacing(policy, policy.costs or costs(), can_grow_trees=True)
        self.arrived: list[Request] = []

    def arrive(self, length: int | None = None, priority: int = 0, max_tokens: int = 12) -> Request:
        prompt = [self.chance.randrange(VOCAB) for _ in range(length or self.chance.randint(1, 20))]
        own = request(prompt, SamplingParams(max_tokens=max_tokens, priority=priority), request_id=len(self.arrived))
        self.scheduler.add(own)
        self.arrived.append(own)
        return own

    def step(self) -> Step:
        """Schedule, check what any schedule must keep to, and let made-up tokens come of it."""
        had_work = self.scheduler.has_work
        before = {own.request_id: own.stats.preemptions for own in self.scheduler.running}
        step = self.scheduler.schedule(self.pacing)
        self.check(step, before)
        assert bool(step.works) is had_work
        if not step.works:
            return step
        if not self.run(step):
            return step
        self.kv_manager.keep(with_batch(step))
        for work in step.works:
            if work.verdict.token_ids:
                work.request.append(work.verdict.token_ids, work.verdict.accepted)
            if work.request.finish_reason is not None:
                self.scheduler.finish(work.request)
        self.check_integrity()
        return step

    def check_integrity(self) -> None:
        self.kv_manager.check_integrity([*self.scheduler.running, *self.scheduler.waiting])

    def check(self, step: Step, before: dict[int, int]) -> None:
        """``before`` says how often each request that was running had been preempted; those resumed by this step are not in line
        with it: they take what they ask for after prompts have had their share.
        """
        running, most = self.scheduler.running, self.capacity.max_batch_tokens
        assert len(running) <= self.capacity.max_running
        taking_part = [work.request for work in step.works]
        assert len(set(map(id, taking_part))) == len(taking_part), "nobody takes part twice"
        assert all(own in running for own in taking_part)
        for work in step.works:
            assert work.request.table.capacity >= work.request.computed + work.num_tokens, "with room for all of it"
            assert work.phase is Phase.DECODE or work.num_known > 0
        went_on = [w for w in step.works if before.get(w.request.request_id) == w.request.stats.preemptions]
        sizes = [work.num_tokens for work in went_on if work.phase is Phase.DECODE]
        read = sum(work.num_known for work in step.works if work.phase is Phase.PREFILL)
        assert read <= max(most - sum(sizes), -(-most // 8)), "prompts take what is left, and at least an eighth"
        larger = [work for work in went_on if work.spec.shape is not Shape.CHAIN]
        extra = sum(max(0, work.spec.size - work.spec.positions) for work in larger)
        chains = sum(sizes) - extra
        assert extra <= max(0, most - chains) // 2, "trees and copies take half of what chains leave"
        priorities = [own.params.priority for own in running]
        assert priorities == sorted(priorities)
        queue = [own.params.priority for own in self.scheduler.waiting]
        assert queue == sorted(queue)

    def run(self, step: Step) -> bool:
        """Draft, verify and judge; False if drafts were dropped."""
        for work in step.works:
            self.judge(work)
        return True

    def judge(self, work: Work[Request]) -> None:
        own = work.request
        token = self.chance.randrange(VOCAB)
        if work.phase is Phase.PREFILL:
            if own.computed + work.num_known == own.length:
                work.verdict = Verdict(0, [token])
        elif work.spec.shape is Shape.TREE:
            work.proposal = random_tree(work.spec.size, VOCAB, self.chance)
            path = random_path(work.proposal, self.chance)[: work.spec.positions]
            work.verdict = Verdict(len(path), [*(work.proposal.token_ids[node - 1] for node in path), token], path)
        else:
            work.proposal = Proposal([self.chance.randrange(VOCAB) for _ in range(work.spec.size)])
            accepted = self.chance.randint(0, work.spec.size)
            work.verdict = Verdict(accepted, [*work.proposal.token_ids[:accepted], token])

    def drain(self, most: int = 500) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("somebody is never served")


CHANCES = st.integers(0, 2**32 - 1).map(random.Random)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(-1, 1)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("preempt"), st.integers(0, 9)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
    ),
    min_size=8,
    max_size=40,
)


@given(
    actions=ACTIONS,
    chance=CHANCES,
    max_batch_tokens=st.sampled_from([1, 3, 10, 64]),
    max_running=st.integers(1, 5),
)
def test_whatever_arrives_every_schedule_is_sound_and_everybody_is_served(
    actions: list[tuple[str, int]], chance: random.Random, max_batch_tokens: int, max_running: int
) -> None:
    world = World(Whims(chance), chance, max_batch_tokens=max_batch_tokens, max_running=max_running)
    for action, value in actions:
        running = world.scheduler.running
        if action == "arrive":
            world.arrive(priority=value)
        elif action == "step":
            for _ in range(value):
                world.step()
        elif action == "preempt" and running:
            world.scheduler.preempt(running[value % len(running)])
        elif action == "finish" and world.arrived:
            own = world.arrived[value % len(world.arrived)]
            own.finish_reason = own.finish_reason or "abort"
            world.scheduler.finish(own)
        world.check_integrity()
    world.drain()
    assert world.pool.num_used == 0
    assert all(own.finish_reason in ("length", "abort") for own in world.arrived)
    assert all(own.num_output == 12 for own in world.arrived if own.finish_reason == "length")


def plain_world(block_size: int = 1, **sizes: int) -> World:
    return World(Fixed(block_size), random.Random(0), **sizes)


def test_nothing_is_scheduled_where_there_is_nothing_to_do() -> None:
    world = plain_world()
    assert world.scheduler.schedule(world.pacing).works == []
    assert not world.scheduler.has_work


def test_the_first_in_line_is_never_preempted() -> None:
    world = plain_world(BLOCK, max_batch_tokens=64)
    requests = [world.arrive(length=10, max_tokens=30) for _ in range(4)]
    world.drain()
    assert requests[0].stats.preemptions == 0
    assert sum(own.stats.preemptions for own in requests) > 0, "or this says nothing"


def test_long_prompts_are_read_in_chunks_beside_those_that_decode() -> None:
    world = plain_world()
    first = world.arrive(length=8)
    world.step()
    second = world.arrive(length=20)
    chunks = []
    while not second.num_output:
        works = {work.request.request_id: work for work in world.step().works}
        assert works[first.request_id].phase is Phase.DECODE
        chunks.append(works[second.request_id].num_known)
    assert chunks == [9, 9, 2]


def test_prompts_go_on_though_chains_fill_the_pass() -> None:
    world = plain_world(BLOCK, max_batch_tokens=8)
    first = world.arrive(length=1)
    world.step()
    second = world.arrive(length=9)
    third = world.arrive(length=3)
    for _ in range(20):
        if second.finish_reason is None or third.finish_reason is None:
            world.step()
    assert first.num_output > 1
    assert second.num_output > 1


@pytest.mark.parametrize("nodes", [0, 40])
def test_a_tree_takes_half_of_what_chains_leave(nodes: int) -> None:
    class Trees(Fixed):
        def decide(self, views: Sequence[View], under_way: int) -> list[DraftSpec]:
            return [view.draft(3, nodes) for view in views]

    world = World(Trees(), random.Random(0), max_batch_tokens=24)
    world.arrive(length=2)
    world.arrive(length=2)
    world.step()
    sizes = [work.spec.size for work in world.step().works]
    assert sizes == ([3 + (24 - 2 * 4) // 2 // 2] * 2 if nodes else [3, 3])


def test_a_request_that_ends_leaves_at_once_wherever_it_is() -> None:
    world = plain_world(max_running=1)
    one, other = world.arrive(length=9), world.arrive(length=9)
    world.step()
    for own in (other, one):
        own.finish_reason = "abort"
        world.scheduler.finish(own)
        assert not own.table.pages
    assert not world.scheduler.has_work
    assert world.pool.num_used == 0


def test_requests_that_draft_sit_out_while_prompts_are_read_for_as_long_as_their_last_pass_took() -> None:
    world = plain_world(BLOCK, max_batch_tokens=64, max_running=8)
    first = world.arrive(length=4, max_tokens=40)

    def step(seconds: float) -> set[int]:
        works = world.step().works
        world.now += seconds
        return {work.request.request_id for work in works}

    assert step(1.0) == {0}
    assert step(3.0) == {0}, "with drafts, 3 s"
    assert first.is_decoding
    seen = []
    for number in range(1, 5):
        world.arrive(length=4, max_tokens=1)
        seen.append(step(2.0))
        assert number in seen[-1], "a prompt never waits for a second pass"
    assert [0 in taking_part for taking_part in seen] == [False, False, True, False]


def test_plain_decoding_goes_on_beside_prompts() -> None:
    world = plain_world(1, max_batch_tokens=64, max_running=8)
    world.arrive(length=4, max_tokens=40)
    world.step()
    world.now += 1.0
    world.arrive(length=4)
    assert len(world.step().works) == 2


def first_tokens(block_size: int, *, clock_stands: bool = False) -> tuple[float, float]:
    """The 99th percentile of the time to the first token, and tokens a second, of a closed loop of 8 on a made-up machine.

    Who ends comes again during the next pass. A pass takes as long as 1 + tokens / 25, and 0.3 more where anything is drafted.
    """
    world = World(Fixed(block_size), random.Random(0), pages=400, max_batch_tokens=64, max_running=8)
    arrived: dict[Request, float] = {}
    waits, now, written = list[float](), 0.0, 0
    coming = 8
    while len(waits) < 400:
        step = world.step()
        for _ in range(coming):
            own = world.arrive(length=world.chance.randint(4, 12), max_tokens=world.chance.randint(32, 96))
            arrived[own] = now
        tokens = sum(work.num_tokens for work in step.works)
        now += (1 + tokens / 25 + 0.3 * any(work.spec.size for work in step.works)) * bool(tokens)
        world.now = 0.0 if clock_stands else now
        written += sum(len(work.verdict.token_ids) for work in step.works)
        waits += [now - arrived.pop(own) for own in list(arrived) if own.num_output]
        coming = sum(work.request.finish_reason is not None for work in step.works)
    return sorted(waits[8:])[int(0.99 * len(waits[8:]))], written / now


@pytest.mark.slow
def test_first_tokens_do_not_wait_for_drafts() -> None:
    plain, speed = first_tokens(1)
    drafting, faster = first_tokens(3)
    unbounded, _ = first_tokens(3, clock_stands=True)
    assert drafting <= 1.15 * plain
    assert faster > speed
    assert unbounded > 1.15 * plain, "or this says nothing"
