"""Tiny configs of the families whose layers volley fuses or joins, and of others that it leaves as they are."""

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
FUSED: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**COMMON),
    "llama_biases": lambda: tf.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True, head_dim=32),
    "qwen2": lambda: tf.Qwen2Config(**COMMON),  # q, k and v have biases
    "qwen3": lambda: tf.Qwen3Config(**COMMON, head_dim=32),
    "qwen3_tied": lambda: tf.Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True),
    "mistral": lambda: tf.MistralConfig(**COMMON, sliding_window=8),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "llama_gelu": lambda: tf.LlamaConfig(**COMMON, hidden_act="gelu"),
    "gemma3_text": lambda: tf.Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "olmo2": lambda: tf.Olmo2Config(**COMMON),
    "granite": lambda: tf.GraniteConfig(**COMMON, residual_multiplier=0.3, attention_multiplier=0.2),
    "gpt_oss": lambda: tf.GptOssConfig(
        **COMMON, head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "phi3": lambda: tf.Phi3Config(**COMMON),
}
