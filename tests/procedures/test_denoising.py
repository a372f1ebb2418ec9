"""Masked diffusion models against dense loops without a cache, written after their authors' rules."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config

from tests import tiny
from volley import DiffusionParams, Engine, SamplingParams
from volley.decode.canvas import CoupledNoise
from volley.decode.sampling import PositionNoise, token_probs
from volley.decode.work import Work
from volley.memory.batch import Segment
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.families import FAST_DLLM, SDAR
from volley.models.targets.target import Target
from volley.procedures.denoising import Denoising
from volley.procedures.request import Request

MASK = tiny.VOCAB - 1
BOTH_WAYS = replace(SDAR, writes_causally=True)
"""No published family: canvases that begin at multiples and text that attends both ways, beside the modes that write causally."""


class Masked(NamedTuple):
    target: Target
    hf: PreTrainedModel
    """Return the model with the same weights under transformers' own attention."""


def masked_model(family: BlockDiffusion, seed: int = 0, **changes: Any) -> Masked:
    config = tiny.target_config(num_hidden_layers=2, **changes)
    if family.is_shifted:
        values = config.to_dict()
        config = Qwen2Config(**{name: values[name] for name in (*tiny.SHAPE, "vocab_size", "initializer_range")})
        config.num_hidden_layers, config.bos_token_id, config.eos_token_id = 2, None, None
    hf = tiny.eager_model(config, seed)
    return Masked(Target(copy.deepcopy(hf), None, replace(family, mask_token_id=MASK)), hf)


@pytest.fixture(scope="module")
def sdar() -> Masked:
    return masked_model(SDAR)


@pytest.fixture(scope="module")
def fast_dllm() -> Masked:
    return masked_model(FAST_DLLM)


# -- the slow reference ------------------------------------------------------------------------------------------------


def dense_logits(hf: PreTrainedModel, tokens: list[int], length: int) -> Tensor:
    """Logits ``[T, V]`` of a whole text whose blocks of ``length`` see themselves and what is before them."""
    blocks = torch.arange(len(tokens)) // length
    mask = torch.where(blocks[:, None] >= blocks, 0.0, -torch.inf)[None, None]
    with torch.inference_mode():
        return hf(input_ids=torch.tensor([tokens]), attention_mask=mask).logits[0].float()


def candidates(
    rows: Tensor, params: SamplingParams, noise: PositionNoise, start: int, step: int, mask: int = MASK
) -> tuple[Tensor, Tensor, Tensor]:
    rows = rows.clone()
    rows[:, mask] = -torch.inf
    if params.temperature == 0:
        probs = rows.softmax(-1)
        tokens = probs.argmax(-1)
    else:
        probs = token_probs(rows, params)
        tokens = noise.choose(probs, start, step)
    return tokens, probs[torch.arange(len(rows)), tokens], probs


def transfers(length: int, steps: int) -> list[int]:
    return [length // steps + (step < length % steps) for step in range(steps)]


def sdar_reveals(own: DiffusionParams, masked: list[int], sure: Tensor, probs: Tensor, count: int) -> list[int]:
    """SDAR's four ways to say which of the ``masked`` slots are revealed."""
    count = min(count, len(masked))
    surest = sorted(masked, key=lambda slot: -float(sure[slot]))
    if own.strategy == "sequential":
        return masked[:count]
    if own.strategy == "low_confidence_static":
        return surest[:count]
    if own.strategy == "low_confidence_dynamic":
        high = [slot for slot in masked if sure[slot] > own.threshold]
        return high if len(high) >= count else surest[:count]
    entropy = -(probs.clamp_min(1e-12) * probs.clamp_min(1e-12).log()).sum(-1)
    ordered = sorted(masked, key=lambda slot: float(entropy[slot]))
    total, kept = 0.0, 0
    for slot in ordered:
        total += float(entropy[slot])
        kept += total < own.entropy_bound
    return ordered[: max(1, kept)]


Change = Callable[[Tensor, list[int]], Tensor]
"""Return a rule's result for logits ``[L, V]`` after ``output``."""


def dense_sdar(
    model: Masked,
    prompt: list[int],
    params: SamplingParams,
    own: DiffusionParams,
    mask: int = MASK,
    change: Change = lambda rows, _: rows,
    logprobs: dict[int, float] | None = None,
) -> tuple[list[int], int]:
    """Tokens of the answer, and passes over canvases; notes the log-probability of the token at each position."""
    length, tokens, passes = own.canvas_length, list(prompt), 0
    noise = (CoupledNoise if length == 1 else PositionNoise)(params.seed or 0)
    assert length is not None
    while len(tokens) < len(prompt) + params.max_tokens:
        start, output = len(tokens) // length * length, tokens[len(prompt) :]
        tokens += [mask] * (start + length - len(tokens))
        masked = [slot for slot in range(length) if tokens[start + slot] == mask]
        for step, count in enumerate(transfers(length, own.max_steps or length) + [1] * length):
            if not masked:
                break
            rows = change(dense_logits(model.hf, tokens, length)[start:], output)
            found, sure, probs = candidates(rows, params, noise, start, step, mask)
            for slot in sdar_reveals(own, masked, sure, probs, count):
                tokens[start + slot] = int(found[slot])
                if logprobs is not None:
                    logprobs[start + slot] = float(rows[slot].log_softmax(-1)[found[slot]])
                masked = [other for other in masked if other != slot]
            passes += 1
    return tokens[len(prompt) : len(prompt) + params.max_tokens], passes


def dense_fast_dllm(
    model: Masked, prompt: list[int], params: SamplingParams, own: DiffusionParams
) -> tuple[list[int], int]:
    length, noise, tokens, passes = own.canvas_length, PositionNoise(params.seed or 0), list(prompt), 0
    assert length is not None
    assert own.sub_block is not None
    while len(tokens) < len(prompt) + params.max_tokens:
        if len(tokens) % length == 0:
            first = dense_logits(model.hf, tokens, length)[-1]
            tokens.append(int(first.masked_fill(torch.arange(len(first)) == MASK, -torch.inf).argmax()))
        start = len(tokens) // length * length
        is_masked = [False] * (len(tokens) - start) + [True] * (start + length - len(tokens))
        tokens += [MASK] * sum(is_masked)
        step = 0
        for low in range(0, length, own.sub_block):
            inside = range(low, min(length, low + own.sub_block))
            while masked := [slot for slot in inside if is_masked[slot]]:
                rows = dense_logits(model.hf, tokens, length)[start:]
                rows = torch.cat([rows[-1:], rows[:-1]])
                found, sure, _ = candidates(rows, params, noise, start, step)
                surest = max(masked, key=lambda slot: float(sure[slot]))
                for slot in masked:
                    if sure[slot] > own.threshold or slot == surest:
                        tokens[start + slot], is_masked[slot] = int(found[slot]), False
                step, passes = step + 1, passes + 1
    return tokens[len(prompt) : len(prompt) + params.max_tokens], passes


Dense = Callable[[Masked, list[int], SamplingParams, DiffusionParams], tuple[list[int], int]]


def compare(model: Masked, dense: Dense, prompts: list[list[int]], params: SamplingParams, **options: Any) -> None:
    """The engine answers all prompts together; tokens and passes must be those of the loop.

    Passes are compared of answers that end where a canvas ends; one that is cut has the same tokens and no more passes.
    """
    engine = Engine(model.target, **{"page_size": 8, **options})
    _, full = engine.procedures.choose(params)
    assert full.diffusion is not None
    assert full.diffusion.canvas_length is not None
    length, whole = full.diffusion.canvas_length, list[SamplingParams]()
    for prompt in prompts:
        end = -(-(len(prompt) + params.max_tokens) // length) * length
        whole.append(replace(params, max_tokens=end - len(prompt)))
    cut = list(engine.generate(prompts, params))
    for prompt, own, short, result in zip(prompts, whole, cut, list(engine.generate(prompts, whole)), strict=True):
        tokens, passes = dense(model, prompt, own, full.diffusion)
        assert (result.token_ids, result.stats.denoising_steps) == (tokens, passes), prompt
        assert short.token_ids == tokens[: params.max_tokens]
        assert short.stats.denoising_steps <= passes
    engine.check_integrity()


def prompts_around(length: int) -> list[list[int]]:
    """Prompts of 1 to 2L + 1 tokens."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randint(MASK, (size,), generator=generator).tolist() for size in range(1, 2 * length + 2)]


STRATEGIES = [
    {"strategy": "low_confidence_dynamic", "threshold": 0.3},
    {"strategy": "low_confidence_static", "max_steps": 3},
    {"strategy": "sequential", "max_steps": 3},
    {"strategy": "entropy_bounded", "entropy_bound": 2.5},
]


@pytest.mark.slow
@pytest.mark.parametrize("own", STRATEGIES, ids=lambda own: own["strategy"])
@pytest.mark.parametrize("length", [1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sdar_is_the_dense_loop(sdar: Masked, own: dict[str, Any], length: int, temperature: float) -> None:
    diffusion = DiffusionParams(canvas_length=length, **own)
    params = SamplingParams(max_tokens=length + 3, temperature=temperature, seed=5, diffusion=diffusion)
    compare(sdar, dense_sdar, prompts_around(length), params)


class Causal(Denoising):
    """Planted: what is committed sees only what is before it."""

    def segment(self, work: Work[Request]) -> tuple[list[int], Segment]:
        tokens, segment = super().segment(work)
        segment.groups = (1,) * work.num_known + ((work.spec.size,) if work.spec.size else ())
        return tokens, segment


class Unshifted(Denoising):
    """Planted: row i is taken for slot i."""

    def denoise(self, canvases: Sequence[tuple[Request, Tensor]]) -> None:
        super().denoise([(request, rows.roll(-1, dims=0)) for request, rows in canvases])


@pytest.mark.parametrize("fault", [Causal, Unshifted])
def test_a_planted_fault_is_seen(fast_dllm: Masked, fault: type[Denoising]) -> None:
    params = SamplingParams(max_tokens=19, diffusion=DiffusionParams(canvas_length=8, threshold=0.2))
    engine = Engine(fast_dllm.target)
    _, full = engine.procedures.choose(params)
    assert fast_dllm.target.diffusion is not None
    assert full.diffusion is not None
    prompt = prompts_around(8)[-1]
    request = engine.add_request(prompt, full, fault(fast_dllm.target, fast_dllm.target.diffusion))
    while engine.has_work:
        engine.step()
    assert request.result().token_ids != dense_fast_dllm(fast_dllm, prompt, full, full.diffusion)[0]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("length", "sub_block"), [(4, 2), (8, 3), (8, 4), (8, 8)])
def test_fast_dllm_is_the_dense_loop(fast_dllm: Masked, length: int, sub_block: int, temperature: float) -> None:
    diffusion = DiffusionParams(canvas_length=length, sub_block=sub_block, threshold=0.2)
    params = SamplingParams(max_tokens=13, temperature=temperature, seed=5, diffusion=diffusion)
    compare(fast_dllm, dense_fast_dllm, prompts_around(length), params)


@pytest.mark.slow
@pytest.mark.parametrize("own", STRATEGIES, ids=lambda own: own["strategy"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_log_probabilities_are_of_the_pass_that_chose_the_token(
    sdar: Masked, own: dict[str, Any], temperature: float
) -> None:
    """At temperature 1 and with the mask among the tokens: of the model's unmodified logits."""
    diffusion = DiffusionParams(canvas_length=4, **own)
    params = SamplingParams(
        max_tokens=9, temperature=temperature, seed=5, logprobs=True, top_logprobs=2, diffusion=diffusion
    )
    for prompt in prompts_around(4):
        expected = dict[int, float]()
        dense_sdar(sdar, prompt, params, diffusion, logprobs=expected)
        (result,) = Engine(sdar.target, page_size=8).generate([prompt], params)
        assert result.logprobs == pytest.approx([expected[len(prompt) + place] for place in range(9)], abs=1e-4)
        assert result.top_logprobs is not None
        for token, logprob, top in zip(result.token_ids, result.logprobs, result.top_logprobs, strict=True):
            assert len(top) == 2
            assert top[0][1] >= top[1][1] >= -20
            assert dict(top).get(token, top[1][1]) >= logprob - 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.05}])
@pytest.mark.parametrize("own", STRATEGIES, ids=lambda own: own["strategy"])
def test_confidences_are_taken_behind_truncation(sdar: Masked, own: dict[str, Any], narrow: dict[str, Any]) -> None:
    diffusion = DiffusionParams(canvas_length=4, **own)
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=5, diffusion=diffusion, **narrow)
    compare(sdar, dense_sdar, prompts_around(4), params)


@pytest.mark.slow
def test_penalties_are_of_what_has_come_out(sdar: Masked) -> None:
    """And not of what stands on the canvas."""
    diffusion = DiffusionParams(canvas_length=4, strategy="sequential", max_steps=4)
    params = SamplingParams(max_tokens=16, presence_penalty=2.0, frequency_penalty=2.0, diffusion=diffusion)
    plain = replace(params, presence_penalty=0.0, frequency_penalty=0.0)

    def penalised(rows: Tensor, output: list[int]) -> Tensor:
        counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=rows.shape[-1])
        return rows - 2.0 * (counts > 0) - 2.0 * counts

    changed = 0
    for prompt in prompts_around(4):
        params, plain = (replace(own, max_tokens=16 - len(prompt) % 4) for own in (params, plain))
        (result,) = Engine(sdar.target, page_size=8).generate([prompt], params)
        tokens, passes = dense_sdar(sdar, prompt, params, diffusion, change=penalised)
        assert (result.token_ids, result.stats.denoising_steps) == (tokens, passes)
        changed += tokens != dense_sdar(sdar, prompt, plain, diffusion)[0]
    assert changed > 0


def test_a_canvas_ends_where_the_answer_does(sdar: Masked) -> None:
    """Revealed tokens stay, so nothing behind a stop token or the last token need be known."""
    own = DiffusionParams(canvas_length=8, strategy="sequential", max_steps=8)
    params = SamplingParams(max_tokens=16, diffusion=own)
    engine = Engine(sdar.target, page_size=8)
    (whole,) = engine.generate([[*range(8)]], params)
    at = next(place for place in range(9, 15) if whole.token_ids[place] not in whole.token_ids[:place])
    (stopped,) = engine.generate([[*range(8)]], replace(params, stop_token_ids=(whole.token_ids[at],), logprobs=True))
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", whole.token_ids[: at + 1])
    assert len(stopped.logprobs or ()) == at + 1
    assert (whole.stats.denoising_steps, stopped.stats.denoising_steps) == (16, at + 1)
    (cut,) = engine.generate([[*range(8)]], replace(params, max_tokens=11))
    assert (cut.token_ids, cut.stats.denoising_steps) == (whole.token_ids[:11], 11)
    engine.check_integrity()


def test_the_first_slot_is_never_the_mask(fast_dllm: Masked) -> None:
    """The token before a block predicts it, and may say that the mask comes next."""
    hf = copy.deepcopy(fast_dllm.hf)
    target = Target(hf, None, fast_dllm.target.diffusion)

    def likeliest(_module: Any, _inputs: Any, logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[..., MASK] = 100.0
        return logits

    hf.get_output_embeddings().register_forward_hook(likeliest)
    params = SamplingParams(max_tokens=12, diffusion=DiffusionParams(canvas_length=4))
    for result in Engine(target).generate([[1, 2, 3, 4], [5, 6]], params):
        assert MASK not in result.token_ids
