"""The text part of vision-language checkpoints: loaded by their own class, and compared with its ``generate``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests.models.targets.test_target import COMMON
from tests.tiny import greedy
from volley import Engine, SamplingParams
from volley.models.targets.loading import load_causal_lm
from volley.models.targets.target import Target

TEXT: dict[str, Any] = {**COMMON, "num_hidden_layers": 3}
SEES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 8,
}
QWEN_SEES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}
GEMMA = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
PROMPTS = [[5, 9, 2, 7, 7, 30, 11], [*range(1, 21)]]


def rope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections)}


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2_5_vl": lambda: tf.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope(2, 1, 1)},
        vision_config={**QWEN_SEES, "fullatt_block_indexes": [0]},
        tie_word_embeddings=False,
    ),
    "qwen3_vl": lambda: tf.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": {**rope(2, 1, 1), "mrope_interleaved": True}},
        vision_config={**QWEN_SEES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
    ),
    "mistral3": lambda: tf.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "head_dim": 8},
        vision_config={**SEES, "model_type": "pixtral", "head_dim": 8},
        image_token_index=40,
        tie_word_embeddings=False,
    ),
    "gemma3": lambda: tf.Gemma3Config(
        text_config={**TEXT, **GEMMA}, vision_config=SEES, image_token_index=40, mm_tokens_per_image=4
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_answers_are_those_of_generate(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tf.AutoModelForImageTextToText.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    embedding = model.get_input_embeddings().weight
    if embedding is model.get_output_embeddings().weight:  # or the likeliest token would always be the one before
        torch.nn.init.normal_(embedding, 0.0, 0.03)
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path, torch.float32)
    engine = Engine(Target(loaded), max_batch_tokens=11)
    found = engine.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    expected = [greedy(model, prompt, 24) for prompt in PROMPTS]
    assert len({*expected[0], *expected[1]}) > 6
    assert [result.token_ids for result in found] == expected
