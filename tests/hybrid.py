"""Tiny random models with recurrent layers, one of each family."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import transformers as tf
from transformers import PreTrainedModel

from tests.tiny import SHAPE, VOCAB, eager_model, greedy, random_prompts
from volley.models.targets.target import Target

COMMON: dict[str, Any] = {
    **SHAPE,
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # or logits would be flat, and every test would pass
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": LAYERS,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
SHORT = {"layer_types": ["conv", "full_attention", "conv", "conv"]}


def _qwen3_next() -> Any:
    return tf.Qwen3NextConfig(
        **COMMON, **DELTA, **EXPERTS, head_dim=8, num_experts=4, shared_expert_intermediate_size=16
    )


def _qwen3_5_moe() -> Any:
    return tf.Qwen3_5MoeTextConfig(
        **COMMON, **DELTA, **EXPERTS, head_dim=8, num_experts=4, shared_expert_intermediate_size=16
    )


def _kimi_linear() -> Any:
    heads = {"num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 8, "layer_types": LAYERS}
    latent = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    return tf.KimiLinearConfig(**{**COMMON, **heads}, **latent, **EXPERTS, num_local_experts=4, n_group=1, topk_group=1)


def nemotron_h(time_step_min: float = 1e-9) -> Any:
    """transformers clamps time steps from below in one pass over a text, but not token by token: so little makes both alike."""
    common = {name: value for name, value in COMMON.items() if name != "num_hidden_layers"}
    return tf.NemotronHConfig(
        **common,
        **EXPERTS,
        layers_block_type=["linear_attention", "full_attention", "moe", "linear_attention", "mlp"],
        head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=12,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=16,
        time_step_min=time_step_min,
    )


def _granite() -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
    return tf.GraniteMoeHybridConfig(**COMMON, **MAMBA, **experts, layer_types=LAYERS)


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": lambda: tf.Qwen3_5TextConfig(**COMMON, **DELTA, head_dim=8),
    "qwen3_5_moe_text": _qwen3_5_moe,
    "olmo_hybrid": lambda: tf.OlmoHybridConfig(**COMMON, **DELTA),
    "kimi_linear": _kimi_linear,
    "nemotron_h": nemotron_h,
    "bamba": lambda: tf.BambaConfig(**COMMON, **MAMBA, attn_layer_indices=[2]),
    "granitemoehybrid": _granite,
    "falcon_h1": lambda: tf.FalconH1Config(**COMMON, **MAMBA, head_dim=8, mamba_d_ssm=64),
    "lfm2": lambda: tf.Lfm2Config(**COMMON, **SHORT),
    "lfm2_moe": lambda: tf.Lfm2MoeConfig(**COMMON, **SHORT, **EXPERTS, num_experts=4, num_dense_layers=1),
}
KINDS = ("qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2")
"""One family of each kind of recurrent layer."""

COUNT = 18
BASE = random_prompts(4, longest=35, seed=1)
PROMPTS = [*BASE, BASE[0] + [1, 2, 3], BASE[3] + [4]]


@functools.cache
def model(name: str) -> PreTrainedModel:
    """With eager attention; its own functions run in it unless a target's pass does."""
    return eager_model(CONFIGS[name]())


@functools.cache
def target(name: str) -> Target:
    return Target(eager_model(CONFIGS[name]()))


@functools.cache
def expected(name: str) -> list[list[int]]:
    """Return the answers of transformers' ``generate`` to :data:`PROMPTS`."""
    return [greedy(model(name), prompt, COUNT) for prompt in PROMPTS]


def answers(name: str) -> dict[tuple[int, ...], Sequence[int]]:
    return {tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected(name), strict=True)}
