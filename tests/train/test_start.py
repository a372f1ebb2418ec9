"""A new drafter reads a text as its target does before anything is learnt, where their layers are alike."""

import torch
from torch.testing import assert_close
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

from tests import tiny
from volley.models.drafters.drafter import Drafter
from volley.models.targets.taps import Taps
from volley.train.start import start_at_target


def other_norms(model: torch.nn.Module) -> None:
    """Scales that are not 1, which a random model's are."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 2.0)


def qwen() -> Qwen3ForCausalLM:
    model = tiny.eager_model(tiny.target_config())
    assert isinstance(model, Qwen3ForCausalLM)
    other_norms(model)
    return model


def test_injected_features_give_the_keys_and_values_of_the_layer_behind_the_first_tap() -> None:
    target, drafter = qwen(), Drafter(tiny.drafter_config())
    start_at_target(drafter, target)
    width, attention = drafter.config.hidden_size, target.model.layers[1].self_attn
    with torch.no_grad():
        drafter.fc.weight[:, width:] = 0  # what the other tap adds at random
        drafter.fc.weight[:, :width] = torch.eye(width)
    found: dict[str, torch.Tensor] = {}
    attention.v_proj.register_forward_hook(lambda *call: found.update(values=call[2]))
    attention.k_norm.register_forward_hook(lambda *call: found.update(keys=call[2]))
    positions = torch.arange(7)
    with torch.no_grad(), Taps(target, drafter.config.target_layer_ids) as taps:
        target(input_ids=positions[None] + 5)
        _, values = drafter.context_kv(taps.take()[0], positions)[0]
        keys = drafter.layers[0].self_attn.k_norm(
            drafter.layers[0].self_attn.split_heads(
                drafter.layers[0].self_attn.k_proj(drafter.hidden_norm(drafter.fc(features(target, drafter))))
            )
        )
    assert_close(values.flatten(1), found["values"][0])
    assert_close(keys, found["keys"][0].view_as(keys))


def features(target: Qwen3ForCausalLM, drafter: Drafter) -> torch.Tensor:
    with Taps(target, drafter.config.target_layer_ids) as taps:
        target(input_ids=torch.arange(7)[None] + 5)
        return taps.take()[0]


def test_draft_layers_are_the_targets_behind_the_first_tap() -> None:
    target, drafter = qwen(), Drafter(tiny.drafter_config())
    start_at_target(drafter, target)
    for own, theirs in zip(drafter.layers, target.model.layers[1:3], strict=True):
        weights = dict(theirs.named_parameters())
        for name, weight in own.named_parameters():
            assert_close(weight, weights[name], msg=name)
    assert_close(drafter.norm.weight, target.model.norm.weight)


def test_layers_of_another_kind_or_shape_are_left_alone() -> None:
    llama = LlamaConfig(**{**tiny.SHAPE, "head_dim": 8, "vocab_size": tiny.VOCAB, "num_hidden_layers": 4})
    wide = Qwen3Config(**{**tiny.target_config().to_dict(), "intermediate_size": 64})
    for config in (llama, wide):  # without norms of queries and keys; with wider MLPs
        target = tiny.eager_model(config)
        other_norms(target)
        torch.manual_seed(3)
        fresh = Drafter(tiny.drafter_config())
        torch.manual_seed(3)
        drafter = Drafter(tiny.drafter_config())
        start_at_target(drafter, target)
        assert_close(drafter.norm.weight, target.get_decoder().norm.weight)
        for name, weight in fresh.named_parameters():
            if name != "norm.weight":
                assert_close(drafter.get_parameter(name), weight, msg=name)


def test_a_tap_without_enough_layers_behind_it_changes_the_last_norm_only() -> None:
    target = qwen()
    torch.manual_seed(3)
    fresh = Drafter(tiny.drafter_config(target_layer_ids=(2, 3)))
    torch.manual_seed(3)
    drafter = Drafter(tiny.drafter_config(target_layer_ids=(2, 3)))
    start_at_target(drafter, target)
    assert_close(drafter.fc.weight, fresh.fc.weight)
    assert_close(drafter.norm.weight, target.model.norm.weight)
