"""Merged layers against transformers' own, in fp32, and where their weights lie."""

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from tests.memory import rows
from tests.models.families import JOINED, MORE, OTHERS
from tests.tiny import eager_model, greedy, make_pair, random_drafter, random_prompts
from volley import Engine, SamplingParams
from volley.models.layers import merged
from volley.models.layers.merged import MergedLayer, merge_layers
from volley.models.targets.target import Target


@pytest.fixture(autouse=True)
def _rows_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged, "row_operations", lambda: rows)


def model_of(config: Any) -> tf.PreTrainedModel:
    model = eager_model(config)
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return model.requires_grad_(False)


@pytest.mark.parametrize("name", JOINED)
def test_tokens_are_transformers_own(name: str) -> None:
    plain = model_of(JOINED[name]())
    model = copy.deepcopy(plain)
    assert merge_layers(model) == 3
    engine = Engine(Target(model), num_pages=60, page_size=4)
    prompts = random_prompts(3, seed=2, vocab=60, longest=20)
    for prompt, result in zip(prompts, engine.generate(prompts, SamplingParams(max_tokens=12)), strict=True):
        assert result.token_ids == greedy(plain, prompt, 12)


SOME = {"smollm3", "qwen3_moe"}  # of their layers are Llama's or Qwen's
LEFT = {name: make for name, make in {**MORE, **OTHERS}.items() if name not in SOME}


@pytest.mark.parametrize("name", LEFT)
def test_other_layers_are_left_alone(name: str) -> None:
    model = model_of(LEFT[name]())
    assert merge_layers(model) == 0
    assert not any(isinstance(vars(layer).get("forward"), MergedLayer) for layer in model.model.layers)


def test_nothing_is_held_twice() -> None:
    model = model_of(JOINED["llama_biases"]())
    saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    before = sum(weight.nbytes for weight in model.parameters())
    merge_layers(model)
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    assert sum(storages.values()) == before
    attention = model.model.layers[1].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    assert all(torch.equal(weight, saved[name]) for name, weight in model.state_dict().items())
    changed = model.model.layers[1].forward.merged.weights
    attention.q_proj.weight.zero_()
    assert not changed.project.weight[: len(attention.q_proj.weight)].any()


@pytest.mark.parametrize("biased", [False, True])
def test_a_joined_drafter_drafts_the_same(biased: bool) -> None:
    pair = make_pair(drafter={"attention_bias": biased})
    drafter = random_drafter(1, attention_bias=biased)
    drafter.merge()
    prompts, params = random_prompts(3, seed=1), SamplingParams(max_tokens=16)
    answers = []
    for own in (pair.drafter, drafter):
        engine = Engine(pair.target, own, policy="fixed", num_pages=60)
        answers.append([(r.token_ids, r.stats.accepted_lengths) for r in engine.generate(prompts, params)])
    assert answers[0] == answers[1]
