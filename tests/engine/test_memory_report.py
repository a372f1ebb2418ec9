"""The engine's report of its memory."""

from tests.tiny import make_pair
from volley import Engine
from volley.engine.memory import describe_memory, memory_of


def test_memory_is_that_of_weights_and_pools() -> None:
    pair = make_pair()
    alone, both = Engine(pair.target, num_pages=20, block_size=1), Engine(pair.target, pair.drafter, num_pages=20)
    held = memory_of(both.core)
    assert memory_of(alone.core) == {name: held[name] for name in ("target", "kv")}
    assert held["kv"] == both.core.runner.store.nbytes
    assert held["target"] >= sum(weight.nbytes for weight in pair.target.model.parameters())
    assert held["drafter"] > 0 < held["draft_kv"]
    twice = memory_of(Engine(pair.target, pair.drafter, num_pages=40).core)
    assert (twice["kv"], twice["target"]) == (2 * held["kv"], held["target"])


def test_memory_as_text_names_the_device_and_every_part() -> None:
    pair = make_pair()
    line = describe_memory(Engine(pair.target, pair.drafter, num_pages=20).core)
    assert line.startswith("memory of cpu: target ")
    assert all(f"{name} " in line for name in ("target", "kv", "drafter", "draft_kv"))
