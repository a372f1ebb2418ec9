"""DiffusionGemma's rule against transformers' sampler and stopping criterion, on made-up logits."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from tests.diffusion_gemma import TorchNoise
from tests.made_up import request
from volley.decode.canvas import Canvas, CanvasOutput, CoupledNoise
from volley.decode.renoise import Renoise
from volley.decode.rules import make_rules
from volley.decode.sampling import PositionNoise, token_probs
from volley.decode.work import DraftSpec, Rule, Shape
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.diffusion_gemma import DiffusionGemma
from volley.params import DiffusionParams, SamplingParams
from volley.procedures.denoising import Denoising
from volley.procedures.request import Request

LENGTH, VOCAB, STEPS = 6, 11, 7
PARAMS = DiffusionParams(
    canvas_length=LENGTH,
    max_steps=STEPS,
    entropy_bound=1.5,
    t_min=0.4,
    t_max=0.8,
    stability_threshold=1,
    confidence_threshold=1.2,
)


def made_up_passes(seed: int) -> list[Tensor]:
    """Logits of each pass: little changes from some passes to the next, and they grow sharper."""
    torch.manual_seed(seed)
    logits, passes = torch.randn(LENGTH, VOCAB), []
    for step in range(STEPS):
        logits = logits + torch.randn(LENGTH, VOCAB) * float(torch.randint(0, 2, ())) * 0.5
        passes.append(logits * (1 + step))
    return passes


def by_transformers(passes: list[Tensor], stability: int) -> tuple[list[list[int]], list[int]]:
    """Record the input of each pass, and the best tokens of the last."""
    sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(entropy_bound=1.5), LENGTH, VOCAB, STEPS)
    heat = LinearTemperatureScheduleLogitsProcessor(0.4, 0.8, STEPS)
    settled = StableAndConfidentStoppingCriteria(stability, 1.2)
    canvas = sampler.initialize_canvas(1, torch.device("cpu"))
    read = []
    for left, raw in zip(range(STEPS, 0, -1), passes, strict=True):
        read.append(canvas[0].tolist())
        logits = heat(canvas, raw[None], torch.tensor(left, dtype=torch.int32))
        candidates = torch.multinomial(logits[0].softmax(-1), 1)[:, 0][None]
        canvas = sampler.renoise_canvas(sampler.accept_canvas(canvas, candidates, logits, left), left)
        best = logits.argmax(-1)
        if bool(settled(best, logits)):
            break
    return read, best[0].tolist()


@pytest.mark.parametrize("stability", [0, 1, 2])
def test_canvases_and_ends_are_those_of_transformers(stability: int) -> None:
    params, sampling, ends = DiffusionParams(stability_threshold=stability).over(PARAMS), SamplingParams(), set()
    sampling = SamplingParams(temperature=1.0)
    for seed in range(40):
        passes = made_up_passes(seed)
        torch.manual_seed(seed)
        read, best = by_transformers(passes, stability)
        torch.manual_seed(seed)
        rule, noise = Renoise(VOCAB), TorchNoise()
        canvas = rule.open(0, [], params, noise)
        mine = []
        while not canvas.done:
            mine.append(canvas.tokens.tolist())
            rule.step(CanvasOutput(canvas, passes[canvas.step], sampling, params, noise))
        assert (mine, canvas.tokens.tolist()) == (read, best)
        ends.add(len(read))
    assert len(ends) > 1, "canvases settle after different numbers of passes"


def stepped(sampling: SamplingParams, given: list[int] | None = None) -> Canvas:
    rule, noise = Renoise(VOCAB), PositionNoise(sampling.seed or 0)
    canvas = rule.open(4, given or [], PARAMS, noise)
    for logits in made_up_passes(3)[:1]:
        rule.step(CanvasOutput(canvas, logits, sampling, PARAMS, noise))
    return canvas


def test_a_seed_repeats_the_canvas() -> None:
    one, other, again = (stepped(SamplingParams(temperature=1.0, seed=seed)).tokens for seed in (1, 2, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_given_tokens_stay() -> None:
    assert stepped(SamplingParams(temperature=1.0, seed=1), [7, 7, 7]).tokens[:3].tolist() == [7, 7, 7]


def test_greedy_candidates_are_the_best_tokens() -> None:
    canvas = stepped(SamplingParams(temperature=0.0, seed=1))
    taken = canvas.tokens == canvas.history[-1]
    assert int(taken.sum()) >= 1
    torch.testing.assert_close(stepped(SamplingParams(top_k=1, temperature=1.0, seed=1)).tokens, canvas.tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_is_what_its_verifier_would_draw(temperature: float) -> None:
    sampling, noise = SamplingParams(temperature=temperature, top_k=5), CoupledNoise(8)
    canvas = Renoise(VOCAB).open(4, [7], PARAMS, noise)
    for logits in made_up_passes(3):
        last = logits.clone()
        Renoise(VOCAB).step(CanvasOutput(canvas, logits, sampling, replace(PARAMS, max_steps=2), noise))
        if canvas.done:
            break
    wanted = noise.choose(token_probs(last, sampling), 4, 2) if temperature else last.argmax(-1)
    assert canvas.tokens.tolist() == [7, *wanted[1:].tolist()]
    assert temperature == 0 or wanted[1:].tolist() != last.argmax(-1)[1:].tolist()


def test_confidence_is_one_for_a_certain_slot_and_one_in_so_many_for_a_flat_one() -> None:
    canvas = Renoise(VOCAB).open(0, [], PARAMS, PositionNoise(0))
    logits = torch.zeros(len(canvas), VOCAB)
    logits[0, 3] = 1e4
    Renoise(VOCAB).step(CanvasOutput(canvas, logits, SamplingParams(), PARAMS, PositionNoise(0)))
    expected = torch.tensor([1.0] + [1 / VOCAB] * (len(canvas) - 1))
    torch.testing.assert_close(canvas.confidence, expected)


def test_canvases_that_are_decided_together_are_those_that_are_decided_alone() -> None:
    """Requests that differ in all that a pass reads of them; the two of another length stand between."""
    lengths = [6, 6, 4, 4, 6, 6]
    each = [
        SamplingParams(temperature=0.0 if index == 1 else 0.5 + 0.3 * index, seed=index, top_k=5 if index == 4 else 0)
        for index in range(6)
    ]
    params = [
        replace(
            PARAMS, canvas_length=length, max_steps=3 + index, entropy_bound=0.3 * index, stability_threshold=index % 3
        )
        for index, length in enumerate(lengths)
    ]
    rule = Renoise(VOCAB)
    pairs = []
    for index, own in enumerate(params):
        noise = CoupledNoise(index) if index == 5 else PositionNoise(index)
        alone, beside = (rule.open(7 * index, [3] * (index % 2), own, noise) for _ in range(2))
        pairs.append((alone, beside, noise))
    for step in range(3):
        torch.manual_seed(step)
        logits = [2 * torch.randn(length, VOCAB) for length in lengths]
        decided = rule.step_together(
            [
                CanvasOutput(pairs[i][1], logits[i], each[i], params[i], pairs[i][2])
                for i in range(6)
                if not pairs[i][1].done
            ]
        )
        alone_decided = [
            rule.step(CanvasOutput(pairs[i][0], logits[i], each[i], params[i], pairs[i][2]))
            for i in range(6)
            if not pairs[i][0].done
        ]
        assert [found.tolist() for found in decided] == [found.tolist() for found in alone_decided]
        for alone, beside, _ in pairs:
            assert (alone.done, alone.step) == (beside.done, beside.step)
            assert torch.equal(alone.tokens, beside.tokens)
            torch.testing.assert_close(alone.confidence, beside.confidence)
            assert all(map(torch.equal, alone.history, beside.history))
            assert (alone.predicted is None) == (beside.predicted is None)
            assert alone.predicted is None or torch.equal(alone.predicted, beside.predicted)  # type: ignore[arg-type]
    assert any(alone.done for alone, _, _ in pairs)
    assert not all(alone.done for alone, _, _ in pairs)


# -- memory ------------------------------------------------------------------------------------------------------------

LARGE, ROWS, HIDDEN = 2**18, 64, 16


class Peak(TorchDispatchMode):
    """The most bytes of tensors made inside that were there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                storage = leaf.untyped_storage()
                self._held[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.bytes = max(self.bytes, sum(size for _, size in self._held.values()))
        return result


def denoised(count: int, sampling: SamplingParams, **changes: Any) -> tuple[int, list[Request]]:
    """One pass over canvases of ``count`` requests that have a vocabulary like DiffusionGemma's: bytes, and the requests."""
    embedding = SimpleNamespace(weight=torch.zeros(LARGE, HIDDEN, dtype=torch.bfloat16), embed_scale=torch.ones(()))
    told = SimpleNamespace(_decoder=SimpleNamespace(embed_tokens=embedding))
    target: Any = SimpleNamespace(
        vocab_size=LARGE,
        hidden_size=HIDDEN,
        feedback=lambda logits: DiffusionGemma.feedback(told, logits),  # type: ignore[arg-type]
    )
    family = BlockDiffusion(mask_token_id=None, has_causal_context=True, defaults=PARAMS)
    procedure = Denoising(target, family)
    requests, works = [], []
    for index in range(count):
        diffusion = replace(PARAMS, canvas_length=ROWS, **changes)
        rules = make_rules(sampling, [1, 2], LARGE, torch.device("cpu"))
        own = request([1, 2], replace(sampling, diffusion=diffusion), procedure=procedure, rules=rules)
        work = procedure.next_work(own, DraftSpec(Shape.CHAIN, Rule.GREEDY))
        work.rows = slice(index * ROWS, (index + 1) * ROWS)
        requests.append(own)
        works.append(work)
    torch.manual_seed(0)
    logits = torch.randn(count * ROWS, LARGE, dtype=torch.bfloat16)
    with Peak() as peak:
        procedure.verify(works, logits)
    return peak.bytes, requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "times"),
    [
        ({}, 3.2),
        ({"presence_penalty": 1.0, "logit_bias": ((3, 1.0),)}, 4.2),
        ({"top_p": 0.9}, 3.8),  # a few rows at a time, of these 64 a sixteenth
    ],
)
def test_a_pass_over_canvases_takes_some_times_the_logits_of_one(own: dict[str, Any], times: float) -> None:
    """In fp32, the logits included; more requests take no more."""
    sampling = SamplingParams(temperature=1.0, logprobs=True, top_logprobs=3, **own)
    one, _ = denoised(1, sampling)
    last, _ = denoised(1, sampling, max_steps=1)
    two, requests = denoised(2, sampling)
    assert max(one, last) <= times * ROWS * LARGE * 4
    assert two <= 1.05 * one
    for own in requests:
        canvas = own.canvas
        assert canvas is not None
        assert canvas.feedback is not None
        kept = [canvas.tokens, canvas.revealed, canvas.feedback, *canvas.history]
        assert canvas.predicted is None
        assert sum(part.nbytes for part in kept) <= 4 * ROWS * HIDDEN * 4
