"""The recorder against passes of an engine that is played here: chunks, preemption, slots used again. Nothing here needs vLLM."""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from volley.errors import ConfigError, MismatchError, UnsupportedModelError
from volley.models.drafters.recorded import Recorded, load_recorded, recorded_path
from volley.vllm import Recorder
from volley.vllm.passes import FINAL, PassTaps, TargetPass
from volley.vllm.recorder import RecordOptions, recorder_args

TAPS, HIDDEN, BLOCK = (4, 1), 2, 4


def state(layer: int, token_ids: Sequence[int]) -> list[float]:
    """What a layer says of the last of these tokens: it depends on all."""
    return [float(hash((layer, unit, *token_ids)) % 251) for unit in range(HIDDEN)]


def config(folder: Path, caching: bool = False, tensor: int = 1, **options: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=True),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=caching, block_size=BLOCK),
        additional_config={"volley": {"record": str(folder), "taps": list(TAPS), **options}},
    )


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A vLLM that says which of its processes this is."""
    distributed = SimpleNamespace(rank=0)
    distributed.get_tensor_model_parallel_rank = lambda: distributed.rank
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0", distributed=distributed))
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    return distributed


class Layers(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Identity() for _ in range(count))
        self.model.norm = nn.Identity()


class Engine:
    """Reads prompts as vLLM does, in passes of at most ``budget`` tokens over ``blocks`` blocks, and tells the recorder.

    One request in ``interrupt`` passes is preempted or gives up, and one pass in ``hide`` is not shown to the recorder.
    """

    def __init__(self, recorder: Recorder, blocks: int, budget: int, interrupt: float, hide: float, seed: int) -> None:
        self.recorder, self.budget, self.interrupt, self.hide = recorder, budget, interrupt, hide
        self.rng = random.Random(seed)
        self.free = list(range(blocks))
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.interrupted = 0
        self.read_whole: set[tuple[int, ...]] = set()
        recorder.passes = cast(PassTaps, self)

    def take(self) -> TargetPass:
        return self.last

    def stop(self, request: Any) -> None:
        self.running = [other for other in self.running if other is not request]  # equal prompts make equal requests
        self.free += request.blocks
        request.blocks, request.read = [], 0

    def preempt(self, request: Any) -> None:
        self.stop(request)
        self.waiting.append(request)
        self.interrupted += 1

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        self.waiting = [SimpleNamespace(tokens=list(p), end=len(p) + max_tokens, read=0, blocks=[]) for p in prompts]
        while self.waiting or self.running:
            self.rng.shuffle(self.free)
            if self.running and self.rng.random() < self.interrupt:
                self.preempt(self.rng.choice(self.running))
                if self.rng.random() < 0.2:
                    self.waiting.pop()  # its client is gone
            while self.waiting and len(self.running) < 4:
                self.running.append(self.waiting.pop(0))
            if rows := self.schedule():
                self.step(rows)
            elif self.running:  # the last that holds blocks: without any it would come back at once, for ever
                self.preempt(next(request for request in reversed(self.running) if request.blocks))

    def schedule(self) -> list[tuple[Any, int]]:
        rows, left = [], self.budget
        for request in self.running:
            length = min(left, len(request.tokens) - request.read, self.rng.randint(1, self.budget))
            need = -(-(request.read + length) // BLOCK) - len(request.blocks)
            if length and need <= len(self.free):
                request.blocks += [self.free.pop() for _ in range(need)]
                rows.append((request, length))
                left -= length
        return rows

    def step(self, rows: list[tuple[Any, int]]) -> None:
        starts = np.array([request.read for request, _ in rows])
        offsets = np.cumsum([0, *[length for _, length in rows]])
        blocks, table = np.zeros((len(rows), 8), dtype=np.int32), np.zeros((len(rows), 32), dtype=np.int32)
        prefixes: list[list[int]] = []
        sampled: list[list[int]] = []
        for row, (request, length) in enumerate(rows):
            blocks[row, : len(request.blocks)] = request.blocks
            table[row, : len(request.tokens)] = request.tokens
            prefixes += [request.tokens[: end + 1] for end in range(request.read, request.read + length)]
            request.read += length
            sampled.append([self.rng.randrange(9)] if request.read == len(request.tokens) else [])
        states = {layer: torch.tensor([state(layer, prefix) for prefix in prefixes]) for layer in (*TAPS, FINAL)}
        self.last = TargetPass(starts, offsets, blocks, BLOCK, 99, None, states)
        if self.rng.random() >= self.hide:
            drafts = self.recorder.propose(sampled, np.zeros(len(rows), dtype=np.int32), table)
            assert drafts == [[] for _ in rows]
        for (request, _), tokens in zip(rows, sampled, strict=True):
            if tokens:
                self.read_whole.add(tuple(request.tokens))
                request.tokens += tokens
                if len(request.tokens) == request.end:
                    self.stop(request)


def make_recorder(folder: Path, final: bool = False) -> Recorder:
    recorder = Recorder(config(folder, final=final))
    recorder.load_model(Layers())
    return recorder


def check(recorded: Recorded, token_ids: list[int], final: bool) -> None:
    prefixes = [token_ids[: end + 1] for end in range(len(token_ids))]
    assert recorded.layer_ids == TAPS
    assert recorded.taps.tolist() == [[*state(4, prefix), *state(1, prefix)] for prefix in prefixes]
    assert (recorded.final is not None) == final
    if recorded.final is not None:
        assert recorded.final.tolist() == [state(FINAL, prefix) for prefix in prefixes]


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=8),
    max_tokens=st.integers(1, 3),
    final=st.booleans(),
    circumstances=st.fixed_dictionaries(
        {
            "blocks": st.integers(5, 14),
            "budget": st.integers(2, 20),
            "interrupt": st.sampled_from([0.0, 0.3]),
            "hide": st.sampled_from([0.0, 0.3]),
            "seed": st.integers(0, 99),
        }
    ),
)
def test_what_is_recorded_is_what_the_layers_said(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
    max_tokens: int,
    final: bool,
    circumstances: dict[str, Any],
) -> None:
    folder = tmp_path_factory.mktemp("recorded")
    recorder = make_recorder(folder, final)
    engine = Engine(recorder, **circumstances)
    engine.run(prompts, max_tokens)
    paths = {recorded_path(folder, tokens): list(tokens) for tokens in engine.read_whole}
    written = set(folder.iterdir())
    assert written <= paths.keys()
    if not engine.hide:
        read = {recorded_path(folder, prompt) for prompt in prompts if tuple(prompt) in engine.read_whole}
        assert read <= written, "every prompt that was read to its end"
        if not engine.interrupted:
            assert not recorder.beginnings, "nothing is kept of prompts that were read"
    for path in written:
        check(load_recorded(path), paths[path], final)


def test_a_beginning_whose_slots_are_used_again_is_forgotten(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)

    def read(tokens: list[int], start: int, block: int, sampled: Sequence[int] = ()) -> None:
        prefixes = [tokens[: end + 1] for end in range(start, len(tokens))]
        states = {layer: torch.tensor([state(layer, prefix) for prefix in prefixes]) for layer in TAPS}
        bounds = np.array([start]), np.array([0, len(prefixes)])
        done = TargetPass(*bounds, np.array([[block]], dtype=np.int32), BLOCK, 99, None, states)
        recorder.passes = cast(PassTaps, SimpleNamespace(take=lambda: done))
        recorder.propose([list(sampled)], np.zeros(1, dtype=np.int32), np.array([tokens], dtype=np.int32))

    read([1, 2, 3], 0, block=5)
    assert list(recorder.beginnings) == [22]
    read([7, 8], 0, block=6)
    assert list(recorder.beginnings) == [22, 25]
    read([7, 8, 9], 2, block=6)
    assert list(recorder.beginnings) == [22, 26], "a prompt that goes on has one place"
    read([4, 4, 4, 4], 0, block=5)
    assert list(recorder.beginnings) == [26, 23]
    read([2, 2, 2, 6], 3, block=6, sampled=[1])  # 2, 2, 2 took the place of 7, 8, 9 in a pass that was not shown
    assert list(recorder.beginnings) == [23]
    assert not list(tmp_path.iterdir())


def test_of_several_processes_the_first_records(tmp_path: Path, ranks: SimpleNamespace) -> None:
    for rank in (1, 0):
        ranks.rank = rank
        recorder = Recorder(config(tmp_path / str(rank), tensor=2))
        recorder.load_model(Layers())
        Engine(recorder, 5, 20, 0.0, 0.0, 0).run([[1, 2, 3]], 1)
        assert (tmp_path / str(rank)).exists() == (rank == 0)
    assert len(list((tmp_path / "0").iterdir())) == 1


def test_hooks_that_do_not_fire_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = make_recorder(tmp_path)
    for _ in range(2):
        assert recorder.propose([[1], []], np.zeros(2, dtype=np.int32), np.zeros((2, 3), dtype=np.int32)) == [[], []]
    assert caplog.text.count("nothing is recorded") == 1


def test_arguments_for_vllm_travel_through_its_configuration() -> None:
    options = RecordOptions(record="/shared", taps=(1, 5), final=True)
    args = recorder_args(options)
    assert RecordOptions.from_config(args["additional_config"]) == options
    assert args["speculative_config"]["model"] == "volley.vllm.Recorder"
    assert args["enforce_eager"] is True
    assert args["enable_prefix_caching"] is False


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({}, "was not told what to write where"),
        ({"volley": {"record": "x"}}, "was not told what to write where"),
        ({"volley": {"record": "x", "taps": []}}, r"taps is \[\]; give a list of layer ids"),
        ({"volley": {"record": "x", "taps": "1,2"}}, "taps is '1,2'"),
        ({"volley": {"record": "x", "taps": [1], "final": 1}}, "must be true or false"),
        ({"volley": {"record": "x", "taps": [1], "finl": True}}, "did you mean 'final'"),
    ],
)
def test_options_that_cannot_be_used(told: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RecordOptions.from_config(told)


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="--no-enable-prefix-caching"):
        Recorder(config(tmp_path, caching=True))
    with pytest.raises(MismatchError, match=r"layers \[7\] are not here"):
        Recorder(config(tmp_path, taps=[1, 7])).load_model(Layers())
    bare = Layers()
    del bare.model.norm
    with pytest.raises(UnsupportedModelError, match=r"has no `model\.norm` to tap"):
        Recorder(config(tmp_path, final=True)).load_model(bare)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give a folder to write in"):
        make_recorder(tmp_path / "file")
