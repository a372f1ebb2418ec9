"""The state kept after a step, of chains, trees and rings, equals that of writing token by token."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.made_up import SPECULATIVE, random_path, random_tree, request, with_batch
from volley.decode.work import DraftSpec, Proposal, Rule, Shape, Verdict, Work
from volley.engine.kv_manager import (
    DraftContext,
    DraftRing,
    KVManager,
    StateManager,
    TargetPages,
    num_rings,
    ring_pages,
)
from volley.engine.step import Step
from volley.memory.kv_cache import PagePool
from volley.memory.kv_store import DenseKVStore
from volley.models.drafters.backlog import Backlog
from volley.models.drafters.draft_model import DraftModel
from volley.params import SamplingParams
from volley.procedures.request import Request

SIZE, PAGES, BLOCK, VOCAB = 4, 14, 5, 3
PROMPTS = [
    [0, 1, 2, 0, 1, 2, 0, 1, 2, 0],
    [0, 1, 2, 0, 1, 2, 0, 1, 2, 1, 1, 1, 0],
    [2, 2],
    [1] * 9,
    [0, 1, 2, 0, 1],
    [0, 1, 2, 0, 1, 2, 0, 1, *[2] * 20],
]


def mark(token_ids: list[int]) -> float:
    """Return a number that a model would store for the last of ``token_ids``: another one for every other text."""
    return float(hash(tuple(token_ids)) % 2**50)


class Remembering(DraftModel):
    """A drafter's K/V that are the target's features as they come."""

    def __init__(self, num_slots: int) -> None:
        self.kept = torch.zeros(num_slots, dtype=torch.float64)
        self.positions = torch.zeros(num_slots, dtype=torch.long)
        self.block_size = BLOCK

    def keep(self, features: Tensor, positions: Tensor, kv_slots: slice | Tensor) -> None:
        self.kept[kv_slots] = features[:, 0]
        self.positions[kv_slots] = positions


class World:
    """States of random requests, of which a text's every token is known by its mark."""

    def __init__(
        self, chance: random.Random, *, prefix_caching: bool, window: int | None, most_waiting: int = 9
    ) -> None:
        self.chance = chance
        self.store = DenseKVStore([(1, 1)], PAGES * SIZE, torch.float64, torch.device("cpu"))
        self.pool = PagePool(PAGES, SIZE)
        pages = TargetPages(self.pool, self.store, prefix_caching=prefix_caching)
        self.window = window
        if window is None:
            self.model = Remembering(PAGES * SIZE)
            self.drafting: DraftContext = DraftContext(self.model, most_waiting)
        else:
            self.model = Remembering(ring_pages(BLOCK, window, SIZE) * SIZE * num_rings(3))
            self.drafting = DraftRing(self.model, window, SIZE, 3, most_waiting)
        self.kv_manager = KVManager(pages, [self.drafting])
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.found: dict[Request, int] = {}
        """How much of each running request was known when it was admitted."""
        self.cached = 0
        self.shortened = 0
        """How often a window was not found whole."""

    def arrive(self) -> None:
        prompt = self.chance.choice(PROMPTS)
        self.waiting.append(request(prompt, SamplingParams(max_tokens=12), prefix_root=b""))

    def admit(self) -> None:
        if self.waiting and len(self.running) < 3:
            own = self.waiting[0]
            if self.kv_manager.admit(own, min(own.length + BLOCK, own.max_length)):
                self.running.append(self.waiting.pop(0))
                self.found[own] = own.computed
                self.cached += own.computed
                self.shortened += own.draft_table.first > max(0, own.computed - (self.window or 0))
            else:
                assert (own.computed, own.table.pages) == (0, [])

    def preempt(self) -> None:
        if self.running:
            own = self.running.pop(self.chance.randrange(len(self.running)))
            self.kv_manager.release(own)
            self.waiting.insert(0, own)

    def forget(self) -> None:
        """Windows go before prefixes do, or both."""
        (self.drafting if self.chance.random() < 0.7 else self.kv_manager).forget()

    def work(self, own: Request) -> Work[Request]:
        if not own.is_decoding:
            work = SPECULATIVE.read(own, self.chance.randint(1, own.prefill_end - own.computed))
            if own.computed + work.num_known == own.length:
                work.verdict = Verdict(0, [self.chance.randrange(VOCAB)])
            return work
        most = min(BLOCK, own.remaining) - 1
        nodes = most + self.chance.randrange(4)
        is_tree = most > 0 and self.chance.random() < 0.5
        work = Work(
            own, DraftSpec(Shape.TREE if is_tree else Shape.CHAIN, Rule.GREEDY, nodes if is_tree else most, most)
        )
        if is_tree:
            work.proposal = random_tree(nodes, VOCAB, self.chance)
            path = random_path(work.proposal, self.chance)[:most]
            chosen = [work.proposal.token_ids[node - 1] for node in path]
            work.verdict = Verdict(len(path), [*chosen, self.chance.randrange(VOCAB)], path)
        else:
            work.proposal = Proposal([self.chance.randrange(VOCAB) for _ in range(most)])
            accepted = self.chance.randint(0, most)
            work.verdict = Verdict(accepted, [*work.proposal.token_ids[:accepted], self.chance.randrange(VOCAB)])
        return work

    def step(self) -> None:
        works = []
        for own in list(self.running):
            work = self.work(own)
            if self.kv_manager.reserve(own, own.computed + work.num_known + len(work.proposal.token_ids)):
                works.append(work)
        if not works:
            return
        step = with_batch(Step(works))
        assert step.batch is not None
        self.kv_manager.prepare(step)
        for work in works:
            if work.spec.positions:
                self.draft(work.request)
        features = [self.compute(work) for work in works]
        step.features = torch.tensor([value for own in features for value in own], dtype=torch.float64)[:, None]
        before = {work.request: work.request.computed for work in works}
        self.kv_manager.keep(step)
        for work in works:
            own = work.request
            assert own.computed == before[own] + work.num_known + work.verdict.accepted
            if work.verdict.token_ids:
                own.append(work.verdict.token_ids, work.verdict.accepted)
            if own.finish_reason is not None:
                self.running.remove(own)
                self.kv_manager.release(own)

    def draft(self, own: Request) -> None:
        """Play a draft: read the context, and write a block's own K/V behind it."""
        self.check_context(own)
        end = own.draft_table.capacity if self.window is None else own.computed + BLOCK
        self.model.kept[own.draft_table.slot_array(own.computed, min(end, own.computed + BLOCK))] = -1.0

    def compute(self, work: Work[Request]) -> list[float]:
        """Play a pass: write the mark of every token, and return the marks as features."""
        own, parents = work.request, work.proposal.parents
        texts = [own.token_ids[: own.computed + count] for count in range(1, work.num_known + 1)]
        root = len(texts) - 1
        for index, token in enumerate(work.proposal.token_ids):
            parent = index if parents is None else parents[index]
            texts.append([*texts[root + parent], token])
        marks = [mark(text) for text in texts]
        slots = own.table.slots(own.computed, own.computed + len(marks))
        values = torch.tensor(marks, dtype=torch.float64)[:, None, None]
        self.store.write(0, slots, values, -values)
        return marks

    def go_on(self, count: int) -> None:
        for _ in range(count):
            getattr(self, self.chance.choice(["arrive", "admit", "step", "step", "preempt", "forget"]))()
            self.check()

    def check(self) -> None:
        """Every token that counts as computed is where its position says, in both states once nothing waits."""
        self.kv_manager.check_integrity([*self.running, *self.waiting])
        settles = self.chance.random() < 0.2
        if settles:
            self.kv_manager.settle()
            assert len(self.drafting.backlog) == 0
        for own in self.running:
            end = own.computed
            if own.table.pages and end:
                slots = own.table.slot_array(0, end)
                expected = torch.tensor([mark(own.token_ids[: p + 1]) for p in range(end)], dtype=torch.float64)
                assert torch.equal(self.store.keys[0][slots, 0, 0], expected)
                assert torch.equal(self.store.values[0][slots, 0, 0], -expected)
                if settles:
                    self.check_context(own)

    def check_context(self, own: Request) -> None:
        """All that a draft will read: a ring has given way already to the block behind the last token that is known."""
        table = own.draft_table
        assert table.first <= self.found[own] if self.window else table.first == 0
        first = 0 if self.window is None else max(min(own.length - 1 - self.window, own.computed), table.first)
        expected = [mark(own.token_ids[: p + 1]) for p in range(first, own.computed)]
        where = table.slot_array(first, own.computed)
        assert self.model.kept[where].tolist() == expected
        assert self.model.positions[where].tolist() == list(range(first, own.computed))


CHANCES = st.integers(0, 2**32 - 1).map(random.Random)
ACTIONS = st.lists(
    st.sampled_from(["arrive", "arrive", "admit", "admit", "step", "step", "step", "preempt", "forget"]), max_size=60
)


@given(
    actions=ACTIONS,
    chance=CHANCES,
    prefix_caching=st.booleans(),
    window=st.sampled_from([None, None, 2, 6]),
    most_waiting=st.sampled_from([0, 9, 1000]),
)
def test_whatever_arrives_and_is_preempted_what_is_kept_is_the_text_s_own(
    actions: list[str], chance: random.Random, prefix_caching: bool, window: int | None, most_waiting: int
) -> None:
    world = World(chance, prefix_caching=prefix_caching, window=window, most_waiting=most_waiting)
    for action in actions:
        getattr(world, action)()
        world.check()
    for own in [*world.running, *world.waiting]:
        world.kv_manager.release(own)
    assert world.pool.num_used == 0
    world.kv_manager.check_integrity([])


@pytest.mark.parametrize("window", [None, 6])
def test_prefixes_were_found_above(window: int | None) -> None:
    """Or the property would say nothing about them."""
    world = World(random.Random(0), prefix_caching=True, window=window)
    world.go_on(400)
    assert world.cached > 50
    assert (world.shortened > 5) == (window is not None)


@pytest.mark.parametrize("fault", ["not moved", "one too many", "drafted too soon", "forgotten"])
def test_what_a_wrong_keep_leaves_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Trees whose K/V are not moved, a request that counts the token that was refused, features that wait for too long."""
    if fault == "drafted too soon":
        monkeypatch.setattr(DraftContext, "prepare", lambda *_: None)
    elif fault == "forgotten":
        monkeypatch.setattr(Backlog, "write", lambda backlog: backlog.__init__(lambda *_: None))  # type: ignore[misc]
    elif fault == "not moved":
        monkeypatch.setattr(DenseKVStore, "move", lambda *_: None)
    else:
        monkeypatch.setattr(Work, "num_kept", property(lambda work: work.num_known + len(work.proposal.token_ids)))
    world = World(random.Random(1), prefix_caching=False, window=None)
    with pytest.raises((AssertionError, RuntimeError)):
        world.go_on(200)


def test_a_draft_pays_for_the_tokens_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the four that it needs were decoded then; the prompt's were due anyway."""
    now = iter([10.0, 18.0])
    monkeypatch.setattr("volley.engine.kv_manager.time.perf_counter", lambda: next(now))
    own = DraftContext(Remembering(PAGES * SIZE))
    first, second = request([1, 2]), request([1, 2], answered=1)
    second.computed = 1
    for place, held in enumerate((first, second)):
        held.table.extend([place])
    step = with_batch(Step([SPECULATIVE.read(first, 2), Work(second, DraftSpec(Shape.CHAIN, Rule.GREEDY))]))
    step.works[1].proposal, step.works[1].verdict = Proposal([3]), Verdict(1, [3, 4])
    step = with_batch(step)
    step.features = torch.zeros(4, 1, dtype=torch.float64)
    own.keep(step)
    plain = Step([Work(second, DraftSpec(Shape.CHAIN, Rule.GREEDY))])
    own.prepare(plain)
    assert (len(own.backlog), plain.settling) == (4, 0.0)
    drafting = Step([Work(second, DraftSpec(Shape.CHAIN, Rule.GREEDY, 2, 2))])
    own.prepare(drafting)
    assert (len(own.backlog), drafting.settling) == (0, 4.0)


# -- several states ----------------------------------------------------------------------------------------------------


class Forgetful(StateManager):
    """Knows of every prompt the first token only."""

    def __init__(self) -> None:
        self.released = 0
        self.fits = True

    def reserve(self, request: Request, num_tokens: int) -> bool:
        return self.fits

    def match_prefix(self, request: Request, most: int) -> int:
        return min(most, SIZE)

    def keep(self, step: Step) -> None:
        pass

    def release(self, request: Request) -> None:
        self.released += 1


def make_manager(*others: StateManager) -> KVManager:
    store = DenseKVStore([(1, 1)], PAGES * SIZE, torch.float32, torch.device("cpu"))
    return KVManager(TargetPages(PagePool(PAGES, SIZE), store, prefix_caching=True), others)


def read(own: KVManager, request: Request) -> None:
    assert own.admit(request, request.length)
    assert own.reserve(request, request.length)
    step = with_batch(Step([SPECULATIVE.read(request, request.prefill_end - request.computed)]))
    own.keep(step)


def test_a_prefix_is_as_long_as_every_state_knows_it() -> None:
    prompt = list(range(13))
    for others, known in ((), 12), ((Forgetful(),), SIZE):
        own = make_manager(*others)
        first = request(prompt)
        read(own, first)
        own.release(first)
        again = request(prompt)
        assert own.admit(again, again.length)
        assert again.computed == again.stats.cached_tokens == again.table.capacity == known
        assert len(again.page_hashes) == known // SIZE
        own.check_integrity([again])


def test_a_request_that_one_state_has_no_room_for_holds_nothing() -> None:
    state = Forgetful()
    own = make_manager(state)
    state.fits = False
    waiting = request([1, 2, 3])
    assert not own.admit(waiting, 3)
    assert (waiting.computed, waiting.table.pages, own.pages.pool.num_used, state.released) == (0, [], 0, 1)


@given(st.integers(1, 20), st.integers(1, 40), st.integers(1, 16))
def test_a_ring_holds_window_and_block_wherever_they_begin(block: int, window: int, page_size: int) -> None:
    pages = ring_pages(block, window, page_size)
    assert all((start % page_size + window + block - 1) // page_size < pages for start in range(page_size))
