"""What an engine tells of its memory; tests/gpu/test_graphs.py captures graphs ahead on a pretended GPU."""

import pytest

from tests.tiny import make_pair, random_prompts
from volley import Engine, SamplingParams
from volley.engine.reload import replace_drafter
from volley.engine.runner import Runner
from volley.engine.start import describe_memory, memory_of, report_memory, warm_up


def test_memory_is_that_of_weights_and_pools() -> None:
    pair = make_pair()
    alone, both = Engine(pair.target, num_pages=20), Engine(pair.target, pair.drafter, num_pages=20)
    held = memory_of(both)
    assert memory_of(alone) == {name: held[name] for name in ("target", "kv")}
    assert held["kv"] == both.runner.store.nbytes
    assert held["target"] >= sum(weight.nbytes for weight in pair.target.model.parameters())
    assert held["drafter"] > 0 < held["draft_kv"]
    twice = memory_of(Engine(pair.target, pair.drafter, num_pages=40))
    assert (twice["kv"], twice["target"]) == (2 * held["kv"], held["target"])


def test_memory_as_text_names_the_device_and_every_part() -> None:
    pair = make_pair()
    line = describe_memory(Engine(pair.target, pair.drafter, num_pages=20))
    assert line.startswith("memory of cpu: target ")
    assert all(f"{name} " in line for name in ("target", "kv", "drafter", "draft_kv"))


def test_a_cpu_has_nothing_to_report_and_no_graphs(caplog: pytest.LogCaptureFixture) -> None:
    pair = make_pair()
    engine = Engine(pair.target, pair.drafter, num_pages=20)
    with caplog.at_level("INFO", "volley"):
        report_memory(engine)
    assert not caplog.text
    assert warm_up(engine)[0] == 0


def test_no_step_waits_for_the_timing_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = list[int]()

    def seconds(runner: Runner, tokens: int, requests: int) -> float:
        timed.append(tokens)
        return 1e-4 * tokens

    monkeypatch.setattr(Runner, "seconds", seconds)
    pair = make_pair()
    engine = Engine(pair.target, pair.drafter, num_pages=80, max_batch_tokens=128, max_running=8)
    warm_up(engine)
    assert max(timed) == 128
    timed.clear()
    params = SamplingParams(max_tokens=12)
    assert len(list(engine.generate(random_prompts(8), params))) == 8
    assert not timed
    replace_drafter(engine, make_pair().drafter)
    assert len(list(engine.generate(random_prompts(8), params))) == 8
    assert max(timed) < 64, "those of one request, before the new drafter drafts"
