"""Drafters of other kinds than DFlash, in their authors' layouts: drafts are those of a slow reference, and no answer changes.

The reference is written from the definitions: tensors by the checkpoints' names, slot by slot, channel by channel.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softmax

from tests.engine.test_greedy import check_drafter
from tests.engine.test_markov import LENGTH, drafts_of
from tests.tiny import VOCAB, Pair, drafter_config, greedy
from volley import Engine
from volley.errors import ConfigError
from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.checkpoints.formats import parse_config
from volley.models.drafters.drafter import Drafter, Rotary, rotate
from volley.tensors import save_tensors

H, HEADS, SHARED, DIM, GROUP, RANK, CANDIDATES = 32, 4, 2, 8, 4, 5, 4
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
DFLASH2 = {
    "block_size": 6, "conv_group_size": GROUP, "conv_kernel_size": 2, "selector_rank": RANK, "selector_top_k": CANDIDATES,
}  # fmt: skip
SPECULATORS = {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 3], "mask_token_id": 3}
STATE, WIDTH = 6, 7
DOMINO = {"projector_type": "domino", "emb_dim": WIDTH, "gru_hidden_dim": STATE, "pure_draft_prefix_len": 1}
Tensors = Mapping[str, Tensor]


def zlab(nested: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A config in z-lab's layout, as published checkpoints have it."""
    raw = drafter_config().to_json() | changes
    return raw | {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2], **nested}}


def speculators(**layers: Any) -> dict[str, Any]:
    left_out = ("dflash_config", "block_size", "num_target_layers")
    shape = {key: value for key, value in drafter_config().to_json().items() if key not in left_out}
    return {**SPECULATORS, "block_size": 6, "transformer_layer_config": shape | layers}


CONFIGS: dict[str, dict[str, Any]] = {
    "dflash2": zlab(DFLASH2, architectures=["DFlash2DraftModel"], is_causal=False, **SLIDING),
    "dflash2 of speculators": {**speculators(), **DFLASH2, "speculators_model_type": "dflash2"},
    "domino": zlab({**DOMINO, "shift_label": False}, architectures=["DominoDraftModel"], emb_dim=WIDTH),
    "domino, shifted": zlab({**DOMINO, "shift_label": True, "block_size": 5}),
    "biased": zlab({}, attention_bias=True, **SLIDING),
    "biased of speculators": speculators(attention_bias=True),
    "causal": zlab({"causal": True}, **SLIDING),
    "is_causal": zlab({"causal": False}, is_causal=True),
    "causal sliding layers": {**speculators(**SLIDING), "sliding_window_non_causal": False},
}


def tensors_of(kind: str, config: DrafterConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors by the names of the kind's authors."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for layer in range(2):
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,),
            "self_attn.q_proj.weight": (HEADS * DIM, H), "self_attn.k_proj.weight": (SHARED * DIM, H),
            "self_attn.v_proj.weight": (SHARED * DIM, H), "self_attn.o_proj.weight": (H, HEADS * DIM),
            "self_attn.q_norm.weight": (DIM,), "self_attn.k_norm.weight": (DIM,),
            "mlp.gate_proj.weight": (48, H), "mlp.up_proj.weight": (48, H), "mlp.down_proj.weight": (H, 48),
        }  # fmt: skip
        if "biased" in kind:
            own |= {f"self_attn.{part}_proj.bias": own[f"self_attn.{part}_proj.weight"][:1] for part in "qkvo"}
        if "dflash2" in kind:
            for conv in ("attention_conv", "mlp_conv"):
                own |= {f"{conv}.base_kernel": (2, 2, H), f"{conv}.kernel_projection.weight": (4 * H // GROUP, H)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    if "dflash2" in kind:
        tables = ("predecessor_codebook", "successor_codebook")
        shapes |= {f"candidate_selector.{name}": (VOCAB, RANK) for name in tables}
        shapes["candidate_selector.hidden_projection.weight"] = (RANK, H)
    if "domino" in kind:
        shapes |= {"prefix_gru.weight_ih_l0": (3 * STATE, H), "prefix_gru.weight_hh_l0": (3 * STATE, STATE)}
        shapes |= {"embed_proj.0.weight": (WIDTH, H + STATE), "embed_proj.2.weight": (VOCAB, WIDTH)}
    generator = torch.Generator().manual_seed(seed)
    found = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor + 1 if "norm" in name else tensor for name, tensor in found.items()}


def write(folder: Path, kind: str) -> Tensors:
    tensors = tensors_of(kind, parse_config(CONFIGS[kind]))
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    save_tensors(folder / "model.safetensors", tensors)
    return tensors


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def convolve(x: Tensor, base: Tensor, change: Tensor) -> Tensor:
    """``x [S, H]`` with ``base [taps, H]`` and ``change [S, taps, groups]``, channel by channel."""
    out = torch.zeros_like(x)
    for slot in range(len(x)):
        for channel in range(H):
            for tap in range(min(2, slot + 1)):
                kernel = base[tap, channel] + change[slot, tap, channel // GROUP]
                out[slot, channel] += kernel * x[slot - tap, channel]
    return out


def wrap(tensors: Tensors, name: str, x: Tensor, sublayer: Any) -> Tensor:
    if f"{name}.base_kernel" not in tensors:
        return sublayer(x)
    base = tensors[f"{name}.base_kernel"]
    change = (x @ tensors[f"{name}.kernel_projection.weight"].T).view(len(x), 2, 2, H // GROUP)
    return convolve(sublayer(convolve(x, base[0], change[:, 0])), base[1], change[:, 1])


def visible(slots: int, length: int, *, window: int | None, causal: bool) -> Tensor:
    """Which of ``length`` tokens of context and of the slots each slot sees ``[S, length + S]``."""
    seen = torch.zeros(slots, length + slots, dtype=torch.bool)
    for slot in range(slots):
        first = 0 if window is None else max(0, length - window + (slot + 1 if causal else 0))
        seen[slot, first : length + (slot + 1 if causal else slots)] = True
    return seen


def slow_states(config: DrafterConfig, causal: Sequence[bool], tensors: Tensors, taps: Tensor, x: Tensor) -> Tensor:
    """Final states ``[S, H]`` of the slots' embeddings ``x`` after context ``taps [T, 2 · H]``."""
    context = norm(taps @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    length = len(context)
    cos, sin = Rotary(config)(torch.arange(length + len(x)), torch.float32)
    for layer in range(2):
        own = {name.split(".", 2)[2]: t for name, t in tensors.items() if name.startswith(f"layers.{layer}.")}
        slides = config.layer_types[layer] == "sliding_attention"
        seen = visible(len(x), length, window=config.sliding_window if slides else None, causal=causal[layer])

        def attend(states: Tensor, own: Tensors = own, seen: Tensor = seen) -> Tensor:
            def project(part: str, x: Tensor) -> Tensor:
                x = x @ own[f"self_attn.{part}_proj.weight"].T
                return x + own.get(f"self_attn.{part}_proj.bias", torch.zeros(1))

            both = torch.cat([context, states])
            queries = norm(project("q", states).view(-1, HEADS, DIM), own["self_attn.q_norm.weight"])
            keys = norm(project("k", both).view(-1, SHARED, DIM), own["self_attn.k_norm.weight"])
            queries, keys = rotate(queries, cos[length:], sin[length:]), rotate(keys, cos, sin)
            values = project("v", both).view(-1, SHARED, DIM).repeat_interleave(HEADS // SHARED, 1)
            scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(HEADS // SHARED, 1)) * DIM**-0.5
            weights = softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
            return project("o", torch.einsum("hqk,khd->qhd", weights, values).flatten(1))

        def mlp(states: Tensor, own: Tensors = own) -> Tensor:
            inner = silu(states @ own["mlp.gate_proj.weight"].T) * (states @ own["mlp.up_proj.weight"].T)
            return inner @ own["mlp.down_proj.weight"].T

        x = x + wrap(own, "attention_conv", norm(x, own["input_layernorm.weight"]), attend)
        x = x + wrap(own, "mlp_conv", norm(x, own["post_attention_layernorm.weight"]), mlp)
    return norm(x, tensors["norm.weight"])


def read(tensors: Tensors, embeddings: Tensor) -> Tensor:
    """The state ``[G]`` of a GRU without biases that has read ``embeddings [n, H]``."""
    state = torch.zeros(STATE)
    for embedding in embeddings:
        inputs = (tensors["prefix_gru.weight_ih_l0"] @ embedding).chunk(3)
        own = (tensors["prefix_gru.weight_hh_l0"] @ state).chunk(3)
        reset, keep = torch.sigmoid(inputs[0] + own[0]), torch.sigmoid(inputs[1] + own[1])
        state = (1 - keep) * torch.tanh(inputs[2] + reset * own[2]) + keep * state
    return state


def walk_domino(pair: Pair, tensors: Tensors, states: Tensor, logits: Tensor, anchor: int) -> list[int]:
    tokens = [anchor]
    for position, (state, row) in enumerate(zip(states, logits, strict=True)):
        read_so_far = read(tensors, pair.hf.get_input_embeddings()(torch.tensor(tokens)))
        inner = silu(tensors["embed_proj.0.weight"] @ torch.cat([state, read_so_far]))
        tokens.append(int((row + (position >= 1) * (tensors["embed_proj.2.weight"] @ inner)).argmax()))
    return tokens[1:]


def choose(kind: str, tensors: Tensors, states: Tensor, logits: Tensor, anchor: int) -> list[int]:
    tokens = [anchor]
    for state, row in zip(states, logits, strict=True):
        if "dflash2" in kind:
            best = row.topk(CANDIDATES)
            gate = tensors["candidate_selector.hidden_projection.weight"] @ state
            before = tensors["candidate_selector.predecessor_codebook"][tokens[-1]] * gate
            scores = best.values + tensors["candidate_selector.successor_codebook"][best.indices] @ before
            tokens.append(int(best.indices[scores.argmax()]))
        else:
            tokens.append(int(row.argmax()))
    return tokens[1:]


CAUSAL = {"causal": (True, True), "is_causal": (True, True), "causal sliding layers": (True, False)}


def slow_draft(pair: Pair, kind: str, tensors: Tensors, text: Sequence[int], positions: int) -> list[int]:
    """So many tokens after ``text``, whose last token is the anchor."""
    config = parse_config(CONFIGS[kind])
    hidden = pair.hf(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    taps = torch.cat([hidden[layer + 1][0] for layer in (0, 2)], dim=-1)
    masks, first = (positions - 1, 0) if kind == "domino, shifted" else (positions, 1)
    embeddings = pair.hf.get_input_embeddings()(torch.tensor([text[-1]] + [3] * masks))
    states = slow_states(config, CAUSAL.get(kind, (False, False)), tensors, taps, embeddings)[first:]
    logits = pair.hf.get_output_embeddings()(states)
    if "domino" in kind:
        return walk_domino(pair, tensors, states, logits, text[-1])
    return choose(kind, tensors, states, logits, text[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_drafts_are_those_of_the_definition(pair: Pair, tmp_path: Path, kind: str) -> None:
    tensors, prompt = write(tmp_path, kind), [7, 9, 30, 2, 11, 4, 8, 25, 1, 40]
    drafter = Drafter.from_pretrained(tmp_path, torch.float32)
    found, answer = drafts_of(Engine(pair.target, drafter, policy="fixed:6"), prompt)
    assert answer == greedy(pair.hf, prompt, LENGTH)
    for text, draft, _ in found:
        assert draft == slow_draft(pair, kind, tensors, text, len(draft))
    assert len(found) > 5
    assert max(len(draft) for _, draft, _ in found) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("dflash2", "layers.1.mlp_conv.base_kernel"),
        ("dflash2", "candidate_selector.successor_codebook"),
        ("domino", "prefix_gru.weight_hh_l0"),
        ("domino, shifted", "embed_proj.2.weight"),
        *(("biased", f"layers.1.self_attn.{name}_proj.bias") for name in "qkvo"),
        ("causal", "causal"),
    ],
)
@torch.no_grad()
def test_a_reference_without_a_part_is_seen(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, part: str
) -> None:
    tensors = dict(write(tmp_path, kind))
    drafter = Drafter.from_pretrained(tmp_path, torch.float32)
    found, _ = drafts_of(Engine(pair.target, drafter, policy="fixed:6"), [7, 9, 30, 2, 11, 4, 8, 25, 1, 40])
    if part in tensors:
        tensors[part] = torch.zeros_like(tensors[part])
    else:
        monkeypatch.delitem(CAUSAL, part)
    assert any(draft != slow_draft(pair, kind, tensors, text, len(draft)) for text, draft, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("options", [{}, {"tree_nodes": 9}, {"draft_window": 12, "max_running": 2}])
def test_greedy_answers_are_the_targets(pair: Pair, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    write(tmp_path, kind)
    drafter = Drafter.from_pretrained(tmp_path, torch.float32)
    if kind in ("domino", "domino, shifted") and "tree_nodes" in options:
        with pytest.raises(
            ConfigError, match="grows no tree: its head has a state, or it is of EAGLE-3 with a window; use None"
        ):
            Engine(pair.target, drafter, **options)
        return
    check_drafter(pair, drafter, **options)
