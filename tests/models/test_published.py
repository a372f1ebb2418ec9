"""Configs with the shapes of published drafters: read, built on the meta device, and written back."""

from typing import Any, get_args

import pytest
import torch

from tests.tiny import drafter_config, random_drafter
from volley.errors import ConfigError
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.checkpoints.formats import Format, obstacles, parse_config, read_checkpoint
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import export

SHAPE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
}


def yarn(factor: float) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 4096}


def full(layers: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}


def slides(window: int, layers: int) -> dict[str, Any]:
    """All layers but the last one have a window."""
    types = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    return {"num_hidden_layers": layers, "layer_types": types, "sliding_window": window, "use_sliding_window": True}


def drafter(hidden: int, inner: int, heads: int, target: tuple[int, int], taps: list[int], mask: int) -> dict[str, Any]:
    """``target`` has so many layers and tokens."""
    return {
        **SHAPE,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_target_layers": target[0],
        "vocab_size": target[1],
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
    }


GPT_OSS: dict[str, Any] = {"attention_bias": True, "head_dim": 64, "rope_scaling": yarn(32.0), **full(8)}
KIMI: dict[str, Any] = {"rope_scaling": yarn(64.0)}
QWEN_TAPS, K3_TAPS = [1, 9, 17, 25, 33], [7, 23, 51, 67, 83]

PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": drafter(2880, 7680, 64, (24, 201088), [1, 6, 11, 16, 21], 200000) | GPT_OSS | {"block_size": 8},
    "gpt-oss-120b": drafter(2880, 7680, 64, (36, 201088), [1, 9, 17, 25, 33], 200000) | GPT_OSS | {"block_size": 10},
    "kimi-k2.5": drafter(7168, 18432, 64, (61, 163840), [1, 12, 24, 35, 47, 58], 163838)
    | KIMI | full(6) | {"block_size": 8},
    "kimi-k2.6": drafter(7168, 18432, 64, (61, 163840), [1, 12, 24, 35, 47, 58], 163838)
    | KIMI | slides(2048, 6) | {"block_size": 8},
    "gemma-4-31b": drafter(5376, 21504, 32, (60, 262144), [1, 12, 23, 35, 46, 57], 4)
    | slides(2048, 5) | {"block_size": 16, "final_logit_softcapping": 30.0},
    "qwen3-8b, dspark": drafter(4096, 12288, 32, (36, 151936), QWEN_TAPS, 151669)
    | full(5) | {"block_size": 7, "markov_rank": 256, "sample_from_anchor": True},
    "kimi-k3, dspark": drafter(7168, 18432, 64, (93, 163840), K3_TAPS, 163824)
    | KIMI | full(5) | {"block_size": 7, "markov_rank": 256, "sample_from_anchor": True},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_of_published_drafters(name: str) -> None:
    raw = PUBLISHED[name]
    config = parse_config(raw)
    size, hidden, heads, dim = raw["block_size"], raw["hidden_size"], raw["num_attention_heads"], raw["head_dim"]
    is_dspark = "dspark" in name
    assert config.block_size == size + is_dspark, "a slot more, where the anchor's drafts too"
    assert config.head == (HeadConfig(type="dspark", rank=256) if is_dspark else None)
    assert (config.sliding_window, list(config.layer_types)) == (raw.get("sliding_window"), raw["layer_types"])
    with torch.device("meta"):
        state = Drafter(config).state_dict()
    assert state["fc.weight"].shape == (hidden, len(config.target_layer_ids) * hidden)
    last = f"layers.{raw['num_hidden_layers'] - 1}"
    assert state[f"{last}.self_attn.q_proj.weight"].shape == (heads * dim, hidden)
    assert state[f"{last}.self_attn.k_proj.weight"].shape == (8 * dim, hidden)
    assert state[f"{last}.mlp.down_proj.weight"].shape == (hidden, raw["intermediate_size"])
    biases = {key: tuple(tensor.shape) for key, tensor in state.items() if key.startswith(last) and "bias" in key}
    expected = {"q": heads * dim, "k": 8 * dim, "v": 8 * dim, "o": hidden} if raw["attention_bias"] else {}
    assert biases == {f"{last}.self_attn.{part}_proj.bias": (rows,) for part, rows in expected.items()}
    assert parse_config(config.to_json()) == config


def test_the_shapes_of_a_published_dflash2() -> None:
    raw = drafter(4096, 12288, 32, (45, 154880), [5, 14, 24, 33, 42], 154856)
    raw |= {
        "is_causal": False,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 5,
        "sliding_window": 2048,
    }
    sizes = {"conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 256, "selector_top_k": 16}
    config = parse_config({**raw, "dflash_config": {**raw["dflash_config"], **sizes, "block_size": 8}})
    assert config.head == HeadConfig(type="selector", rank=256, candidates=16)
    assert (config.block_size, config.sliding_window, config.causal_layers) == (8, 2048, ())
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}
    assert shapes["layers.4.attention_conv.base_kernel"] == (2, 2, 4096)
    assert shapes["layers.4.mlp_conv.kernel_projection.weight"] == (2 * 2 * 4096 // 16, 4096)
    assert shapes["head.predecessor_codebook"] == shapes["head.successor_codebook"] == (154880, 256)
    assert shapes["head.context.weight"] == (256, 4096)
    assert parse_config(config.to_json()) == config


def test_the_shapes_of_a_published_domino() -> None:
    raw = drafter(4096, 12288, 32, (36, 151936), QWEN_TAPS, 151669) | full(5) | {"block_size": 16, "emb_dim": 256}
    sizes = {"emb_dim": 256, "gru_hidden_dim": 1024, "pure_draft_prefix_len": 1, "projector_type": "domino"}
    raw["dflash_config"] |= {**sizes, "shift_label": True}
    config = parse_config(raw)
    assert config.head == HeadConfig(type="domino", rank=256, state=1024, uncorrected=1)
    assert (config.sample_from_anchor, config.block_size) == (True, 17)  # sixteen slots, each drafts a token
    with torch.device("meta"):
        state = Drafter(config).state_dict()
    assert state["head.prefix_gru.weight_ih_l0"].shape == (3 * 1024, 4096)
    assert state["head.embed_proj.0.weight"].shape == (256, 4096 + 1024)
    assert state["head.embed_proj.2.weight"].shape == (151936, 256)
    assert parse_config(config.to_json()) == config
    del raw["dflash_config"]["gru_hidden_dim"]
    with pytest.raises(ConfigError, match=r"head\.state is None; Domino's head has a state, of a positive size"):
        parse_config(raw)


def test_logits_are_capped() -> None:
    plain, capped = (random_drafter(final_logit_softcapping=cap) for cap in (None, 2.0))
    hidden, head = torch.randn(3, 32), torch.nn.Linear(32, 50, bias=False)
    logits = plain.logits(hidden, head)
    assert torch.allclose(capped.logits(hidden, head), 2 * torch.tanh(logits / 2))
    assert plain.config == random_drafter(final_logit_softcapping=0.0).config
    for form in get_args(Format):
        is_capped = any("capped" in one for one in obstacles(capped.config, form))
        assert is_capped == (form in ("transformers", "speculators"))
    with pytest.raises(ConfigError, match="final_logit_softcapping is -1"):
        random_drafter(final_logit_softcapping=-1.0)


# -- biases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["zlab", "sglang", "speculators"])
def test_biases_survive_a_round_trip(tmp_path: Any, form: Format) -> None:
    random_drafter(attention_bias=True).save_pretrained(tmp_path / "own")
    export(tmp_path / "own", tmp_path / "theirs", form)
    own, theirs = read_checkpoint(tmp_path / "own"), read_checkpoint(tmp_path / "theirs")
    assert own.config == theirs.config
    assert own.config.attention_bias
    assert own.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in own.tensors.items())


@pytest.mark.parametrize("form", ["gguf", "transformers"])
def test_formats_without_biases_refuse_them(form: Format) -> None:
    assert "its attention has biases" in obstacles(drafter_config(attention_bias=True), form)[0]
    assert not obstacles(drafter_config(), form)
