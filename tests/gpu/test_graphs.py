"""CUDA graphs on a pretended GPU: a replay runs what was captured and no Python, and answers are the plain CPU's."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.costs import settle
from tests.engine.test_own_ends import own_ends
from tests.gpu.pretended import CUDA, move, pretended_cuda
from tests.gpu.test_engine import GREEDY, Both, answers, both, pretended
from tests.gpu.test_kinds import DRAFTER, KINDS
from tests.hybrid import target as hybrid_target
from tests.tiny import random_prompts
from volley import Engine, SamplingParams
from volley.engine import capacity
from volley.engine.memory import memory_of, report_memory
from volley.engine.start import warm_up
from volley.memory import graphs
from volley.memory.device import Device
from volley.memory.graphs import Bucket
from volley.memory.kernels import launching

__all__ = ["both"]
ELSEWHERE = torch.device("cuda:7")


class Planted:
    """In place of a graph."""


SEEDED = SamplingParams(max_tokens=8, temperature=1.0, seed=3)


@pytest.mark.parametrize(
    ("params", "options"),
    [
        pytest.param(GREEDY, {"policy": "fixed:1"}, id="plain"),
        pytest.param(GREEDY, {"policy": "fixed:3"}, id="blocks"),
        pytest.param(SEEDED, {}, id="seeded"),
        pytest.param(GREEDY, {"tree_nodes": 8}, id="trees"),
        pytest.param(GREEDY, {"draft_window": 8, "page_size": 4}, id="draft window"),
        pytest.param(GREEDY, {"num_pages": 12, "page_size": 4}, id="preemption"),
        pytest.param(GREEDY, {"policy": "goodput"}, id="goodput"),
        pytest.param(GREEDY, {"denoising_steps": 2}, id="denoising"),
    ],
)
def test_tokens_through_fixed_memory_on_a_cpu(
    both: Both, params: SamplingParams, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of graphs, with a call in place of a replay: requests of several lengths join and leave, so buckets change."""
    settle(monkeypatch)
    each = [replace(params, max_tokens=size) for size in (3, 8, 5, 1, 7)]

    def run() -> tuple[Any, Engine]:
        engine = Engine(both.here.target, both.here.drafter, **{"num_pages": 64, "policy": "fixed", **options})
        prompts = random_prompts(5, longest=20, seed=1)
        found = [result.token_ids for result in engine.generate(prompts, each)]
        engine.check_integrity()
        return found, engine

    expected, plain = run()
    assert plain.core.runner.passes is None
    monkeypatch.setattr(capacity, "find_device", lambda _: Device("cuda"))
    ran: list[Any] = []
    capture = launching.capture
    monkeypatch.setattr(launching, "capture", lambda run, device: ran.append(run) or capture(run, device))
    found, fixed = run()
    assert found == expected
    assert fixed.core.runner.passes is not None
    assert len(ran) >= 2


def test_a_step_is_a_few_launches_and_waits_once(both: Both) -> None:
    with pretended() as counts:
        engine = Engine(both.target, both.drafter, num_pages=64, policy="fixed")
        requests = [engine.add_request(prompt, GREEDY) for prompt in random_prompts(2, longest=20, seed=1)]
        for _ in range(2):
            engine.step()
        counts.clear()
        engine.step()
        assert counts.operations["a graph"] == 2, "one of the drafter, one of the target"
        assert counts.waits.total() == 1
        assert "_attention_kernel" not in counts.operations
        assert counts.replayed["_attention_kernel"] == 3, "in two layers and one"
        assert counts.operations.total() < counts.replayed.total() * 0.36
        for request in requests:
            engine.abort(request)
        engine.check_integrity()


WARM = {"num_pages": 24, "max_running": 4}


def some_load(engine: Engine, start: int = 0) -> None:
    """Requests of several lengths that join and leave."""
    each = [SamplingParams(max_tokens=size, ignore_eos=True) for size in (30, 3, 8, 17, 1, 25)]
    prompts = [[(start + number + i) % 50 for i in range(20 + 3 * number)] for number in range(len(each))]
    assert len(list(engine.generate(prompts, each))) == len(each)


@pytest.mark.parametrize(
    "options",
    [
        *(
            pytest.param(own, marks=pytest.mark.slow)
            for own in ({"policy": "fixed"}, {"policy": "fixed:1"}, {"tree_nodes": 8})
        ),
        {"policy": "goodput"},
    ],
    ids=["blocks", "plain", "trees", "goodput"],
)
def test_no_graph_is_captured_while_a_warm_engine_serves(both: Both, options: dict[str, Any]) -> None:
    captured: list[Any] = []
    with pretended_cuda():
        engine = Engine(both.target, both.drafter, **WARM, **options)
        bare = memory_of(engine.core)["graphs"]
        with mock.patch.object(launching, "capture", note_captures(captured)):
            some_load(engine)
            assert captured, "or nothing is proven"
        engine = Engine(both.target, both.drafter, **WARM, **options)
        count, seconds = warm_up(engine)
        assert count > 2
        assert seconds > 0
        assert memory_of(engine.core)["graphs"] == bare, "here a graph holds nothing"
        captured.clear()
        with mock.patch.object(launching, "capture", note_captures(captured)):
            some_load(engine, start=7)
        assert not captured
        engine.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, prompt_logprobs=1)], ids=["plain", "scored"])
def test_short_prompts_take_graphs_that_are_there_and_capture_none(both: Both, params: SamplingParams) -> None:
    prompts = [[number % 50 for number in range(size)] for size in (20, 3, 9)]
    expected = list(Engine(both.here.target, None, num_pages=64).generate(prompts, params))
    for is_captured in (False, True):
        with pretended() as counts:
            engine = Engine(both.target, None, num_pages=64, prefix_caching=False)
            assert engine.core.runner.passes is not None
            if is_captured:
                run = engine.core.runner.passes.made_up([len(prompt) for prompt in prompts], 0, causal=True)
                assert run is not None
                run()
            requests = [engine.add_request(prompt, params) for prompt in prompts]
            counts.clear()
            engine.step()
            assert all(request.num_output for request in requests)
            assert bool(counts.operations["a graph"]) == is_captured
            while engine.has_work:
                engine.step()
            engine.check_integrity()
        for request, result in zip(requests, expected, strict=True):
            assert request.token_ids[request.num_prompt :] == result.token_ids
            assert [score.logprob for score in request.prompt_scores] == pytest.approx(result.prompt_logprobs or [])


@pytest.mark.slow
def test_no_kernel_is_compiled_again_for_other_sizes(both: Both) -> None:
    """Once each has been used: with other numbers of requests, longer texts and drafts that were accepted elsewhere."""
    with pretended_cuda() as counts:
        engine = Engine(both.target, both.drafter, policy="fixed", **WARM)
        warm_up(engine)
        list(engine.generate(random_prompts(1, longest=20, seed=1), SEEDED))
        before = set(counts.compiled)
        assert {str(name) for name, *_ in before} >= {"_attention_kernel", "_inject_kernel", "_exponentials_kernel"}
        prompts = [[(number + i) % 50 for i in range(size)] for number, size in enumerate((300, 16, 33, 7, 48))]
        list(engine.generate(prompts, [SEEDED, GREEDY, SEEDED, SEEDED, GREEDY]))
        assert counts.compiled == before


@pytest.mark.parametrize("spared", [[], ["count"]])
def test_a_kernel_that_is_compiled_again_is_seen(spared: list[str]) -> None:
    """For a number that is 1 or a multiple of 16, unless it is spared that, and for memory that is not aligned."""
    named = SimpleNamespace(__name__="planted")
    kernel = SimpleNamespace(fn=named, arg_names=["x", "count"], kwargs={"do_not_specialize": spared})
    with pretended_cuda() as counts:
        x = torch.zeros(40, device=CUDA)
        for count in (1, 2, 3, 16, 32):
            launching.launch(kernel, (1,), CUDA, x, count, SIZE=4)
        assert len(counts.compiled) == (1 if spared else 3)
        launching.launch(kernel, (1,), CUDA, x[1:], 2, SIZE=4)
        assert len(counts.compiled) == (2 if spared else 4)


def note_captures(captured: list[Any]) -> Any:
    real = launching.capture

    def capture(run: Any, device: Any) -> Any:
        captured.append(device)
        return real(run, device)

    return capture


def test_memory_is_reported_on_a_gpu_alone(both: Both, caplog: pytest.LogCaptureFixture) -> None:
    with pretended_cuda():
        engine = Engine(both.target, both.drafter, policy="fixed", **WARM)
        with caplog.at_level("INFO", "volley"):
            report_memory(engine.core)
        assert "memory of cuda:0: target " in caplog.text
        assert "graphs " in caplog.text
    caplog.clear()
    report_memory(Engine(both.here.target, both.here.drafter).core)
    assert not caplog.text
    assert warm_up(Engine(both.here.target, both.here.drafter))[0] == 0


@pytest.mark.slow
def test_plain_decoding_and_verification_of_a_request_have_as_many_rows(both: Both) -> None:
    """So both run the same products, however few tokens are drafted; the tokens are the CPU's."""
    expected = answers(both.here.target, None, 1, GREEDY)
    for drafter, rows in ((both.drafter, both.drafter.config.block_size), (None, 1)):
        with pretended() as counts:
            engine = Engine(both.target, drafter, num_pages=64, policy="fixed:1")
            assert [own.token_ids for own in engine.generate(random_prompts(1, longest=20, seed=1), GREEDY)] == expected
            assert counts.operations["a graph"]
            buckets = {Bucket.of([size], rows) for size in range(1, rows + 1)}
            assert buckets == {Bucket(1, rows, 1)}
            for size in range(1, rows + 1):
                engine.core.runner.seconds(size, 1)
            assert engine.core.runner.passes is not None
            assert engine.core.runner.passes.num_graphs == 1


def test_values_of_the_pass_before_are_seen(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: what a pass reads is put into memory that no graph reads."""
    expected = answers(both.here.target, None, 1, GREEDY)
    refill, filled = graphs.refill, list[int]()

    def only_at_first(memory: Any, values: Any) -> None:
        filled.append(1)
        refill(memory if len(filled) == 1 else memory.clone(), values)

    with pretended():
        monkeypatch.setattr(graphs, "refill", only_at_first)
        assert answers(both.target, None, 1, GREEDY) != expected
    assert len(filled) > 2


def test_a_wait_or_a_copy_within_a_graph_is_refused() -> None:
    with pretended_cuda():
        values = torch.zeros(3, device=CUDA)
        for wrong in (values.tolist, lambda: values.copy_(torch.ones(3).pin_memory(), non_blocking=True)):
            with pytest.raises(RuntimeError, match="while a graph is captured"):
                launching.capture(wrong, CUDA)


@pytest.mark.parametrize("options", [{"cuda_graphs": False}, {"kv_dtype": "int8", "draft_kv_dtype": "int8"}])
def test_what_is_switched_off_or_cannot_be_captured_is_launched_by_operation(
    both: Both, options: dict[str, Any]
) -> None:
    with pretended() as counts:
        engine = Engine(both.target, both.drafter, num_pages=64, policy="fixed", **options)
        assert engine.core.runner.passes is None
        assert engine.core.proposer is not None
        assert engine.core.proposer.passes is None
        assert engine.core.runner.store.num_slots == (64 + engine.capacity.cuda_graphs) * 16
        assert not counts.operations["a graph"]


def test_a_drafter_of_some_tokens_has_graphs(both: Both) -> None:
    """The logits of all others are −∞, in a graph and without one."""
    drafter = own_ends(list(range(0, 50, 2)), **DRAFTER)
    with pretended():
        engine = Engine(both.target, move(drafter), num_pages=64, policy="fixed")
        assert engine.core.proposer is not None
        assert engine.core.proposer.passes is not None


@pytest.mark.parametrize("reads", [False, True])
def test_a_target_that_reads_values_of_the_device_is_launched_by_operation(reads: bool) -> None:
    def look(_: Any, given: tuple[torch.Tensor]) -> None:
        given[0].sum().tolist()

    kind = KINDS["experts"][0]()
    if reads:
        kind.hf.get_decoder().norm.register_forward_pre_hook(look)
    with pretended():
        engine = kind.run(move(kind.hf), move(kind.drafter))
        assert engine.target.is_regular is not reads
        assert (engine.core.runner.passes is None) is reads


@pytest.mark.slow
@pytest.mark.parametrize("name", ["canvas", "DiffusionGemma"])
def test_no_graph_is_captured_while_a_warm_engine_denoises(name: str) -> None:
    captured: list[Any] = []
    with pretended_cuda():
        kind = KINDS[name][0]()._replace(options={"page_size": 8, "max_running": 2})
        engine = kind.run(move(kind.hf), None)
        family = engine.target.diffusion
        assert family is not None
        own = replace(kind.params, max_tokens=24, diffusion=replace(family.defaults, max_steps=3))
        prompts = [list(range(20)), list(range(30, 37))]
        for is_warm in (False, True):
            captured.clear()
            if is_warm:
                engine = kind.run(engine.target.model, None)
                warm_up(engine)
            with mock.patch.object(launching, "capture", note_captures(captured)):
                list(engine.generate(prompts, own))
            assert bool(captured) != is_warm


def test_a_pool_that_lost_its_graphs_is_not_captured_into_again() -> None:
    """PyTorch refuses that."""
    with mock.patch.object(torch.cuda, "graph_pool_handle", side_effect=range(9)):
        pool, graphs = launching._graph_memory(ELSEWHERE)
        graph = Planted()
        graphs.add(graph)
        assert launching._graph_memory(ELSEWHERE) == (pool, graphs)
        del graph
        assert launching._graph_memory(ELSEWHERE)[0] != pool


def test_layers_of_other_kinds_are_launched_by_operation(both: Both) -> None:
    assert both.here.target.is_regular
    assert not hybrid_target("qwen3_5_text").is_regular
    for change in ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, {"full": {"rope_type": "longrope"}}):
        with mock.patch.object(both.here.target.model.config, "rope_parameters", change):
            assert not both.here.target.is_regular
