"""Causal LMs that fill masks, too: canvases anywhere behind causal text, the config that says so, pages shared by all modes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests import tiny
from tests.conftest import TinyPair
from tests.procedures.test_denoising import masked_model
from volley import DiffusionParams, Engine, SamplingParams
from volley.errors import CheckpointError
from volley.files import BUNDLED_TARGETS
from volley.models.targets.diffusion import load_target
from volley.models.targets.families import JOINT
from volley.models.targets.target import Target

MASK = tiny.VOCAB - 1
TEXT_ENDS: Callable[[int], int] = int
PROMPTS = [[7, 3], [1, 2, 3, 4], list(range(10, 21)), [5] * 16]


def dense_logits(hf: PreTrainedModel, text: list[int], canvas: Tensor) -> Tensor:
    """Logits ``[L, V]`` of a canvas that sees itself and all the text, which is causal."""
    tokens = torch.cat([torch.tensor(text), canvas])
    places = torch.arange(len(tokens))
    visible = (places[:, None] >= places) | (places[:, None] >= TEXT_ENDS(len(text)))
    mask = torch.where(visible, 0.0, -torch.inf)[None, None]
    with torch.inference_mode():
        return hf(input_ids=tokens[None], attention_mask=mask).logits[0, len(text) :].float()


def dense_answer(hf: PreTrainedModel, prompt: list[int], own: DiffusionParams, count: int) -> tuple[list[int], int]:
    """Greedy tokens by a loop without a cache, and its passes."""
    assert own.canvas_length is not None
    assert own.threshold is not None
    text, passes = list(prompt), 0
    while len(text) < len(prompt) + count:
        canvas = torch.full((own.canvas_length,), MASK)
        while bool((masked := canvas == MASK).any()):
            logits = dense_logits(hf, text, canvas).clone()
            logits[:, MASK] = -torch.inf
            sure, best = logits.softmax(-1).max(-1)
            chosen = masked & (sure > own.threshold)
            chosen[sure.masked_fill(~masked, 0).argmax()] = True
            canvas = torch.where(chosen, best, canvas)
            passes += 1
        text += canvas.tolist()
    return text[len(prompt) :][:count], passes


@pytest.mark.parametrize("length", [4, 5])
@pytest.mark.parametrize("threshold", [0.15, 0.9])
def test_canvases_are_those_of_a_dense_loop(length: int, threshold: float) -> None:
    model = masked_model(JOINT)
    own = DiffusionParams(canvas_length=length, threshold=threshold)
    engine = Engine(model.target, page_size=4)
    results = list(engine.generate(PROMPTS, SamplingParams(max_tokens=3 * length, diffusion=own)))
    for prompt, result in zip(PROMPTS, results, strict=True):
        tokens, passes = dense_answer(model.hf, prompt, own, 3 * length)
        assert (result.token_ids, result.stats.denoising_steps) == (tokens, passes)


@pytest.mark.parametrize("planted", ["the canvas is causal", "the text sees the canvas"])
def test_the_dense_loop_tells_other_masks(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = masked_model(JOINT)
    own = DiffusionParams(canvas_length=4, threshold=0.15)
    results = Engine(model.target, page_size=4).generate(PROMPTS, SamplingParams(max_tokens=13, diffusion=own))
    split = 10**6 if planted == "the canvas is causal" else 0
    monkeypatch.setitem(globals(), "TEXT_ENDS", lambda _: split)
    dense = [dense_answer(model.hf, prompt, own, 13)[0] for prompt in PROMPTS]
    assert [result.token_ids for result in results] != dense


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_modes_share_pages_and_two_have_the_same_answers(temperature: float) -> None:
    engine = Engine(masked_model(JOINT).target, page_size=4)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=12)
    answers: dict[str, list[list[int]]] = {}
    for mode in ("autoregressive", "self", "diffusion"):
        own = DiffusionParams.from_mapping({"mode": mode})
        results = list(engine.generate(PROMPTS, replace(params, diffusion=own)))
        answers[mode] = [result.token_ids for result in results]
        assert mode == "autoregressive" or all(result.stats.cached_tokens >= 8 for result in results[2:])
    assert answers["autoregressive"] == answers["self"]
    engine.check_integrity()


def test_a_canvas_needs_no_logits_of_its_prompt_and_the_next_token_does() -> None:
    engine, prompt, params = (
        Engine(masked_model(JOINT).target, page_size=8),
        [*range(40)],
        SamplingParams(max_tokens=12),
    )
    first, again = (next(engine.generate([prompt], params)) for _ in range(2))
    assert (first.stats.cached_tokens, again.stats.cached_tokens) == (0, 40)
    assert again.token_ids == first.token_ids
    for mode in ("autoregressive", "self"):
        own = DiffusionParams.from_mapping({"mode": mode})
        assert next(engine.generate([prompt], replace(params, diffusion=own))).stats.cached_tokens == 32


def with_config(pair: TinyPair, folder: Path, own: Any) -> Path:
    shutil.copytree(pair.target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "block_diffusion": own}))
    return folder


def test_the_config_makes_a_causal_lm_a_diffusion_model(tiny_pair: TinyPair, tmp_path: Path) -> None:
    folder = with_config(tiny_pair, tmp_path / "model", {"mask_token_id": 4, "canvas_length": 6, "threshold": 0.7})
    target = load_target(folder, torch.float32, "cpu")
    assert target.diffusion is not None
    assert (target.diffusion.mask_token_id, target.diffusion.has_causal_context) == (4, True)
    assert (target.diffusion.settings.canvas_length, target.diffusion.settings.threshold) == (6, 0.7)
    (result,) = Engine(target).generate([[5, 6, 7]], SamplingParams(max_tokens=9))
    assert (len(result.token_ids), result.stats.canvases) == (9, 2)
    assert 4 not in result.token_ids


def test_a_bundled_model_has_a_name(tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_config(tiny_pair, tmp_path / "model", {"mask_token_id": 4})
    monkeypatch.setitem(BUNDLED_TARGETS, "reference-diffusion", folder)
    engine = Engine.from_pretrained("reference-diffusion", dtype=torch.float32)
    assert engine.target.diffusion is not None
    assert engine.target.diffusion.mask_token_id == 4
    plain = Target.from_pretrained("reference-diffusion", torch.float32)
    assert torch.equal(plain.embed(torch.arange(9)), engine.target.embed(torch.arange(9)))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, "mask_token_id"),
        ({"mask_token_id": 10**6}, "a token of the model"),
        (8, "must be an object"),
        ({"mask_token_id": 4, "canvas_lenght": 8}, "canvas_length"),
    ],
)
def test_a_wrong_config_says_what_it_must_be(tiny_pair: TinyPair, tmp_path: Path, own: Any, said: str) -> None:
    folder = with_config(tiny_pair, tmp_path / "model", own)
    with pytest.raises(CheckpointError, match=said):
        load_target(folder, torch.float32, "cpu")
