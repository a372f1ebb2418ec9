"""The whole engine on a pretended GPU: the CPU's tokens, no mixed devices, and what it waits for."""

import copy
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from benchmarks.pretended_gpu import CUDA, OnDevice, move, pretended_cuda
from tests.costs import settle
from tests.tiny import Pair, make_pair, random_prompts
from volley import Engine, SamplingParams
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import make_store
from volley.memory.upload import upload_together
from volley.models import backlog
from volley.models.drafter import Drafter
from volley.models.target import Target

pretended = partial(pretended_cuda, runs_kernels=True)
GREEDY = SamplingParams(max_tokens=5)
SEEDED = SamplingParams(max_tokens=5, temperature=1.0, seed=3)
RULED = SamplingParams(
    max_tokens=5,
    temperature=1.0,
    seed=3,
    top_p=0.9,
    repetition_penalty=1.2,
    logit_bias=((3, 1.0),),
    logprobs=True,
    top_logprobs=2,
)


class Both(NamedTuple):
    """The same weights here and on the pretended device."""

    here: Pair
    target: Target
    drafter: Drafter


@pytest.fixture(scope="module")
def both() -> Both:
    small = {"num_hidden_layers": 2, "num_key_value_heads": 1}
    drafter = {"num_hidden_layers": 1, "num_key_value_heads": 1, "num_target_layers": 2, "target_layer_ids": (0,)}
    here = make_pair(0, drafter, **small)
    with pretended():
        hf, moved = copy.deepcopy(here.hf), copy.deepcopy(here.drafter)
        move(hf)
        move(moved)
        return Both(here, Target(hf), moved)


def answers(target: Target, drafter: Drafter | None, count: int, params: SamplingParams, **options: Any) -> Any:
    engine = Engine(target, drafter, **{"num_pages": 64, "policy": "fixed", **options})
    return [result.token_ids for result in engine.generate(random_prompts(count, longest=20, seed=1), params)]


@pytest.mark.parametrize(
    ("count", "params", "options"),
    [
        pytest.param(1, GREEDY, {}, id="one request"),
        pytest.param(3, GREEDY, {}, id="several requests"),
        pytest.param(2, GREEDY, {"drafter": None}, id="no drafter"),
        pytest.param(1, GREEDY, {"tree_nodes": 8}, id="a tree"),
        pytest.param(3, GREEDY, {"tree_nodes": 8}, id="trees"),
        pytest.param(2, SEEDED, {}, id="seeded"),
        pytest.param(2, SEEDED, {"tree_nodes": 8}, id="seeded trees"),
        pytest.param(2, RULED, {}, id="penalties and log-probabilities"),
        pytest.param(1, GREEDY, {"draft_window": 8}, id="draft window"),
        pytest.param(3, GREEDY, {"draft_window": 8}, id="draft windows"),
        pytest.param(2, GREEDY, {"denoising_steps": 2}, id="denoising"),
        pytest.param(2, GREEDY, {"kv_dtype": "int8", "draft_kv_dtype": "int8"}, id="int8 pools"),
        pytest.param(2, GREEDY, {"kv_dtype": "int4", "draft_kv_dtype": "int4"}, id="int4 pools"),
        pytest.param(3, GREEDY, {"num_pages": 12, "page_size": 4}, id="preemption"),
    ],
)
def test_tokens_are_the_cpus(both: Both, count: int, params: SamplingParams, options: dict[str, Any]) -> None:
    options = dict(options)
    here, there = (options.pop("drafter", drafter) for drafter in (both.here.drafter, both.drafter))
    if here is None:
        there = None
    expected = answers(both.here.target, here, count, params, **options)
    with pretended() as counts:
        assert answers(both.target, there, count, params, **options) == expected
    used = {name for name in counts.operations if name.endswith("_kernel")}
    if "kv_dtype" in options:
        assert not used
    else:
        assert {"_attention_kernel", *(["_inject_kernel"] if here else [])} <= used


def test_goodput_decides_alike(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    expected = answers(both.here.target, both.here.drafter, 2, GREEDY, policy="goodput")
    with pretended():
        assert answers(both.target, both.drafter, 2, GREEDY, policy="goodput") == expected


def test_sampling_without_a_seed_mixes_no_devices(both: Both) -> None:
    params = SamplingParams(max_tokens=5, temperature=1.0)
    with pretended():
        (tokens,) = answers(both.target, both.drafter, 1, params)
    assert len(tokens) == 5


def test_slots_that_stay_on_the_host_are_found(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "upload_together", lambda arrays, _: [torch.from_numpy(array) for array in arrays])
    with pretended(), pytest.raises(ValueError, match="cannot be accessed from Triton"):
        answers(both.target, both.drafter, 1, GREEDY, draft_window=8)


@pytest.mark.parametrize("kind", ["auto", "int8", "int4"])
def test_scattered_kv_are_extracted_and_indices_of_the_host_found(kind: Any) -> None:
    table = BlockTable(4, [2, 0])
    with pretended():
        store = make_store(kind, [(2, 8)], 12, torch.float32, CUDA)
        keys, values = store.extract(0, table, 1, 6)
        assert isinstance(keys, OnDevice)
        assert values.shape == (5, 2, 8)
        with pytest.raises(RuntimeError, match="index_select: expected all tensors to be on the same device"):
            store.read(0, table.slots(1, 6))


def test_several_arrays_are_one_copy() -> None:
    with pretended() as counts:
        pages, tiles = upload_together([np.arange(3), np.arange(4).reshape(2, 2)], CUDA)
        assert (counts.copies.total(), counts.waits.total()) == (1, 0)
        assert (pages.tolist(), tiles.tolist()) == ([0, 1, 2], [[0, 1], [2, 3]])


def test_waits_and_copies_are_seen() -> None:
    with pretended() as counts:
        pinned = torch.from_numpy(np.arange(3)).pin_memory().to(CUDA, non_blocking=True)
        assert counts.copies.total() == 1
        assert not counts.waits
        for wait in (
            lambda: torch.arange(3).to(CUDA, non_blocking=True),
            lambda: torch.tensor([1], device=CUDA),
            lambda: pinned.cpu(),
            lambda: pinned[0].item(),
            lambda: pinned.tolist(),
            lambda: pinned[[0, 1]],
            lambda: pinned[pinned > 1],
        ):
            counts.clear()
            wait()
            assert counts.waits.total() == 1
        with pytest.raises(RuntimeError, match="same device"):
            pinned + torch.arange(3)


@pytest.mark.parametrize(
    ("count", "drafts", "policy"), [(1, False, "fixed"), (1, True, "fixed"), (2, True, "fixed"), (2, True, "goodput")]
)
def test_a_greedy_step_waits_for_its_results_alone(
    both: Both, count: int, drafts: bool, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices are read once a step, and drafts with them; copies to the device are asynchronous."""
    settle(monkeypatch)
    with pretended() as counts:
        engine = Engine(both.target, both.drafter if drafts else None, num_pages=64, policy=policy)
        for prompt in random_prompts(count, longest=20, seed=1):
            engine.add_request(prompt, GREEDY)
        engine.step()
        engine.step()
        counts.clear()
        engine.step()
        assert {kind for kind, _ in counts.waits} == {"a list is read"}
        assert counts.waits.total() == 1
