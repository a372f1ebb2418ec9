"""The drafter against a slow implementation of its definition (DFlash §4), through the engine's own draft path."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from tests.costs import settle
from tests.tiny import Pair, block_proposer, greedy, make_pair, random_drafter, random_prompts, teach
from volley import Engine, SamplingParams
from volley.decode.work import Works
from volley.engine import engine as engine_module
from volley.errors import MismatchError
from volley.models.diagnosis import diagnose
from volley.models.drafters.draft_model import bundled_drafter, check_pair
from volley.models.drafters.drafter import Drafter
from volley.proposers.block import BlockProposer


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """``x [T, heads, d]`` turned by its absolute positions, dimension i with i + d/2."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** -(torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def slow_draft(drafter: Drafter, features: Tensor, embeddings: Tensor, window: int | None, head: Tensor) -> Tensor:
    """Slot logits ``[B - 1, V]`` in fp64 from features ``[a, taps · H]`` of all positions before the anchor and the
    block's embeddings ``[B, H]``: context and block K/V are computed anew and concatenated, nothing is cached."""
    config = drafter.config
    w = {name: weight.double() for name, weight in drafter.state_dict().items()}
    eps, dim, groups = config.rms_norm_eps, config.head_dim, config.num_attention_heads // config.num_key_value_heads
    anchor, size = len(features), len(embeddings)
    context = rms_norm(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    hidden = embeddings.double()
    everywhere = torch.arange(anchor + size)
    for i in range(config.num_hidden_layers):
        own = {k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        normed = rms_norm(hidden, own["input_layernorm.weight"], eps)
        source = torch.cat([context, normed])
        q = (normed @ own["self_attn.q_proj.weight"].T).unflatten(-1, (-1, dim))
        k = (source @ own["self_attn.k_proj.weight"].T).unflatten(-1, (-1, dim))
        v = (source @ own["self_attn.v_proj.weight"].T).unflatten(-1, (-1, dim))
        q = rope(rms_norm(q, own["self_attn.q_norm.weight"], eps), everywhere[anchor:], config.rope_theta)
        k = rope(rms_norm(k, own["self_attn.k_norm.weight"], eps), everywhere, config.rope_theta)
        windows = [window, config.sliding_window if config.layer_types[i] == "sliding_attention" else None]
        first = max([anchor - x for x in windows if x is not None] + [0])
        k, v = (x[first:].repeat_interleave(groups, dim=1) for x in (k, v))
        weights = (torch.einsum("qhd,khd->hqk", q, k) / dim**0.5).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        hidden = hidden + mixed @ own["self_attn.o_proj.weight"].T
        normed = rms_norm(hidden, own["post_attention_layernorm.weight"], eps)
        gate, up = (normed @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (gate * gate.sigmoid() * up) @ own["mlp.down_proj.weight"].T
    return rms_norm(hidden, w["norm.weight"], eps)[1:] @ head.double().T


@dataclass
class Draft:
    """One draft pass of one request as the engine made it."""

    context: list[int]
    """Tokens before the anchor."""
    block: list[int]
    logits: Tensor


def record(engine: Engine) -> list[Draft]:
    drafts: list[Draft] = []
    inner = block_proposer(engine)

    class Recorded(BlockProposer):
        def position_logits(self, works: Works, blocks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            logits, hidden = inner.position_logits(works, blocks)
            row = 0
            for work, block in zip(works, blocks, strict=True):
                context, rows = work.request.token_ids[: work.request.computed], logits[row : row + work.spec.positions]
                drafts.append(Draft(context, block.tolist(), rows))
                row += work.spec.positions
            return logits, hidden

    engine.core.proposer = Recorded(inner.model, inner.config)
    return drafts


@torch.inference_mode()
def check(pair: Pair, drafter: Drafter, drafts: Sequence[Draft], window: int | None = None) -> None:
    table = pair.target.embed(torch.arange(pair.target.vocab_size))
    for draft in drafts:
        output = pair.hf(input_ids=torch.tensor([draft.context]), output_hidden_states=True, use_cache=False)
        features = torch.cat([output.hidden_states[i + 1][0] for i in drafter.config.target_layer_ids], dim=-1)
        expected = slow_draft(drafter, features, table[draft.block], window, pair.target.model.lm_head.weight)
        worst = (draft.logits - expected).abs().max() / expected.abs().max()
        assert worst < 1e-4, (len(draft.context), float(worst))


PROMPTS = random_prompts(4, longest=25, seed=3)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "chunks": ({}, {"max_batch_tokens": 9}),
    "taps of the embedding": ({"target_layer_ids": (-1, 1)}, {}),
    "no target features": ({"target_layer_ids": (-1,)}, {}),
    "one head each": ({"num_key_value_heads": 4, "num_hidden_layers": 1, "rope_theta": 1e6}, {}),
    "sliding layer": ({"sliding_window": 5, "layer_types": ("full_attention", "sliding_attention")}, {}),
    "draft window": ({}, {"draft_window": 7}),
    "draft window, wide chunks": ({}, {"draft_window": 2, "page_size": 2}),
    "window in window": (
        {"sliding_window": 5, "layer_types": ("full_attention", "sliding_attention")},
        {"draft_window": 9, "max_batch_tokens": 7},
    ),
    "several steps": ({}, {"denoising_steps": 3}),
    "forced preemption": ({}, {"num_pages": 12}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_drafting_through_the_pool_equals_recomputing_from_scratch(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K/V injection over several cycles, accepted and rejected drafts, batches, windows and a second, cached run."""
    settle(monkeypatch, token=0.01)
    changes, options = CASES[name]
    drafter = random_drafter(5, **changes)
    engine = Engine(pair.target, drafter, **{"page_size": 4, "num_pages": 80, **options})
    drafts = record(engine)  # beneath the teacher: what the drafter really says
    teach(engine, {tuple(prompt): greedy(pair.hf, prompt, 14) for prompt in PROMPTS})
    results = []
    for _ in range(2):
        results += list(engine.generate(PROMPTS, SamplingParams(max_tokens=14)))
    assert len(drafts) > 20
    assert max(length for result in results for length in result.stats.accepted_lengths) > 3
    assert sum(result.stats.cached_tokens for result in results) > 0 or name.startswith(("draft", "window", "forced"))
    if name == "forced preemption":
        assert sum(result.stats.preemptions for result in results) > 0
    check(pair, drafter, drafts, options.get("draft_window"))


@pytest.mark.slow
def test_the_mask_token_fills_the_block(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter)
    drafts = record(engine)
    next(iter(engine.generate([5, 6, 7], SamplingParams(max_tokens=8))))
    assert drafts[0].context == [5, 6, 7]
    assert drafts[0].block[1:] == [3] * 5


def test_rope_frequencies_stay_fp32() -> None:
    drafter = random_drafter().to(torch.bfloat16)
    assert drafter.rotary.source.inv_freq.dtype == torch.float32
    positions = torch.tensor([30_000])
    cos, sin = drafter.rotary(positions, torch.bfloat16)
    expected = random_drafter().rotary(positions, torch.float32)
    torch.testing.assert_close(cos.float(), expected[0], atol=4e-3, rtol=0)
    torch.testing.assert_close(sin.float(), expected[1], atol=4e-3, rtol=0)
    assert cos.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 51}, "whose vocabulary is 51, this target's is 50"),
        ({"hidden_size": 40}, "whose hidden size is 40, this target's is 32"),
        ({"num_target_layers": 5}, "whose number of target layers is 5, this target's is 4; .* `volley train`"),
    ],
)
def test_a_drafter_of_another_target_is_refused(pair: Pair, changes: dict[str, int], message: str) -> None:
    drafter = random_drafter(**changes)
    with pytest.raises(MismatchError, match=message):
        check_pair(drafter, pair.target)
    with pytest.raises(MismatchError, match=message):
        Engine(pair.target, drafter)


@pytest.mark.slow
def test_a_target_may_reach_further_than_its_drafter(pair: Pair) -> None:
    drafter = random_drafter(2, max_position_embeddings=16)
    drafter.rotary(torch.arange(8), torch.float32)  # tables of the shorter length may exist already
    engine = Engine(pair.target, drafter, num_pages=10)
    drafts = record(engine)
    (result,) = engine.generate([1, 2, 3], SamplingParams(max_tokens=60))
    assert result.token_ids == greedy(pair.hf, [1, 2, 3], 60)
    check(pair, drafter, drafts[-3:])


@pytest.mark.slow
def test_tables_that_a_graph_may_read_stay_when_longer_ones_are_made(pair: Pair) -> None:
    rotary, positions = pair.drafter.rotary, torch.arange(4)
    rotary(positions, torch.float32)
    (tables,) = rotary._tables.values()
    kept = weakref.ref(tables[0])
    del tables
    rotary.cover(rotary.length + 5)
    gc.collect()
    assert kept() is not None
    assert len(rotary(torch.tensor([rotary.length - 1]), torch.float32)[0]) == 1


@pytest.mark.slow
def test_bf16_pairs_draft_too() -> None:
    target, drafter, _ = make_pair(9)
    target.model.bfloat16()
    engine = Engine.from_pretrained(target, drafter)
    (result,) = engine.generate([1, 2, 3], SamplingParams(max_tokens=12))
    assert len(result.token_ids) == 12
    assert block_proposer(engine).model.store.keys[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "name"),
    [((576, 30, 49_152), "smollm2-135m"), ((576, 29, 49_152), None), ((896, 24, 151_936), "qwen2.5-coder-0.5b")],
)
def test_a_target_of_a_published_shape_has_a_bundled_drafter(
    tmp_path: Path, shape: tuple[int, int, int], name: str | None
) -> None:
    sizes = dict(zip(("hidden_size", "num_hidden_layers", "vocab_size"), shape, strict=True))
    LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert bundled_drafter(tmp_path) == name
    said = diagnose(tmp_path).facts["drafts by default"]
    assert said == (f"the bundled drafter {name}" if name else "prompt lookup")


@pytest.mark.parametrize("given", [{}, {"policy": "plain"}, {"block_size": 1}, {"drafter": None}])
def test_the_bundled_drafter_drafts_unless_nothing_shall(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(engine_module, "bundled_drafter", lambda _: "its own")
    monkeypatch.setattr(engine_module, "load_drafter", lambda path, *_, **__: loaded.append(path) or pair.drafter)
    engine = Engine.from_pretrained(pair.target, **given)
    assert loaded == ([] if given else ["its own"])
    assert (engine.drafter is None) == bool(given)
