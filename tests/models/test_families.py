"""Families beyond those of ``test_target.py`` that need nothing of their own, against ``generate``; and what is refused."""

import copy
from typing import Any

import pytest
import transformers as tf
from transformers import AutoConfig

from tests.models.targets.test_target import COMMON, EXPERTS, LATENT, ROUTED
from tests.models.test_other_attention import COUNT, answers_of
from tests.tiny import eager_model, greedy, random_prompts
from volley.errors import UnsupportedModelError
from volley.models.targets.target import Target

SLIDING = {"sliding_window": 8}
SHARED = {**ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**EXPERTS, **SLIDING, "num_experts": 4, "num_dense_layers": 1, "head_dim": 8},
    "apertus": {},
    "arcee": {"head_dim": 8},
    "axk1": {**LATENT, **SHARED, "v_head_dim": 8},
    "cohere2": {**SLIDING, "head_dim": 8},
    "dots1": {**SHARED, "head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": SLIDING,
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {
        **SLIDING,
        "head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 50,
        "num_kv_shared_layers": 0,
    },
    "glm4": {"head_dim": 8},
    "glm4_moe": {**SHARED, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "olmo3": SLIDING,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "seed_oss": {"head_dim": 8},
    "smollm3": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_generate(name: str) -> None:
    model = eager_model(AutoConfig.for_model(name, **{**COMMON, **FAMILIES[name]}))
    prompts = random_prompts(2, seed=2)
    expected = [greedy(model, prompt, COUNT) for prompt in prompts]
    assert len({token for answer in expected for token in answer}) > 4, "or this would prove little"
    assert answers_of(Target(copy.deepcopy(model)), prompts, expected) == expected


def test_a_model_that_counts_tokens_itself_is_refused() -> None:
    """Learnt positions after a cache's length: in a batch of several requests all would stand at the beginning."""
    config = tf.BartConfig(
        vocab_size=50,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        is_decoder=True,
        is_encoder_decoder=False,
    )
    with pytest.raises(UnsupportedModelError, match=r"BartForCausalLM takes no position_ids.* Use another target"):
        Target(eager_model(config))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "phimoe",
            {**SLIDING, "num_local_experts": 4},
            r"layers \[0, 1, 2, 3\].* a sliding window of 8 tokens that does not",
        ),
        (
            "qwen2_moe",
            {**SLIDING, "use_sliding_window": True, "max_window_layers": 3},
            r"layers \[0, 2\].* a sliding window",
        ),
        ("diffllama", {}, r"layers \[0, 1, 2, 3\] of DiffLlamaForCausalLM call attention more than once"),
        ("doge", {}, "DogeAttention gives attention a mask of its own"),
    ],
)
def test_attention_that_volley_would_compute_otherwise_is_refused(
    name: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{said}.* Use another target"):
        Target(eager_model(AutoConfig.for_model(name, **{**COMMON, **changes})))


def test_a_window_as_long_as_the_context_hides_nothing() -> None:
    context = COMMON["max_position_embeddings"]
    Target(eager_model(AutoConfig.for_model("phimoe", **{**COMMON, "sliding_window": context, "num_local_experts": 4})))
