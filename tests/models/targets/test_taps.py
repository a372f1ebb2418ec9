"""Tapped hidden states against transformers' ``output_hidden_states``."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from tests.tiny import Pair, eager_model, make_pair, target_config
from volley import Engine
from volley.errors import UnsupportedModelError
from volley.models.targets.taps import Taps, decoder_layers


def states(pair: Pair, tokens: Tensor) -> list[Tensor]:
    """Input of the first layer, then the output of each layer but the last (which transformers norms)."""
    return list(pair.hf(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states)


@torch.inference_mode()
@pytest.mark.parametrize("layer_ids", [(0,), (-1,), (2, 0), (-1, 1, 2)])
def test_taps_are_hidden_states_in_the_order_asked(pair: Pair, layer_ids: tuple[int, ...]) -> None:
    tokens = torch.arange(12)[None]
    with Taps(pair.hf, layer_ids) as taps:
        expected = torch.cat([states(pair, tokens)[index + 1] for index in layer_ids], dim=-1)
        assert torch.equal(taps.take(), expected)


@torch.inference_mode()
def test_the_last_layer_is_tapped_before_the_final_norm(pair: Pair) -> None:
    tokens = torch.arange(12)[None]
    with Taps(pair.hf, [3]) as taps:
        final = states(pair, tokens)[4]
        torch.testing.assert_close(pair.hf.model.norm(taps.take()), final)


@torch.inference_mode()
def test_taken_states_are_forgotten(pair: Pair) -> None:
    with Taps(pair.hf, [1]) as taps:
        pair.hf(input_ids=torch.arange(3)[None])
        taps.take()
        with pytest.raises(KeyError):
            taps.take()


def test_states_that_a_pass_leaves_are_taken_once(pair: Pair) -> None:
    with Taps(pair.hf, [1]) as taps:
        taps.leave(torch.ones(3, 4))
        assert torch.equal(taps.take(), torch.ones(1, 3, 4))
        with pytest.raises(KeyError):
            taps.take()


@torch.inference_mode()
def test_closed_taps_hear_nothing(pair: Pair) -> None:
    with Taps(pair.hf, [1, -1]) as taps:
        pass
    pair.hf(input_ids=torch.arange(3)[None])
    with pytest.raises(KeyError):
        taps.take()


@pytest.mark.slow
def test_an_engine_takes_its_hooks_with_it() -> None:
    target, drafter, _ = make_pair()
    engine = Engine(target, drafter, num_pages=4)
    layer = decoder_layers(target.model)[0]
    assert len(layer._forward_hooks) == 1
    gone = weakref.ref(engine.core.runner)
    del engine
    gc.collect()
    assert gone() is None
    assert not layer._forward_hooks


def test_a_model_without_layers_is_refused() -> None:
    model = eager_model(target_config())
    del model.model.layers
    with pytest.raises(UnsupportedModelError, match="has no list of decoder layers"):
        decoder_layers(model)
