"""Ways to cut recurrent states back to the tokens that stay, side by side in the cycles of a 0.6B model: milliseconds and bytes.

    python benchmarks/roll_back.py --dtype bfloat16 --threads 1

A hybrid of random weights (gated delta nets in three of four layers) always writes one token, since a bias forces it. A script
drafts chains and trees of which a chosen number of tokens is right, so acceptance is the script's in bf16 too. In every cycle,
each way makes the same states of the same pass, in which caches are emptied before each:

- *applied*: volley's. The updates that the pass kept are added to the old state, which is read once and written once.
- *kept*: the pass writes the state after every token, behind each layer, while the state before is still in the cache (in C, each
  from its parent's). The accepted one becomes the request's by its number, or is copied back.
- *layers again*: the convolution and the rule of the tokens that stay, from the convolution's inputs (all layers at once but for
  the two products with the old state), then the states in C as in *applied*.
- *target again*: a second pass of the target over the tokens that stay, without its head.

Their states are compared with volley's. A cycle's time has volley's way in it and no other one. Figures are medians.

A second table has plain decoding, where nothing can be cut: states that the pass leaves alone and that are moved after it,
against states that each layer moves on at once, which is volley's way. They take turns, cycle by cycle, in one engine.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from volley import Engine, SamplingParams, Target
from volley.decode.work import Work
from volley.engine.recurrent import RecurrentStates
from volley.engine.step import Step
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.recurrent_pass import RecurrentPass, Wanted
from volley.memory.recurrent_store import RecurrentStore
from volley.models.layers.accelerate import accelerate
from volley.native.states import Moved, move_states
from volley.proposers.base import Proposer, Works
from volley.types import Proposal

PROMPT, RIGHT, WRONG, OTHER = 64, 5, 6, 7
SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}
HEADS, SIZE = SHAPE["linear_num_value_heads"], SHAPE["linear_key_head_dim"]
WAYS = ("applied", "kept: written", "kept: copied back", "layers again", "target again")


def random_target(layers: int, vocab_size: int, dtype: torch.dtype) -> Target:
    """A target that computes as a loaded one does: in bf16 with the kernels for CPUs, where they run."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**{**SHAPE, "num_hidden_layers": layers, "vocab_size": vocab_size}, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    accelerate(model, release=True)
    return Target(model)


class Draft(NamedTuple):
    """What every cycle verifies: ``nodes`` tokens, anchor included, of which ``kept`` stay."""

    nodes: int
    is_tree: bool
    kept: int

    def __str__(self) -> str:
        return f"{'tree' if self.is_tree else 'chain'} of {self.nodes}"

    def proposal(self) -> Proposal:
        """The right branch of a tree alternates with other children of its nodes, so its rows lie apart."""
        if not self.is_tree:
            right = self.kept - 1
            return Proposal(([RIGHT] * right + [WRONG] * self.nodes)[: self.nodes - 1])
        tokens, parents, last = list[int](), list[int](), 0
        for depth in range(1, self.nodes):
            tokens += [OTHER, RIGHT if depth < self.kept else WRONG]
            parents += [last, last]
            last = len(tokens)
        size = self.nodes - 1
        return Proposal(tokens[:size], parents=tuple(parents[:size]), confidence=[0.5] * size)


class Drafting(Proposer):
    can_grow_trees = True

    def __init__(self, draft: Draft) -> None:
        self.draft, self.block_size = draft, draft.nodes

    def propose(self, works: Works, *, with_confidence: bool) -> float:
        for work in works:
            work.proposal = self.draft.proposal()
        return 0.0


class Clock:
    """Seconds of named parts of one cycle."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._others = torch.zeros(2**24)  # 64 MiB: more than the caches hold

    def empty_caches(self) -> None:
        self._others.add_(1)

    @contextmanager
    def count(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started


class RecordedPass(RecurrentPass):
    """Keeps what the other ways need, and writes the states after every token of open segments, all of one length."""

    clock: Clock
    every: np.ndarray
    """Slots ``[requests, nodes]`` of the states after every token."""

    def follow(self) -> None:
        """Work out where the states after every token come from and go to."""
        self.raw: list[tuple[Tensor, Tensor]] = []
        self.gates: list[tuple[Tensor, Tensor]] = []
        moves = []
        for run, (segment, slots) in enumerate(zip(self.batch.segments, self.every, strict=True)):
            parents = segment.parents or range(segment.length - 1)
            before = [segment.table.state, *(slots[parent] for parent in parents)]
            moves += [(run, row, before[row], slots[row]) for row in range(segment.length)]
        self.moves = np.array(moves)
        self.stays = np.tile(np.eye(self.batch.segments[0].length, dtype=np.bool_), (len(self.batch.segments), 1))

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.raw.append((inputs, weight))
        return super().convolve(inputs, weight, bias)

    def scan(self, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, betas: Tensor | None) -> Tensor:
        assert self.store is not None
        assert betas is not None
        self.gates.append((decays, betas))
        states = self.store.states[self._num_rules]
        outputs = super().scan(queries, keys, values, decays, betas)
        with self.clock.count("kept: written"):
            trace = self._traces[-1][0]
            own = decays.view(len(self.batch.segments), -1, *decays.shape[1:]).transpose(1, 2)
            # Each state comes from its parent's, so a token's own decay stands for the sum of all.
            move_states([Moved(states, trace.keys, trace.updates, own)], self.moves, self.stays)
        return outputs


class Again:
    """Computes convolution and rule again over the tokens that stay: ``rows [N, a]`` of a recorded pass.

    All layers are computed at once up to ``u = W (v − e^G k S)``, where W is the inverse of the triangular system.
    """

    def __init__(self, own: RecordedPass, store: RecurrentStore, rows: Tensor) -> None:
        """``store`` holds the states before, of request i in slot i; they become those after."""
        self.own, self.store, self.rows, self.first = own, store, rows, HEADS * SIZE  # queries are not needed
        # ``[width, layers, 1, 1, C]``; an engine would keep them
        self.weight = torch.stack([weight[self.first :].float().T for _, weight in own.raw], dim=1)[:, :, None, None]

    def __call__(self) -> None:
        keys, values, totals, decay, inverse = self._without_states()
        count, kept = self.rows.shape
        moves = np.array([(run, kept - 1, run, run) for run in range(count)])
        stays, scaled = np.ones((count, kept), dtype=np.bool_), keys * decay
        for layer, states in enumerate(self.store.states):
            before = states[:count].flatten(0, 1)
            rest = torch.baddbmm(values[layer].flatten(0, 1), scaled[layer].flatten(0, 1), before, alpha=-1)
            updates = torch.bmm(inverse[layer].flatten(0, 1), rest).view_as(values[layer])
            move_states([Moved(states, keys[layer], updates, totals[layer])], moves, stays)

    def _without_states(self) -> tuple[Tensor, ...]:
        """k, v, G, e^G and W, each ``[layers, N, heads, a, …]``."""
        (count, kept), flat = self.rows.shape, self.rows.flatten()
        inputs = torch.stack([raw[:, self.first :].index_select(0, flat) for raw, _ in self.own.raw])
        past = torch.stack([history[:count, :, self.first :] for history in self.store.histories])
        extended = torch.cat((past, inputs.view(len(past), count, kept, -1)), dim=2).float()
        convolved = extended[:, :, :kept] * self.weight[0]
        for tap in range(1, len(self.weight)):
            convolved.addcmul_(extended[:, :, tap : tap + kept], self.weight[tap])
        mixed = silu(convolved.to(inputs.dtype).float()).to(inputs.dtype).float()  # PyTorch's silu in bf16 is slow
        mixed = mixed.view(*convolved.shape[:-1], 2, HEADS, SIZE)
        keys, values = (mixed[..., part, :, :].transpose(2, 3).contiguous() for part in range(2))
        keys *= torch.rsqrt(keys.square().sum(dim=-1, keepdim=True) + 1e-6)
        decays, betas = (
            torch.stack([gate[part][flat] for gate in self.own.gates]).view(len(past), count, kept, HEADS, 1)
            for part in range(2)
        )
        totals, betas = decays.transpose(2, 3).cumsum(dim=3), betas.transpose(2, 3)
        if kept == 1:
            return keys, values, totals, totals.exp(), betas
        apart = torch.full((kept, kept), -torch.inf).triu(1) + totals - totals.transpose(-1, -2)
        system = betas * (keys @ keys.transpose(-1, -2)) * apart.exp()
        targets = torch.diag_embed(betas.squeeze(-1))
        inverse = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
        return keys, values, totals, totals.exp(), inverse


class OpenPass(RecurrentPass):
    """Leaves all states to the end of the pass, also those of single tokens."""

    def _find_settled(self) -> Any:
        return super()._find_settled()._replace(slots={})


class Cuts:
    """Stands in for ``RecurrentStates.keep``: lets each way cut the states of a step, volley's last, and compares them."""

    def __init__(self, engine: Engine, draft: Draft, requests: int) -> None:
        assert engine.recurrent is not None
        self.engine, self.draft, self.state, self.clock = engine, draft, engine.recurrent, Clock()
        self.applied: Callable[[Step], None] = self.state.keep
        store = self.state.store
        self.every = np.array([self.state._free.pop() for _ in range(requests * draft.nodes)]).reshape(requests, -1)
        self.spare = [self.state._free.pop() for _ in range(requests)]
        self.work = RecurrentStore(store.layout, requests, store.histories[0].dtype, store.states[0].device)
        self.furthest: dict[str, float] = {}
        """The largest difference from volley's states, relative to the largest number in a state."""
        self.spent = 0.0
        """Seconds of the last step that went into comparing."""

    def start(self, batch: RaggedBatch, works: Sequence[Work[Any]]) -> RecurrentPass:
        if len(works) < len(self.every) or any(segment.length != self.draft.nodes for segment in batch.segments):
            return RecurrentStates.start(self.state, batch, works)
        own = RecordedPass(batch, self.state.store.layout, self.state.store)
        own.every, own.clock = self.every, self.clock
        own.follow()
        return own

    def keep(self, step: Step) -> None:
        self.clock.seconds = dict(self.clock.seconds)
        own, started = step.recurrent, time.perf_counter()
        if not isinstance(own, RecordedPass):
            self.applied(step)
            return
        slots = [segment.table.state or 0 for segment in own.batch.segments]
        paths = torch.tensor([work.kept_rows for work in step.works])
        assert paths.shape[1] == self.draft.kept, "the script's acceptance"
        wanted = [
            Wanted(i, path[-1], slot) for i, (path, slot) in enumerate(zip(paths.tolist(), self.spare, strict=True))
        ]
        found = {
            "kept: copied back": self._copied_back(own, wanted),
            "layers again": self._layers_again(
                own, wanted, slots, paths + torch.tensor(own.batch.offsets[:-1])[:, None]
            ),
            "target again": self._target_again(own, paths),
        }
        self.clock.empty_caches()
        with self.clock.count("applied"):
            self.applied(step)
        store = self.state.store
        for way, states in found.items():
            for own_states, expected in zip(states, store.states, strict=True):
                expected = expected[slots]
                apart = float((own_states - expected).abs().max() / expected.abs().max())
                self.furthest[way] = max(self.furthest.get(way, 0.0), apart)
        self.spent = time.perf_counter() - started - self.clock.seconds["applied"]

    def _copied_back(self, own: RecordedPass, wanted: Sequence[Wanted]) -> list[Tensor]:
        self.clock.empty_caches()
        with self.clock.count("kept: histories"):
            own._write_histories(wanted)
        with self.clock.count("kept: copied back"):
            for mine, states in zip(self.work.states, self.state.store.states, strict=True):
                for place, (_, row, _) in enumerate(wanted):
                    mine[place] = states[self.every[place, row]]
        return [states.clone() for states in self.work.states]

    def _layers_again(
        self, own: RecordedPass, wanted: Sequence[Wanted], slots: list[int], rows: Tensor
    ) -> list[Tensor]:
        store = self.state.store
        for mine, theirs in ((self.work.states, store.states), (self.work.histories, store.histories)):
            for states, source in zip(mine, theirs, strict=True):
                states.copy_(source[slots])
        again = Again(own, self.work, rows)
        self.clock.empty_caches()
        with self.clock.count("layers again"):
            again()
            own._write_histories(wanted)
        return [states.clone() for states in self.work.states]

    def _target_again(self, own: RecordedPass, paths: Tensor) -> list[Tensor]:
        store, target, kept = self.state.store, self.engine.target, paths.shape[1]
        segments = [Segment(segment.table, segment.start, kept) for segment in own.batch.segments]
        tokens = own.batch.token_ids[(paths + torch.tensor(own.batch.offsets[:-1])[:, None]).flatten()]
        none = torch.zeros(0, dtype=torch.long)
        self.clock.empty_caches()
        with self.clock.count("target again"):
            batch = RaggedBatch(segments, tokens)
            again = OpenPass(batch, store.layout, store)
            target.forward(batch, self.engine.runner.store, none, None, again)
            again.write([Wanted(index, kept - 1, slot) for index, slot in enumerate(self.spare)])
        return [states[self.spare] for states in store.states]


def measure(target: Target, requests: int, draft: Draft, cycles: int) -> tuple[list[object], dict[str, float]]:
    """A row of the table, and how far the ways' states are from volley's."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(8, 1000, (requests, PROMPT), generator=generator).tolist()
    params = SamplingParams(
        max_tokens=draft.kept * (cycles + 3) + draft.nodes, ignore_eos=True, logit_bias=((RIGHT, 100.0),)
    )
    engine = Engine(
        target,
        proposer=Drafting(draft),
        policy=f"fixed:{draft.nodes}",
        tree_nodes=draft.nodes if draft.is_tree else None,
        num_pages=512,
        max_running=requests,
        num_states=requests * (draft.nodes + 2) + 1,
        prefix_caching=False,
    )
    cuts = Cuts(engine, draft, requests)
    cuts.state.start, cuts.state.keep = cuts.start, cuts.keep  # type: ignore[method-assign]
    for prompt in prompts:
        engine.add_request(prompt, params)
    counted: list[dict[str, float]] = []
    while engine.has_work and len(counted) < cycles:
        cuts.clock.seconds, cuts.spent = {}, 0.0
        started = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        if "applied" in (parts := cuts.clock.seconds):
            counted.append({**parts, "cycle": seconds - cuts.spent - parts["kept: written"]})
    typical = {part: median(each[part] for each in counted) for part in counted[0]}
    typical["kept: written"] += typical["kept: histories"]
    cells = [f"{typical[way] * 1e3:.1f} ({typical[way] / typical['cycle']:.1%})" for way in WAYS]
    return [requests, draft, draft.kept, len(counted), f"{typical['cycle'] * 1e3:.0f}", *cells], cuts.furthest


def measure_plain(target: Target, requests: int, cycles: int) -> list[object]:
    """A row of the second table."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(8, 1000, (requests, PROMPT), generator=generator).tolist()
    sizes: dict[str, Any] = {"num_pages": 16 * requests, "max_running": requests, "num_states": requests + 1}
    engine = Engine(target, prefix_caching=False, max_batch_tokens=requests * PROMPT, **sizes)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=2 * cycles + 8, ignore_eos=True))
    state, ways = engine.recurrent, (OpenPass, RecurrentPass)
    assert state is not None
    seconds: tuple[list[float], list[float]] = ([], [])
    engine.step()
    for number in range(2 * cycles + 2):
        way = number % 2
        state.start = lambda batch, _, make=ways[way]: make(batch, state.store.layout, state.store)  # type: ignore[misc, method-assign]
        started = time.perf_counter()
        engine.step()
        if number > 1:
            seconds[way].append(time.perf_counter() - started)
    ratios = [late / at_once for late, at_once in zip(*seconds, strict=True)]
    times = [f"{median(own) * 1e3:.0f}" for own in seconds]
    return [requests, cycles, *times, f"{median(ratios):.3f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]


def bandwidth() -> float:
    """GB of memory that a copy reads and writes in a second."""
    source = torch.zeros(2**26)
    target, times = torch.empty_like(source), []
    for _ in range(4):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return 2 * source.nbytes / min(times) / 1e9


def print_bytes(target: Target) -> None:
    layout, item = target.recurrent, target.dtype.itemsize
    inputs = sum(channels for _, channels in layout.convolutions) * item
    updates = 4 * sum(heads * (keys + values + 1) for heads, keys, values in layout.rules)
    gates = 4 * sum(2 * heads for heads, _, _ in layout.rules)
    state = layout.bytes_per_state(target.dtype)
    print(f"one state: {state / 2**20:.1f} MiB; a copy moves {bandwidth():.1f} GB/s (read and written)")
    print_row(("kept of a token in the pass", "KiB"), is_head=True)
    held = {"applied": inputs + updates, "kept": inputs + state, "layers again": inputs + gates, "target again": 0}
    for way, size in held.items():
        print_row((way, f"{size / 1024:,.0f}"))


def print_row(cells: Sequence[object], *, is_head: bool = False) -> None:
    print("\n" * is_head + "| " + " | ".join(map(str, cells)) + " |", flush=True)
    if is_head:
        print("|" + "---|" * len(cells))


def drafts(text: str, kept: Sequence[int]) -> list[Draft]:
    """Drafts of "8" or "16t", for every number of tokens kept that they have room for."""
    nodes = int(text.removesuffix("t"))
    return [Draft(nodes, text.endswith("t"), count) for count in kept if count <= nodes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,4")
    parser.add_argument("--plain", default="1,4,16", help="requests of the second table")
    parser.add_argument("--drafts", default="8,16t", help="tokens of each draft, the anchor included; t: a tree")
    parser.add_argument("--kept", default="1,4,8", help="tokens that stay, the anchor included")
    parser.add_argument("--cycles", type=int, default=9)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--vocab-size", type=int, default=SHAPE["vocab_size"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = random_target(options.layers, options.vocab_size, getattr(torch, options.dtype))
    print_bytes(target)
    columns = ("requests", "draft", "tokens kept", "cycles", "cycle ms", *WAYS)
    print_row(columns, is_head=True)
    kept, furthest = [int(count) for count in options.kept.split(",")], dict[str, float]()
    for requests in map(int, filter(None, options.requests.split(","))):
        for text in options.drafts.split(","):
            for draft in drafts(text, kept):
                row, own = measure(target, requests, draft, options.cycles)
                furthest = {way: max(apart, furthest.get(way, 0.0)) for way, apart in own.items()}
                print_row(row)
    if furthest:
        print("\nfurthest from volley's states:", ", ".join(f"{way} {apart:.0e}" for way, apart in furthest.items()))
    for way, apart in furthest.items():
        # Sums in another order may round to another number in bf16.
        loose = {} if target.dtype == torch.float32 else {"layers again": 1e-3, "target again": 0.1}
        assert apart < loose.get(way, 1e-4), f"{way} made other states"
    print_row(("requests", "pairs of cycles", "after the pass, ms", "in it, ms", "ratio", "from, to"), is_head=True)
    for requests in map(int, filter(None, options.plain.split(","))):
        print_row(measure_plain(target, requests, options.cycles))


if __name__ == "__main__":
    main()
