"""A server on a target with recurrent layers says what their states take."""

from tests import hybrid
from tests.tiny import greedy, make_pair
from volley import Engine, SamplingParams
from volley.serve.metrics import Metrics
from volley.serve.service import memory


def values(metrics: Metrics) -> dict[str, float]:
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {sample.name: sample.value for sample in samples if sample.name.startswith("volley:recurrent")}


def test_the_memory_of_states_is_shown() -> None:
    engine = Engine(hybrid.target("qwen3_5_text"), page_size=4, num_states=7)
    metrics = Metrics(engine.snapshot().num_pages, {})
    request = engine.add_request(hybrid.PROMPTS[0], SamplingParams(max_tokens=8))
    for step in range(4):
        engine.step()
        metrics.state(engine)
        assert values(metrics)["volley:recurrent_states_used"] == 1, step
    while request.finish_reason is None:
        engine.step()
    assert request.result().token_ids == greedy(hybrid.model("qwen3_5_text"), hybrid.PROMPTS[0], 8)
    metrics.state(engine)
    size = 3 * (3 * 80 + 4 * 8 * 12) * 4
    assert values(metrics) == {
        "volley:recurrent_states": 7,
        "volley:recurrent_states_used": 0,
        "volley:recurrent_states_cached": 1,
        "volley:recurrent_state_bytes": 7 * size,
    }
    assert memory(engine)["recurrent_states_mib"] == round(7 * size / 2**20, 3)


def test_an_attention_target_has_none() -> None:
    engine = Engine(make_pair().target)
    metrics = Metrics(1, {})
    metrics.state(engine)
    assert set(values(metrics).values()) == {0}
    assert list(memory(engine)) == ["target_mib", "kv_mib"]
