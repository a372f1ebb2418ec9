"""Families beyond those of ``test_target.py`` against transformers' ``generate``, and what is refused."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import AutoConfig, PreTrainedModel

from tests.models.targets.test_target import COMMON, EXPERTS, LATENT, ROUTED
from tests.tiny import eager_model, greedy, random_prompts
from volley import Engine, SamplingParams
from volley.decode.work import Work
from volley.errors import UnsupportedModelError
from volley.models.targets.loading import auto_class
from volley.models.targets.target import Target, check_config
from volley.proposers.scripted import ScriptedProposer

COUNT = 24
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
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}


def _mimo() -> Any:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    return tf.MiMoV2FlashConfig(**{**COMMON, **ROUTED}, head_dim=12, v_head_dim=8, sliding_window=8, layer_types=kinds)


def _longcat() -> Any:
    common = {name: value for name, value in LATENT.items() if name not in ("num_hidden_layers", "intermediate_size")}
    experts = {"moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 16}
    return tf.LongcatFlashConfig(**common, **experts, num_layers=2, ffn_hidden_size=48, v_head_dim=8, head_dim=8)


def _mistral4() -> Any:
    rope = {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
    return tf.Mistral4Config(**LATENT, **ROUTED, v_head_dim=8, head_dim=8, rope_parameters=rope)


MODELS: dict[str, Callable[[], Any]] = {
    "glm4_moe_lite": lambda: tf.Glm4MoeLiteConfig(**LATENT, **ROUTED, v_head_dim=12),
    "youtu": lambda: tf.YoutuConfig(**LATENT, v_head_dim=8),
    "minicpm3": lambda: tf.MiniCPM3Config(
        **LATENT, v_head_dim=8, scale_emb=1, dim_model_base=32, tie_word_embeddings=False
    ),
    "mistral4": _mistral4,
    "mimo_v2_flash": _mimo,
    "longcat_flash": _longcat,
    **{name: partial(AutoConfig.for_model, name, **{**COMMON, **own}) for name, own in FAMILIES.items()},
}
"""Models with latent attention, values of another width or two attentions in a layer, then those that need nothing special."""


def make_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = MODELS[name]()
    model: PreTrainedModel = auto_class(config).from_config(config, attn_implementation="eager").eval()
    return model


def answers_of(target: Target, prompts: list[list[int]], known: list[list[int]]) -> list[list[int]]:
    """Return the answers of an engine with small chunks and pages, whose drafts are wrong in one token of five."""
    table = {tuple(prompt): answer for prompt, answer in zip(prompts, known, strict=True)}

    def script(work: Work[Any]) -> list[int]:
        start = work.request.num_output
        answer = table[tuple(work.request.token_ids[: work.request.num_prompt])][start:]
        return [token if (start + i) % 5 else (token + 1) % 50 for i, token in enumerate(answer)]

    engine = Engine(target, proposer=ScriptedProposer(script, 6), policy="fixed", page_size=4, max_batch_tokens=16)
    results = list(engine.generate(prompts, SamplingParams(max_tokens=COUNT)))
    assert max(length for result in results for length in result.stats.accepted_lengths) > 3
    return [result.token_ids for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_generate(name: str) -> None:
    model = make_model(name)
    prompts = random_prompts(3, seed=2)
    expected = [greedy(model, prompt, COUNT) for prompt in prompts]
    assert len({token for answer in expected for token in answer}) > 4, "or this would prove little"
    assert answers_of(Target(copy.deepcopy(model)), prompts, expected) == expected


def test_both_attentions_of_a_layer_have_pages() -> None:
    target = Target(make_model("longcat_flash"))
    assert (target.num_layers, len(target.kv_shapes)) == (2, 4)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "deepseek_v32": (tf.DeepseekV32Config, "deepseek_v32 has an indexer that chooses"),
    "deepseek_v4": (tf.DeepseekV4Config, "deepseek_v4 has an indexer that chooses"),
    "glm_moe_dsa": (tf.GlmMoeDsaConfig, "glm_moe_dsa has an indexer that chooses"),
    "minimax_m3": (tf.MiniMaxM3VLConfig, "minimax_m3_vl_text has an indexer that chooses"),
    "bloom": (tf.BloomConfig, "bloom has ALiBi"),
    "mpt": (tf.MptConfig, "mpt has ALiBi"),
    "falcon": (lambda: tf.FalconConfig(alibi=True), "falcon has ALiBi"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_indexers_and_alibi_are_refused_by_name(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*Use a target with"):
        check_config(make())


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
