"""The benchmark of draft costs draws on drafters that draft: a small shape, one round."""

from benchmarks.draft_cost import LAYERS, TOKENS, measure

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}


def test_a_draft_of_every_drafter_is_timed() -> None:
    found = measure(SMALL, 1)
    assert set(found) == {*(f"DFlash, {layers} layers" for layers in LAYERS), "EAGLE-3, 1 layer"}
    assert all(0 < seconds < 100 for own in found.values() for seconds in own.values())
    chain = found["EAGLE-3, 1 layer"]
    assert chain[TOKENS[0]] < chain[TOKENS[-1]], "a chain takes a pass for each token"
