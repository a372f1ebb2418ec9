"""Tiny EAGLE-3 checkpoints as they are published, and what such a drafter computes, written out densely."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import embedding, silu
from transformers import PreTrainedModel

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 32, 48, 4, 2, 8, 50
TAPS = (0, 1, 2)
Tensors = dict[str, Tensor]


def config(**changes: Any) -> dict[str, Any]:
    """As the authors and SpecForge write it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True},
        **changes,
    }


def tensors(seed: int = 0, *, drafted: Sequence[int] | None = None, vocab: int = VOCAB, **switches: bool) -> Tensors:
    """Random weights by their published names; ``drafted`` are the tokens of a reduced vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, mean: float = 0.0) -> Tensor:
        return mean + 0.3 * torch.randn(shape, generator=generator)

    rows = vocab if drafted is None else len(drafted)
    found = {
        "fc.weight": draw(HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": draw(HIDDEN, mean=1),
        "midlayer.input_layernorm.weight": draw(HIDDEN, mean=1),
        "midlayer.post_attention_layernorm.weight": draw(HIDDEN, mean=1),
        "midlayer.self_attn.q_proj.weight": draw(HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": draw(KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": draw(KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": draw(HIDDEN, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": draw(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": draw(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": draw(HIDDEN, INNER),
        "norm.weight": draw(HIDDEN, mean=1),
        "lm_head.weight": draw(rows, HIDDEN),
    }
    if drafted is not None:
        found["d2t"] = torch.tensor(drafted) - torch.arange(rows)
        found["t2d"] = torch.isin(torch.arange(vocab), torch.tensor(drafted))
    if switches.get("own_embedding"):
        found["embed_tokens.weight"] = draw(vocab, HIDDEN)
    if switches.get("norm_before_fc"):
        found["input_norm.weight"] = draw(3 * HIDDEN, mean=1)
    if switches.get("fc_norm"):
        found |= {f"fc_norm.{index}.weight": draw(HIDDEN, mean=1) for index in range(3)}
    if switches.get("qk_norm"):
        found |= {f"midlayer.self_attn.{name}_norm.weight": draw(DIM, mean=1) for name in "qk"}
    return found


def write(folder: Path, raw: dict[str, Any], weights: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights, folder / "model.safetensors")
    return folder


def checkpoint(folder: Path, seed: int = 0, *, drafted: Sequence[int] | None = None, **switches: bool) -> Path:
    """A published checkpoint; ``switches`` as :class:`EagleConfig` names them, and ``own_embedding``."""
    said = {key: True for key in switches if key not in ("own_embedding", "qk_norm")}
    rows = VOCAB if drafted is None else len(drafted)
    return write(folder, config(draft_vocab_size=rows, **said), tensors(seed, drafted=drafted, **switches))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _turn(x: Tensor, positions: Tensor) -> Tensor:
    """``x [n, heads, d]`` turned by ``positions [n]``."""
    angles = positions[:, None] / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], -1) * sin


@torch.inference_mode()
def dense_logits(
    hf: PreTrainedModel, weights: Tensors, text: Sequence[int], path: Sequence[int], **switches: bool
) -> Tensor:
    """Logits over the drafted tokens after ``text`` and the drafted ``path``, by the definition, everything computed again."""
    hidden = hf(torch.tensor([list(text[:-1])]), output_hidden_states=True).hidden_states
    tapped = torch.cat([hidden[tap + 1][0] for tap in TAPS], -1)  # hidden_states[0] is the embedding
    if switches.get("norm_before_fc"):
        tapped = _norm(tapped, weights["input_norm.weight"])
    if switches.get("fc_norm"):
        parts = enumerate(tapped.chunk(3, -1))
        tapped = torch.cat([_norm(part, weights[f"fc_norm.{index}.weight"]) for index, part in parts], -1)
    states = tapped @ weights["fc.weight"].T
    table = weights.get("embed_tokens.weight", hf.get_input_embeddings().weight)
    tokens = list(text[1:])
    own = layer(weights, embedding(torch.tensor(tokens), table), states, **switches)
    for token in path:
        back = _norm(own, weights["norm.weight"]) if switches.get("norm_output") else own
        states, tokens = torch.cat([states, back[-1:]]), [*tokens, token]
        own = layer(weights, embedding(torch.tensor(tokens), table), states, **switches)
    return _norm(own, weights["norm.weight"])[-1] @ weights["lm_head.weight"].T


def dense_draft(hf: PreTrainedModel, weights: Tensors, text: Sequence[int], count: int, **switches: bool) -> list[int]:
    """The likeliest chain of ``count`` tokens after ``text``."""
    drafts = list[int]()
    for _ in range(count):
        best = int(dense_logits(hf, weights, text, drafts, **switches).argmax())
        drafts.append(best + int(weights["d2t"][best]) if "d2t" in weights else best)
    return drafts


def layer(weights: Tensors, embeddings: Tensor, states: Tensor, **switches: bool) -> Tensor:
    def part(name: str) -> Tensor:
        return weights[f"midlayer.{name}.weight"]

    normed = _norm(states, part("hidden_norm"))
    inputs = torch.cat([_norm(embeddings, part("input_layernorm")), normed], -1)
    q, k, v = ((inputs @ part(f"self_attn.{name}_proj").T).unflatten(-1, (-1, DIM)) for name in "qkv")
    if switches.get("qk_norm"):
        q, k = _norm(q, part("self_attn.q_norm")), _norm(k, part("self_attn.k_norm"))
    positions = torch.arange(len(inputs))
    q, k = _turn(q, positions), _turn(k, positions).repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / DIM**0.5
    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.repeat_interleave(HEADS // KV_HEADS, 1))
    residual = normed if switches.get("norm_before_residual") else states
    hidden = residual + mixed.flatten(1) @ part("self_attn.o_proj").T
    normed = _norm(hidden, part("post_attention_layernorm"))
    inner = silu(normed @ part("mlp.gate_proj").T) * (normed @ part("mlp.up_proj").T)
    return hidden + inner @ part("mlp.down_proj").T
