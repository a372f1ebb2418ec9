"""Tiny configs of families: those whose layers volley joins on a GPU, more that it fuses on a CPU, and others."""

from collections.abc import Callable
from typing import Any

import transformers as tf

COMMON: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
JOINED: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**COMMON),
    "llama_biases": lambda: tf.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True, head_dim=32),
    "qwen2": lambda: tf.Qwen2Config(**COMMON),  # q, k and v have biases
    "qwen3": lambda: tf.Qwen3Config(**COMMON, head_dim=32),
    "qwen3_tied": lambda: tf.Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True),
    "mistral": lambda: tf.MistralConfig(**COMMON, sliding_window=8),
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SLIDING = {"sliding_window": 8}
GEMMA: dict[str, Any] = {**COMMON, **SLIDING, "head_dim": 16, "query_pre_attn_scalar": 24, "tie_word_embeddings": False}
MORE: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: tf.Gemma2Config(**GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=6.0),
    "gemma3_text": lambda: tf.Gemma3TextConfig(
        **GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "smollm3": lambda: tf.SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1]),
    "phi3": lambda: tf.Phi3Config(**COMMON, **SLIDING),
    "phi3_partial": lambda: tf.Phi3Config(
        **COMMON, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    ),
    "granite": lambda: tf.GraniteConfig(
        **COMMON, residual_multiplier=0.3, attention_multiplier=0.2, embedding_multiplier=6.0, logits_scaling=8.0
    ),
    "olmo2": lambda: tf.Olmo2Config(**COMMON),
    "olmo3": lambda: tf.Olmo3Config(**COMMON, **SLIDING),
    "exaone4": lambda: tf.Exaone4Config(
        **COMMON, **SLIDING, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**COMMON, **ROUTED, head_dim=16, norm_topk_prob=True, mlp_only_layers=[1]),
    "olmoe": lambda: tf.OlmoeConfig(**COMMON, num_experts=6, num_experts_per_tok=3),
    "mixtral": lambda: tf.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: tf.GptOssConfig(
        **COMMON, **SLIDING, head_dim=16, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=1.5
    ),
}
FUSED = {**JOINED, **MORE}
OTHERS: dict[str, Callable[[], Any]] = {
    "llama_gelu": lambda: tf.LlamaConfig(**COMMON, hidden_act="gelu"),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(
        **COMMON, **ROUTED, use_sliding_window=False, shared_expert_intermediate_size=64
    ),
    "glm4": lambda: tf.Glm4Config(**COMMON, head_dim=16),
}
