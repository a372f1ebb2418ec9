"""The whole engine on a pretended GPU: the CPU's tokens, no mixed devices, and what it waits for."""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.costs import settle
from tests.gpu.pretended import CUDA, EVENT, OnDevice, move, pretended_cuda
from tests.tiny import Pair, make_pair, random_prompts
from volley import Engine, SamplingParams
from volley.bench.run import without_drafter
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import make_store
from volley.memory.upload import upload_together
from volley.models.drafters import backlog
from volley.models.drafters.drafter import Drafter
from volley.models.targets.target import Target

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


CASES = [
    pytest.param(1, GREEDY, {}, id="one request"),
    pytest.param(2, GREEDY, {}, id="several requests"),
    pytest.param(2, GREEDY, {"drafter": None}, id="no drafter"),
    pytest.param(2, GREEDY, {"tree_nodes": 8}, id="trees"),
    pytest.param(2, SEEDED, {}, id="seeded"),
    pytest.param(2, SEEDED, {"tree_nodes": 8}, id="seeded trees"),
    pytest.param(2, RULED, {}, id="penalties and log-probabilities"),
    pytest.param(2, GREEDY, {"draft_window": 8}, id="draft windows"),
    pytest.param(2, GREEDY, {"denoising_steps": 2}, id="denoising"),
    pytest.param(2, GREEDY, {"kv_dtype": "int8", "draft_kv_dtype": "int8"}, id="int8 pools"),
    pytest.param(2, GREEDY, {"kv_dtype": "int4", "draft_kv_dtype": "int4"}, id="int4 pools"),
    pytest.param(2, GREEDY, {"draft_attention": "torch"}, id="PyTorch's attention in the drafter"),
    pytest.param(2, GREEDY, {"draft_attention": "triton"}, id="the kernel by its name"),
    pytest.param(3, GREEDY, {"num_pages": 12, "page_size": 4}, id="preemption"),
]
"""Requests, what they ask, and options of the engine."""


class Both(NamedTuple):
    """One set of weights, here and on the pretended device."""

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


@pytest.mark.slow
@pytest.mark.parametrize(("count", "params", "options"), CASES)
def test_tokens_are_the_cpus(both: Both, count: int, params: SamplingParams, options: dict[str, Any]) -> None:
    options = dict(options)
    here, there = (options.pop("drafter", drafter) for drafter in (both.here.drafter, both.drafter))
    if here is None:
        there = None
    on_the_cpu = {name: value for name, value in options.items() if name != "draft_attention"}
    expected = answers(both.here.target, here, count, params, **on_the_cpu)
    with pretended() as counts:
        assert answers(both.target, there, count, params, **options) == expected
    used = {name for name in counts.operations if name.endswith("_kernel")}
    if "kv_dtype" in options:
        assert not used
    else:
        assert {"_attention_kernel", *(["_inject_kernel"] if here else [])} <= used


def test_products_on_a_gpu_are_summed_in_fp32(both: Both) -> None:
    settings = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(settings, name) for name in names}
    try:
        for name in names:
            setattr(settings, name, True)
        Target(copy.deepcopy(both.here.hf))
        assert all(getattr(settings, name) for name in names), "a CPU changes nothing"
        with pretended():
            Target(move(copy.deepcopy(both.here.hf)))
        assert not any(getattr(settings, name) for name in names)
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


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
        answers(both.target, both.drafter, 8, GREEDY, draft_window=8)


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


SAMPLED = SamplingParams(max_tokens=5, temperature=1.0)
PENALISED = SamplingParams(max_tokens=5, temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.1)


def waits_of_a_step(target: Target, drafter: Drafter | None, count: int, params: SamplingParams, **options: Any) -> Any:
    """Kinds of the waits of one step of decoding, with how many there are of each; only trees need what kernels compute."""
    with pretended_cuda(runs_kernels="tree_nodes" in options) as counts:
        engine = Engine(target, drafter, **{"num_pages": 64, "policy": "fixed", **options})
        for prompt in random_prompts(count, longest=20, seed=1):
            engine.add_request(prompt, replace(params, max_tokens=60, ignore_eos=True))
        engine.step()
        engine.step()
        counts.clear()
        engine.step()
        found = Counter[str]()
        for (kind, _), times in counts.waits.items():
            found[kind] += times
        return dict(found)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("params", "drafts", "options"),
    [
        pytest.param(GREEDY, False, {}, id="plain"),
        pytest.param(GREEDY, True, {}, id="greedy"),
        pytest.param(GREEDY, True, {"policy": "goodput"}, id="greedy goodput"),
        pytest.param(SAMPLED, False, {}, id="plain sampled"),
        pytest.param(SAMPLED, True, {}, id="sampled"),
        pytest.param(SAMPLED, True, {"policy": "goodput"}, id="sampled goodput"),
        pytest.param(replace(SAMPLED, top_p=0.9, min_p=0.01, top_k=20), True, {}, id="truncated"),
        pytest.param(SEEDED, False, {}, id="plain with a seed"),
        pytest.param(SEEDED, True, {}, id="with a seed"),
    ],
)
def test_a_step_waits_for_its_results_alone(
    both: Both, count: int, params: SamplingParams, drafts: bool, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts are read once a step, and drafts with them; copies to the device are asynchronous."""
    settle(monkeypatch)
    found = waits_of_a_step(both.target, both.drafter if drafts else None, count, params, **options)
    assert found == {EVENT: 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "options"),
    [
        pytest.param(GREEDY, {"tree_nodes": 8}, id="trees"),
        pytest.param(SEEDED, {"tree_nodes": 8}, id="sampled trees"),
        pytest.param(PENALISED, {}, id="penalties"),
        pytest.param(replace(GREEDY, logprobs=True, top_logprobs=2), {}, id="log-probabilities"),
        pytest.param(replace(SAMPLED, logprobs=True), {}, id="log-probabilities of sampled tokens"),
    ],
)
def test_what_the_host_decides_about_costs_one_wait_more(both: Both, params: SamplingParams, options: Any) -> None:
    """The host grows trees and counts what drafts repeat; log-probabilities are of tokens that it knows."""
    assert sum(waits_of_a_step(both.target, both.drafter, 2, params, **options).values()) == 2


def test_several_sampled_kinds_in_a_step_are_read_at_once(both: Both) -> None:
    each = [GREEDY, SAMPLED, SEEDED, replace(SAMPLED, temperature=0.5)]
    with pretended_cuda() as counts:
        engine = Engine(both.target, both.drafter, num_pages=64, policy="fixed")
        for prompt, params in zip(random_prompts(4, longest=20, seed=1), each, strict=True):
            engine.add_request(prompt, replace(params, max_tokens=60, ignore_eos=True))
        engine.step()
        engine.step()
        counts.clear()
        engine.step()
        assert counts.waits.total() == 1


def test_an_engine_to_compare_with_takes_no_more_pages_and_no_more_than_are_left(both: Both) -> None:
    """Others may share the GPU, and the first may have taken nearly all of it."""
    with pretended_cuda():
        assert without_drafter(Engine(both.target, both.drafter, num_pages=64)).capacity.num_pages == 64
        alone = Engine(both.target, both.drafter)
    with pretended_cuda(free_bytes=2**26):
        assert 0 < without_drafter(alone).capacity.num_pages < alone.capacity.num_pages
