"""DiffusionGemma against transformers' own generate: every canvas, best, number of passes and token."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion, LogitsProcessor, LogitsProcessorList

from tests.conftest import byte_tokenizer
from tests.diffusion_gemma import (
    CANVAS,
    VOCAB,
    WINDOW,
    TorchNoise,
    by_transformers,
    by_volley,
    in_fp64,
    logits_of,
    made_up,
    random_model,
    same,
    settings,
)
from tests.memory.reference import reference_attention
from tests.tiny import random_drafter
from volley import DiffusionParams, Engine, SamplingParams
from volley.decode.sampling import scores_of
from volley.errors import InputError, MismatchError
from volley.memory.attention import paged_attention, visible_mask
from volley.memory.batch import Segment
from volley.memory.kv_cache import BlockTable
from volley.models.targets.diffusion_gemma import DiffusionGemma
from volley.procedures import denoising


@pytest.fixture(scope="module")
def hf() -> DiffusionGemmaForBlockDiffusion:
    """Norms undo a scale: only from the third layer on do K/V depend on the scalars of what is read."""
    return in_fp64(random_model(num_layers=3))


@pytest.fixture(scope="module")
def target(hf: DiffusionGemmaForBlockDiffusion) -> DiffusionGemma:
    return DiffusionGemma(copy.deepcopy(hf))


@pytest.mark.slow
@pytest.mark.parametrize(("length", "page_size"), [(3, 1), (8, 4), (32, 16), (33, 4)])
@pytest.mark.parametrize("stability", [0, 1, 2])
def test_step_by_step_as_transformers(
    hf: DiffusionGemmaForBlockDiffusion, target: DiffusionGemma, length: int, page_size: int, stability: int
) -> None:
    """Contexts shorter than the window, equal to it, and four times as long; three canvases; 20 seeds by its own rule."""
    params, options = settings(stability_threshold=stability)
    engine = Engine(target, page_size=page_size, prefix_caching=False)
    for seed in range(length, length + (500 if stability == 1 else 200), 100):
        compare(hf, engine, length, seed, params, options)


def prompt_of(length: int, seed: int) -> list[int]:
    torch.manual_seed(seed)
    tokens: list[int] = torch.randint(VOCAB, (length,)).tolist()
    return tokens


def compare(
    hf: DiffusionGemmaForBlockDiffusion,
    engine: Engine,
    length: int,
    seed: int,
    params: SamplingParams,
    options: dict[str, Any],
) -> int:
    """Passes of the answer, which must be the same."""
    prompt = prompt_of(length, seed)
    theirs = by_transformers(hf, prompt, 3, seed, **options)
    mine, request = by_volley(engine, prompt, params, seed)
    assert same(mine, theirs)
    assert request.stats.denoising_steps == len(theirs.bests)
    assert request.stats.tokens_per_forward == pytest.approx(theirs.tokens_per_forward)
    engine.check_integrity()
    return len(theirs.bests)


@pytest.mark.slow
def test_canvases_settle_after_as_many_passes_as_in_transformers() -> None:
    hf = random_model(is_sharp=True)
    engine = Engine(DiffusionGemma(copy.deepcopy(hf)), page_size=4)
    params, options = settings(stability_threshold=0)
    passes = {compare(hf, engine, 5 + 3 * seed, seed, params, options) for seed in range(6)}
    assert len(passes) > 2
    assert max(passes) < 18, "canvases end before the last step"


class SkipsTheFirstNorm(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, embeddings: Tensor, signal: Tensor) -> Tensor:
        mixed: Tensor = self.inner(embeddings, signal) if bool(signal.any()) else embeddings
        return mixed


def read_with_the_decoders(model: DiffusionGemmaForBlockDiffusion) -> None:
    for reads, denoises in zip(model.model.encoder.language_model.layers, model.model.decoder.layers, strict=True):
        reads.layer_scalar = denoises.layer_scalar.clone()


def denoise_with_the_encoders(model: DiffusionGemmaForBlockDiffusion) -> None:
    for reads, denoises in zip(model.model.encoder.language_model.layers, model.model.decoder.layers, strict=True):
        denoises.layer_scalar = reads.layer_scalar.clone()


def widen_window(model: DiffusionGemmaForBlockDiffusion) -> None:
    model.model.encoder.language_model.layers[0].self_attn.sliding_window += 1


def skip_first_norm(model: DiffusionGemmaForBlockDiffusion) -> None:
    model.model.decoder.self_conditioning = SkipsTheFirstNorm(model.model.decoder.self_conditioning)


def forget_feedback(model: DiffusionGemmaForBlockDiffusion) -> None:
    model.model.decoder.embed_tokens.embed_scale.zero_()


FAULTS = [read_with_the_decoders, denoise_with_the_encoders, widen_window, skip_first_norm, forget_feedback]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    hf: DiffusionGemmaForBlockDiffusion, fault: Callable[[DiffusionGemmaForBlockDiffusion], None]
) -> None:
    model = copy.deepcopy(hf)
    fault(model)
    params, options = settings()
    torch.manual_seed(0)
    prompt = torch.randint(VOCAB, (20,)).tolist()
    theirs = by_transformers(hf, prompt, 2, 0, **options)
    mine, _ = by_volley(Engine(DiffusionGemma(model)), prompt, replace(params, max_tokens=2 * CANVAS), 0)
    assert not same(mine, theirs)


def test_engines_in_several_threads_may_share_a_target(target: DiffusionGemma) -> None:
    """Layers hold the scalars of one pass."""
    params, _ = settings()
    params = replace(params, max_tokens=CANVAS, seed=1)
    prompts = [[prompt_of(size, seed) for seed in range(4)] for size in (5, 20)]
    alone = [[result.token_ids for result in Engine(target).generate(some, params)] for some in prompts]

    def answers(some: list[list[int]]) -> list[list[list[int]]]:
        engine = Engine(target, prefix_caching=False)
        return [[result.token_ids for result in engine.generate(some, params)] for _ in range(4)]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(answers, prompts))
    assert found == [[own] * 4 for own in alone]


def test_one_pass_gives_the_logits_of_encoder_and_decoder(
    hf: DiffusionGemmaForBlockDiffusion, target: DiffusionGemma
) -> None:
    """A canvas rides along behind its prompt; transformers reads, then denoises."""
    prompt, canvas, last = made_up(21)
    with torch.inference_mode():
        theirs = hf(prompt[None], decoder_input_ids=canvas[None], self_conditioning_logits=last[None]).logits[0]
    torch.testing.assert_close(one_pass(target), theirs, atol=1e-5, rtol=1e-5)


def one_pass(target: DiffusionGemma) -> Tensor:
    return logits_of(target, *made_up(21))


def dense_mask(length: int, canvas: int, window: int) -> Tensor:
    """Return the masks of vLLM's account: a causal band of ``window`` keys, and ``2 · window + 1`` keys around a canvas's."""
    end = length + canvas
    rows = [
        [(j <= i and i - j < window) if i < length else abs(i - j) <= window for j in range(end)] for i in range(end)
    ]
    return torch.tensor(rows)


def test_a_symmetric_window_is_a_setting_of_the_family(target: DiffusionGemma, tmp_path: Path) -> None:
    """Its masks are the dense ones, layers with a window alone have them, and answers differ from transformers' windows."""
    segment = Segment(BlockTable(4), 0, 20 + CANVAS, groups=(*[1] * 20, CANVAS))
    assert torch.equal(visible_mask(segment, WINDOW, 0, symmetric=True), dense_mask(20, CANVAS, WINDOW))
    assert target.diffusion is not None
    symmetric = DiffusionGemma(target.model)
    symmetric.diffusion = replace(target.diffusion, symmetric_window=True)
    seen: list[tuple[int | None, bool]] = []

    def watched(*arguments: Any) -> Tensor:
        seen.append((arguments[-1].window, arguments[-1].symmetric))
        return paged_attention(*arguments)

    symmetric.attention = watched
    paged = one_pass(symmetric)
    assert set(seen) == {(WINDOW, True), (None, True)}
    symmetric.attention = reference_attention
    torch.testing.assert_close(paged, one_pass(symmetric), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(paged, one_pass(target), atol=1e-3)


def test_an_end_token_ends_the_answer_inside_a_canvas(
    hf: DiffusionGemmaForBlockDiffusion, target: DiffusionGemma
) -> None:
    params, options = settings()
    prompt = [5, 6, 7, 8]
    theirs = by_transformers(hf, prompt, 3, 4, **options)
    stop = theirs.answer[CANVAS + 5]
    cut = theirs.answer.index(stop) + 1
    mine, request = by_volley(Engine(target), prompt, replace(params, stop_token_ids=(stop,)), 4)
    assert (mine.answer, request.finish_reason) == (theirs.answer[:cut], "stop")
    mine, request = by_volley(Engine(target), prompt, replace(params, max_tokens=21), 4)
    assert (mine.answer, request.finish_reason) == (theirs.answer[:21], "length")


def test_an_end_token_ends_the_answer_where_it_does_in_transformers(
    hf: DiffusionGemmaForBlockDiffusion, target: DiffusionGemma
) -> None:
    params, options = settings()
    prompt = [5, 6, 7, 8]
    stop = by_transformers(hf, prompt, 3, 4, **options).answer[CANVAS + 5]
    theirs = by_transformers(hf, prompt, 3, 4, eos_token_id=stop, pad_token_id=0, **options)
    mine, request = by_volley(Engine(target), prompt, replace(params, stop_token_ids=(stop,)), 4)
    end = len(mine.answer)
    assert mine.answer == theirs.answer[:end]
    assert set(theirs.answer[end:]) == {0}, "padding"
    assert request.stats.denoising_steps == len(theirs.bests) < 18
    assert request.stats.tokens_per_forward == pytest.approx(theirs.tokens_per_forward)
    assert request.stats.tokens_per_pass == request.stats.tokens_per_forward, "commits rode along"


def test_a_schedule_may_end_at_zero(hf: DiffusionGemmaForBlockDiffusion) -> None:
    model = copy.deepcopy(hf)
    model.generation_config.t_min = 0.0
    target = DiffusionGemma(model)
    assert target.diffusion is not None
    assert target.diffusion.defaults.t_min == 0
    params, options = settings(t_min=0.0)
    compare(hf, Engine(target), 7, 2, params, options)


# -- what the usual parameters do --------------------------------------------------------------------------------------


def answer(target: DiffusionGemma, prompt: list[int], **own: Any) -> list[int]:
    params = replace(settings()[0], **{"seed": 3, "max_tokens": 2 * CANVAS, **own})
    (result,) = Engine(target, prefix_caching=False).generate([prompt], params)
    return result.token_ids


class Biased(LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        changed = scores.clone()
        changed[..., 7] += 20.0
        changed[..., 11] -= 100.0
        return changed


def test_a_bias_is_that_of_a_processor_of_transformers(
    hf: DiffusionGemmaForBlockDiffusion, target: DiffusionGemma
) -> None:
    params, options = settings()
    theirs = by_transformers(hf, [5, 6, 7], 3, 1, logits_processor=LogitsProcessorList([Biased()]), **options)
    mine, _ = by_volley(Engine(target), [5, 6, 7], replace(params, logit_bias=((7, 20.0), (11, -100.0))), 1)
    assert same(mine, theirs)
    assert not same(mine, by_transformers(hf, [5, 6, 7], 3, 1, **options))


def test_penalties_are_of_the_canvases_before(target: DiffusionGemma) -> None:
    """The second canvas is that of a request whose prompt has the first one, under biases that say the same."""
    first, second = (answer(target, [5, 6, 7], presence_penalty=2.0)[place:][:CANVAS] for place in (0, CANVAS))
    bias = tuple((token, -2.0) for token in set(first))
    assert second == answer(target, [5, 6, 7, *first], max_tokens=CANVAS, logit_bias=bias)
    assert second != answer(target, [5, 6, 7, *first], max_tokens=CANVAS)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_truncation_is_of_the_candidates(target: DiffusionGemma, narrow: dict[str, Any]) -> None:
    """If one candidate is left it is the best, as at temperature 0."""
    best = answer(target, [5, 6, 7], temperature=0.0)
    assert answer(target, [5, 6, 7], **narrow) == best != answer(target, [5, 6, 7])


def test_log_probabilities_are_computed_once_a_canvas(target: DiffusionGemma, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the unmodified logits of its last pass."""
    engine, last, asked = Engine(target), list[Tensor](), list[int]()
    whole: Any = engine.procedures.by_mode["diffusion"]
    denoise = whole.denoise

    def seen(canvases: Any) -> None:
        (request, rows), *_ = canvases
        before = request.canvas
        denoise(canvases)
        if before.done:
            last.append(rows.log_softmax(dim=-1))

    def counted(rows: Tensor, *rest: Any) -> Any:
        asked.append(len(rows))
        return scores_of(rows, *rest)

    monkeypatch.setattr(whole, "denoise", seen)
    monkeypatch.setattr(denoising, "scores_of", counted)
    params = replace(settings()[0], seed=3, logprobs=True, top_logprobs=2, logit_bias=((7, 5.0),), top_k=20)
    (result,) = engine.generate([[5, 6, 7]], params)
    assert asked == [CANVAS] * 3
    rows = torch.cat(last)
    expected = rows[torch.arange(3 * CANVAS), torch.tensor(result.token_ids)]
    torch.testing.assert_close(torch.tensor(result.logprobs), expected)
    assert result.top_logprobs is not None
    assert [pairs[0][0] for pairs in result.top_logprobs] == rows.argmax(dim=-1).tolist()


def test_streamed_drafts_are_the_bests_of_transformers(
    hf: DiffusionGemmaForBlockDiffusion, target: DiffusionGemma
) -> None:
    params, options = settings()
    theirs = by_transformers(hf, [1, 2, 3], 3, 0, **options)
    assert params.diffusion is not None
    own = replace(params, diffusion=replace(params.diffusion, stream_drafts=True))
    drafts: list[list[int | None]] = []
    engine = Engine(target)
    request = engine.add_request([1, 2, 3], own)
    request.noise = TorchNoise()
    torch.manual_seed(0)
    while request.finish_reason is None:
        engine.step()
        drafts += [chunk.draft.token_ids for chunk in request.take_chunks() if chunk.draft is not None]
    bests, expected = iter(theirs.bests), list[list[int]]()
    for passes in request.stats.canvas_steps:
        shown = [next(bests) for _ in range(passes)][:-1]  # what a canvas became is text at once
        expected += [best for best, before in zip(shown, [None, *shown], strict=False) if best != before]
    assert len(request.stats.canvas_steps) == 3
    assert drafts == expected


def test_a_folder_is_recognised(hf: DiffusionGemmaForBlockDiffusion, tmp_path: Path) -> None:
    hf.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, dtype=torch.float32)
    assert isinstance(engine.target, DiffusionGemma)
    own = DiffusionParams(max_steps=6)  # in more passes the last bits of fp32 would decide
    params = SamplingParams(max_tokens=5, seed=1, temperature=1.0, ignore_eos=True, diffusion=own)
    (result,) = engine.generate([[1, 2, 3]], params)
    (again,) = Engine(DiffusionGemma(copy.deepcopy(hf))).generate([[1, 2, 3]], params)
    assert result.token_ids == again.token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_has_the_logits_of_transformers(
    hf: DiffusionGemmaForBlockDiffusion, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Norms, and in bf16 projections, are kernels then, and what only one of its modes or images need is gone."""
    plain = copy.deepcopy(hf).to(dtype)
    plain.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = DiffusionGemma.from_folder(tmp_path, dtype, "cpu")
    encoder = loaded.model.model.encoder
    assert encoder.vision_tower is None
    mine, theirs = (one_pass(target) for target in (loaded, DiffusionGemma(plain)))
    if dtype == torch.float32:
        torch.testing.assert_close(mine, theirs, atol=5e-5, rtol=1e-5)
        return
    layer = encoder.language_model.layers[0]
    assert all("forward" in vars(part) for part in (layer.self_attn.q_proj, layer.mlp.up_proj, layer.self_attn.v_norm))
    assert 0 < (mine - theirs).norm() < 2**-4 * theirs.norm()


def test_rotary_embeddings_that_depend_on_other_positions_are_computed_in_each_pass(
    hf: DiffusionGemmaForBlockDiffusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others are looked up, so the model computes them once for each length of its table."""
    model = copy.deepcopy(hf)
    rotary, asked = model.model.encoder.language_model.rotary_emb, list[int]()
    compute = rotary.forward

    def counted(states: Tensor, positions: Tensor, kind: str) -> Any:
        asked.append(positions.numel())
        return compute(states, positions, kind)

    monkeypatch.setattr(rotary, "forward", counted)
    for by_length in (False, True):
        if by_length:
            model.config.text_config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
        target = DiffusionGemma(model)
        asked.clear()
        found = [one_pass(target) for _ in range(3)]
        assert len(asked) == (6 if by_length else 2), "two kinds of layers"
        torch.testing.assert_close(found[-1], one_pass(DiffusionGemma(copy.deepcopy(hf))), atol=0.0, rtol=0.0)


def test_images_and_drafters_are_refused(hf: DiffusionGemmaForBlockDiffusion, target: DiffusionGemma) -> None:
    model = copy.deepcopy(hf)
    model.config.image_token_id = 7
    with pytest.raises(InputError, match="leave them out"):
        Engine(DiffusionGemma(model)).add_request([1, 7, 2])
    with pytest.raises(MismatchError, match="mode='self'"):
        Engine(target, random_drafter())
