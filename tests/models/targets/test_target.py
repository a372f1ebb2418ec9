"""Targets on pages against transformers' own eager attention, and what is refused."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from tests.conftest import TinyPair
from tests.memory.reference import reference_attention
from tests.tiny import SHAPE, Pair, eager_model, target_config
from volley import Engine, SamplingParams
from volley.errors import CheckpointError, ConfigError, InputError, UnsupportedModelError
from volley.memory.attention import paged_attention
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import DenseKVStore
from volley.models.targets.target import Target

LENGTH = 40
PAGE = 4
COMMON: dict[str, Any] = {
    **SHAPE,
    "vocab_size": 50,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {  # keys of 16, and values that are narrower or wider
    **COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**COMMON),
    "qwen2": lambda: tf.Qwen2Config(**COMMON),
    "qwen3": lambda: tf.Qwen3Config(**COMMON, head_dim=8),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**COMMON, head_dim=8, num_experts=4, **EXPERTS),
    "mistral": lambda: tf.MistralConfig(**COMMON, sliding_window=8),
    "gemma2": lambda: tf.Gemma2Config(**COMMON, head_dim=8, sliding_window=8, attn_logit_softcapping=2.0),
    "gemma3_text": lambda: tf.Gemma3TextConfig(
        **COMMON, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, sliding_window_pattern=2
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **COMMON, head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "phi3": lambda: tf.Phi3Config(**COMMON),
    "deepseek_v2": lambda: tf.DeepseekV2Config(**LATENT, v_head_dim=8, **ROUTED),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**LATENT, v_head_dim=24, **ROUTED),
}
TABLES = {
    "consecutive": ([*range(10)], [*range(10, 20)]),
    "scattered": ([17, 3, 9, 0, 12, 5, 19, 1, 7, 15], [2, 4, 6, 8, 10, 11, 13, 14, 16, 18]),
}


@functools.cache
def case(name: str) -> tuple[Target, Tensor, Tensor]:
    """A target, two sequences ``[2, LENGTH]`` and transformers' logits for them ``[2, LENGTH, V]``."""
    hf = eager_model(ARCHITECTURES[name]())
    if name == "gpt_oss":  # sinks start empty; give them weight
        for layer in hf.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, 0.0, 1.0)
    tokens = torch.randint(1, 50, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = hf(input_ids=tokens, use_cache=False).logits
    return Target(copy.deepcopy(hf)), tokens, expected


# Each step: (sequence, start, known tokens, draft tokens that turn out wrong). Prefill in chunks, decoding, verification
# and rollback of both sequences share passes in every mixture.
STEPS = [
    [(0, 0, 7, 0)],
    [(0, 7, 13, 0), (1, 0, 5, 0)],
    [(1, 5, 7, 0), (0, 20, 1, 0)],
    [(0, 21, 1, 5), (1, 12, 1, 0)],
    [(1, 13, 1, 5), (0, 22, 1, 5)],
    [(0, 23, 9, 0), (1, 14, 9, 0)],
    [(1, 23, 1, 0), (0, 32, 1, 0)],
    [(1, 24, 16, 0), (0, 33, 7, 0)],
]


@torch.inference_mode()
def run_steps(target: Target, tokens: Tensor, pages: tuple[list[int], list[int]]) -> Tensor:
    store = DenseKVStore(target.kv_shapes, 20 * PAGE, torch.float32, torch.device("cpu"))
    tables = [BlockTable(PAGE, own) for own in pages]
    logits = torch.full((2, LENGTH, target.vocab_size), torch.nan)
    for step in STEPS:
        segments = [Segment(tables[which], start, known + drafted) for which, start, known, drafted in step]
        parts, rows = [], []
        for which, start, known, drafted in step:
            rows += range(sum(map(len, parts)), sum(map(len, parts)) + known)
            wrong = (tokens[which, start + known : start + known + drafted] + 1) % 50
            parts.append(torch.cat([tokens[which, start : start + known], wrong]))
        output = target.forward(RaggedBatch(segments, torch.cat(parts)), store, torch.tensor(rows))
        for which, start, known, _ in step:
            logits[which, start : start + known] = output[:known]
            output = output[known:]
        assert not len(output)
    return logits


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_eager_attention(name: str) -> None:
    target, tokens, expected = case(name)
    for attention in (paged_attention, reference_attention):
        target.attention = attention
        for layout, pages in TABLES.items():
            found = run_steps(target, tokens, pages)
            assert error(found, expected) < 1e-4, (attention.__name__, layout)
    target.attention = paged_attention


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gemma2", "gpt_oss"])
def test_what_is_special_about_an_architecture_shows_in_its_logits(name: str) -> None:
    """Without its window, cap or sinks each would fail the test above, so that test can see them."""
    target, tokens, expected = case(name)

    def plain(batch, store, layer, q, k, v, options):  # type: ignore[no-untyped-def]
        return paged_attention(batch, store, layer, q, k, v, type(options)(options.scale))

    target.attention = plain
    assert error(run_steps(target, tokens, TABLES["consecutive"]), expected) > 1e-2
    target.attention = paged_attention


def test_only_the_rows_asked_for_reach_the_head(pair: Pair) -> None:
    target, tokens = pair.target, torch.arange(6)
    store = DenseKVStore(target.kv_shapes, 8, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        batch = RaggedBatch([Segment(BlockTable(8, [0]), 0, 6)], tokens)
        found = target.forward(batch, store, torch.tensor([5, 1]))
        expected = pair.hf(input_ids=tokens[None], use_cache=False).logits[0, [5, 1]]
    assert error(found, expected) < 1e-4


def test_embedding_and_head_are_the_models_own(pair: Pair) -> None:
    target = pair.target
    with torch.inference_mode():
        states = pair.hf(input_ids=torch.arange(9)[None], output_hidden_states=True, use_cache=False)
        torch.testing.assert_close(target.embed(torch.arange(9)), states.hidden_states[0][0])
        torch.testing.assert_close(target.head(states.hidden_states[-1][0]), states.logits[0])
    assert (target.num_layers, target.hidden_size, target.vocab_size, target.context_length) == (4, 32, 50, 512)
    assert target.kv_shapes == [(2, 8)] * 4


def test_stop_tokens_come_from_model_and_generation_config() -> None:
    model = eager_model(target_config(eos_token_id=7))
    model.generation_config.eos_token_id = [7, 9]
    assert Target(model).stop_token_ids == {7, 9}


def test_yarn_makes_the_context_longer() -> None:
    """Model cards tell users to add it, and leave max_position_embeddings as it was."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    target = Target(eager_model(target_config(max_position_embeddings=64, rope_parameters=rope)))
    assert target.context_length == 256
    longer = Target(eager_model(target_config(max_position_embeddings=512, rope_parameters=rope)))
    assert longer.context_length == 512


def longrope(long_factor: list[float]) -> tf.Phi3Config:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 8.0}
    config = tf.Phi3Config(**{**COMMON, "max_position_embeddings": 128}, original_max_position_embeddings=16)
    config.rope_parameters = {**rope, "short_factor": [1.0] * 4, "long_factor": long_factor}
    return config


def test_a_longrope_target_keeps_to_its_original_context() -> None:
    """Beyond it, all frequencies change with the longest sequence of a batch."""
    config = longrope([4.0] * 4)
    engine = Engine(Target(eager_model(config)))
    assert engine.target.context_length == 16
    with pytest.raises(InputError, match="the target's context is 16"):
        engine.add_request([1] * 16)
    # ... and what stays inside is right.
    tokens = torch.arange(1, 17)
    with torch.inference_mode():
        expected = eager_model(config)(input_ids=tokens[None], use_cache=False).logits[0]
        table, store = (
            BlockTable(16, [0]),
            DenseKVStore(engine.target.kv_shapes, 16, torch.float32, torch.device("cpu")),
        )
        chunks = [(0, 5), (5, 16)]
        found = [
            engine.target.forward(RaggedBatch([Segment(table, a, b - a)], tokens[a:b]), store, torch.arange(b - a))
            for a, b in chunks
        ]
    assert error(torch.cat(found), expected) < 1e-4


def build(config: Any) -> Target:
    return Target(tf.AutoModelForCausalLM.from_config(config))


def test_chunked_attention_is_refused_by_name() -> None:
    """Its mask is not in the attention hook, so it would be silently ignored."""
    config = tf.Llama4TextConfig(**SHAPE, head_dim=8, vocab_size=50, num_hidden_layers=4, moe_layers=[])
    with pytest.raises(
        UnsupportedModelError,
        match=r"llama4_text has layers of type chunked_attention: where a chunk begins .*by their place in the pass",
    ):
        build(config)


def test_a_model_without_the_attention_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers refuses to set another attention where a model calls none of its functions."""
    model = eager_model(target_config())

    def refuse(name: str) -> None:
        raise ValueError(f"cannot set {name}")

    monkeypatch.setattr(model, "set_attn_implementation", refuse)
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM does not route attention"):
        Target(model)


def test_a_model_that_hands_no_keywords_on_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"NemotronAttention does not get the keywords .* Use another target"
    ):
        Target(eager_model(tf.NemotronConfig(**COMMON)))


def test_a_layer_that_bypasses_the_interface_is_found_by_the_probe() -> None:
    model = eager_model(target_config())
    attention = model.model.layers[2].self_attn
    attention.forward = lambda hidden_states, **_: (attention.o_proj(attention.q_proj(hidden_states)), None)
    with pytest.raises(UnsupportedModelError, match=r"layers \[2\] of Qwen3ForCausalLM do not call the attention"):
        Target(model)


def test_from_pretrained_loads_model_and_tokenizer(tiny_pair: TinyPair) -> None:
    target = Target.from_pretrained(tiny_pair.target, dtype=torch.float32)
    assert target.dtype == torch.float32
    assert target.tokenizer is not None
    assert target.stop_token_ids == {2}


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_a_clear_error(tiny_pair: TinyPair, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used here"):
        Target.from_pretrained(tiny_pair.target, device=device)


def test_a_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is no folder here; give one with config\.json, or a hub name"):
        Target.from_pretrained(tmp_path / "nowhere")


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path: Path) -> None:
    tf.T5Config(d_model=32, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError):
        Target.from_pretrained(tmp_path)


def test_a_longrope_target_beyond_its_original_context() -> None:
    """Prompts of both kinds in one batch, in chunks: as transformers computes a pass that is long enough."""
    config = longrope([1.5, 2.0, 3.0, 4.0])
    target = Target(eager_model(config))
    target.use_long_factors()
    assert target.context_length == 128
    long, short = torch.arange(40) % 47 + 1, torch.arange(9) + 3
    with torch.inference_mode():
        model = eager_model(config)
        expected = model(input_ids=long[None], use_cache=False).logits[0]
        model.model.rotary_emb(torch.zeros(1), torch.tensor([[20]]))  # it has its long factors now
        padded = torch.cat([short, torch.zeros(20, dtype=torch.long)])
        expected_short = model(input_ids=padded[None], use_cache=False).logits[0, :9]
    engine = Engine(target, max_batch_tokens=13)
    for tokens, wanted in ((short, expected_short), (long, expected), (short, expected_short)):
        found = engine.next_logits(tokens.tolist())
        torch.testing.assert_close(found, wanted[-1].float(), rtol=1e-4, atol=1e-4)
    prompts = [long[:30].tolist(), short.tolist()]
    both = [result.token_ids for result in engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))]
    text = torch.tensor(prompts[0] + both[0])
    with torch.inference_mode():
        greedy_tokens = model(input_ids=text[None], use_cache=False).logits[0, 29:-1].argmax(-1)
    assert both[0] == greedy_tokens.tolist()
    with pytest.raises(UnsupportedModelError, match="no second set of rotary factors"):
        Target(eager_model(target_config())).use_long_factors()


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_pages_hold_latents_once_for_all_heads(name: str) -> None:
    target, _, _ = case(name)
    assert target.kv_shapes == [(1, 16 + 8)] * len(target.kv_shapes), "a latent of 16 and a rotary key of 8"
    store = DenseKVStore(target.kv_shapes, 1, torch.float32, torch.device("cpu"))
    assert store.nbytes == len(target.kv_shapes) * (16 + 8) * 4


def test_a_layer_whose_latents_say_something_else_keeps_expanded_keys() -> None:
    """Here its projection does not compute what its keys are made of."""
    model = eager_model(ARCHITECTURES["deepseek_v3"]())
    attention = model.model.layers[0].self_attn
    forward = attention.kv_b_proj.forward
    attention.kv_b_proj.forward = lambda x: forward(x) + x.sum() - x.sum(-1, keepdim=True)
    assert [heads for heads, _ in Target(model).kv_shapes] == [4] + [1] * (len(model.model.layers) - 1)
