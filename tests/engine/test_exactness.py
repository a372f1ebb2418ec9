"""``exact=True`` is kept where it is promised, and refused with the reason everywhere else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Cohere2Config, OlmoConfig

from tests.engine.test_exact import CHATS, GREEDY, loaded, plain, tokens
from tests.tiles import needs_kernels
from tests.tiny import Pair
from volley import Engine
from volley.errors import ConfigError
from volley.models.layers.accelerate import accelerate
from volley.models.targets.target import Target


@pytest.mark.slow
@needs_kernels
def test_exact_is_kept_where_it_is_promised() -> None:
    pair = loaded("bf16")
    engine = Engine(pair.target, pair.drafter, exact=True)
    assert engine.core.inexact is None
    assert tokens(list(engine.generate(CHATS, GREEDY))) == plain("bf16", GREEDY)


@needs_kernels
def test_exact_is_refused_with_quantised_keys_and_values() -> None:
    target = loaded("bf16").target
    assert "int8 K/V" in str(Engine(target, kv_dtype="int8").core.inexact)
    with pytest.raises(ConfigError, match=r"exact=True cannot be kept: .* int8 K/V; use kv_dtype='auto'"):
        Engine(target, kv_dtype="int8", exact=True)


def test_exact_is_refused_in_fp32(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, block_size=4)
    with pytest.raises(
        ConfigError, match=r"exact=True cannot be kept: .*(float32.* load the target in bf16|do not run)"
    ):
        engine.reconfigure(replace(engine.config, block_size=2, exact=True))
    assert engine.config.block_size == engine.block_size == 4, "refused, it decodes as before"


@needs_kernels
@pytest.mark.parametrize("config", [Cohere2Config, OlmoConfig])
def test_exact_is_refused_where_a_part_runs_on_pytorch(config: Callable[..., Any]) -> None:
    model = AutoModelForCausalLM.from_config(
        config(
            vocab_size=60,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    model = model.to(torch.bfloat16).eval()
    accelerate(model)
    with pytest.raises(ConfigError, match=r"not all of \w+ForCausalLM runs on volley's kernels.*leave exact out"):
        Engine(Target(model), exact=True)
