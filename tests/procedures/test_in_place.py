"""Models whose row i predicts token i write one token after the other as canvases of one token do, whatever is drafted."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from tests import tiny
from tests.chi_square import chi_square_p, joint_counts, joint_law
from tests.made_up import keep_first_drafted
from tests.procedures.test_denoising import MASK, Masked, masked_model
from tests.tiny import answered, tokens
from volley import DiffusionParams, Engine, SamplingParams
from volley.decode.on_device import Reading
from volley.decode.rules import AtLeast
from volley.decode.sampling import PositionNoise, race, token_probs
from volley.decode.work import Phase, Work
from volley.errors import ConfigError
from volley.memory.batch import Segment
from volley.models.targets.families import SDAR
from volley.models.targets.target import Target
from volley.procedures.in_place import InPlace
from volley.procedures.request import Request
from volley.procedures.self_speculative import SelfSpeculative

ONE = DiffusionParams(canvas_length=1)
AUTOREGRESSIVE = DiffusionParams(mode="autoregressive")


def drafted(length: int = 4, steps: int | None = 1) -> DiffusionParams:
    return DiffusionParams(mode="self", canvas_length=length, max_steps=steps)


def params(diffusion: DiffusionParams, temperature: float = 0.0, **changes: Any) -> SamplingParams:
    values: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 21, "diffusion": diffusion}
    return SamplingParams(**{**values, **changes})


def answers(target: Target, prompts: Sequence[list[int]], own: SamplingParams, **options: Any) -> list[list[int]]:
    engine = Engine(target, **{"page_size": 4, **options})
    return tokens(answered(engine, prompts, own))


@pytest.fixture(scope="module", params=["sdar", "window"])
def model(request: pytest.FixtureRequest) -> Masked:
    changes = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "layer_types": None}
    return masked_model(SDAR, **(changes if request.param == "window" else {}))


@pytest.fixture(scope="module")
def sdar() -> Masked:
    return masked_model(SDAR)


# -- the slow reference ------------------------------------------------------------------------------------------------


@torch.inference_mode()
def dense(hf: PreTrainedModel, prompt: Sequence[int], own: SamplingParams) -> list[int]:
    """One mask behind the text after the other, causally and without a cache."""
    tokens = list(prompt)
    for _ in range(own.max_tokens):
        logits = hf(input_ids=torch.tensor([[*tokens, MASK]])).logits[0, -1:].float()
        logits[:, MASK] = -torch.inf
        noise = PositionNoise(own.seed or 0).exponentials([len(tokens)], logits.shape[-1])
        chosen = race(token_probs(logits, own), noise) if own.temperature else logits.argmax(dim=-1)
        tokens.append(int(chosen))
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("diffusion", [ONE, AUTOREGRESSIVE, drafted(), drafted(8, 2)])
def test_answers_are_those_of_masks_behind_the_text(model: Masked, temperature: float, diffusion: Any) -> None:
    prompts, own = tiny.random_prompts(4, vocab=MASK), params(diffusion, temperature)
    assert answers(model.target, prompts, own) == [dense(model.hf, prompt, own) for prompt in prompts]


@pytest.mark.slow
@settings(deadline=None, max_examples=6)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    canvas=st.sampled_from([2, 4, 5, 8]),
    steps=st.sampled_from([1, 2, 4, None]),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    options=st.fixed_dictionaries(
        {
            "page_size": st.sampled_from([1, 4, 16]),
            "max_batch_tokens": st.sampled_from([16, 512]),
            "num_pages": st.sampled_from([64, 160, None]),
            "max_running": st.sampled_from([1, 8]),
        }
    ),
    seed=st.integers(0, 2**32),
)
def test_drafts_change_no_token(
    sdar: Masked, lengths: list[int], canvas: int, steps: Any, temperature: float, options: Any, seed: int
) -> None:
    """Requests of all modes in one engine: whoever writes token by token writes the same, and canvases their own."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(MASK, (length,), generator=generator).tolist() for length in lengths]
    tokens = 12 if options["page_size"] == 1 and options["num_pages"] == 64 else 21
    expected = answers(sdar.target, prompts, params(ONE, temperature, seed=seed, max_tokens=tokens))
    wide = params(DiffusionParams(canvas_length=4), temperature, seed=seed, max_tokens=tokens)
    canvases = answers(sdar.target, prompts, wide)
    engine = Engine(sdar.target, **options)
    modes = [drafted(canvas, steps), AUTOREGRESSIVE, DiffusionParams(canvas_length=4), ONE]
    requests = [
        engine.add_request(prompt, params(mode, temperature, seed=seed, max_tokens=tokens))
        for mode in modes
        for prompt in prompts
    ]
    found = tiny.finish(engine, requests)
    count = len(prompts)
    assert [found[start : start + count] for start in range(0, len(found), count)] == [
        expected,
        expected,
        canvases,
        expected,
    ]


@pytest.mark.parametrize("num_pages", [30, 31, 32, 40])
def test_masks_have_room_in_a_pool_that_an_answer_fills(sdar: Masked, num_pages: int) -> None:
    """Pages of one slot: the last drafts are shorter where no slots are left for their masks."""
    prompt = list(range(9))
    own = params(drafted(8, None), max_tokens=21)
    (expected,) = answers(sdar.target, [prompt], params(ONE))
    assert answers(sdar.target, [prompt], own, page_size=1, num_pages=num_pages) == [expected]
    found = answers(sdar.target, [prompt] * 3, own, page_size=1, num_pages=num_pages)
    assert found == [expected] * 3, "though they take pages from each other"


def test_an_answer_is_the_same_at_the_end_of_the_context() -> None:
    short = masked_model(SDAR, max_position_embeddings=24)
    prompt, own = list(range(11)), {"max_tokens": 100}
    (expected,) = answers(short.target, [prompt], params(ONE, **own))
    assert len(expected) == 13
    assert answers(short.target, [prompt], params(drafted(8), **own)) == [expected]
    assert answers(short.target, [prompt], params(AUTOREGRESSIVE, **own)) == [expected]


# -- what it gains -----------------------------------------------------------------------------------------------------


class Scripted(SelfSpeculative):
    """Drafts what will be written, but for one token in so many."""

    def __init__(self, target: Target, text: list[int], wrong: int = 0) -> None:
        assert target.diffusion is not None
        super().__init__(target, target.diffusion, Engine(target).procedures.by_mode["autoregressive"])  # type: ignore[arg-type]
        self.text, self.wrong = text, wrong

    def denoise(self, canvases: Sequence[tuple[Request, Tensor]]) -> None:
        super().denoise(canvases)
        for request, _ in canvases:
            canvas = request.canvas
            assert canvas is not None
            for slot, place in enumerate(range(canvas.start, min(canvas.start + len(canvas), len(self.text)))):
                if slot >= canvas.num_given:
                    is_wrong = self.wrong and place % self.wrong == 0
                    canvas.tokens[slot] = (self.text[place] + 1) % MASK if is_wrong else self.text[place]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("wrong", "most"), [(0, 5), (5, 15)])
def test_right_drafts_are_kept_several_tokens_a_pass(sdar: Masked, temperature: float, wrong: int, most: int) -> None:
    prompt, own = list(range(9)), params(drafted(8), temperature, max_tokens=33)
    (expected,) = answers(sdar.target, [prompt], replace(own, diffusion=ONE))
    engine = Engine(sdar.target, page_size=4)
    _, filled = engine.procedures.choose(own)
    request = engine.add_request(prompt, filled, Scripted(sdar.target, prompt + expected, wrong))
    assert tiny.finish(engine, [request]) == [expected]
    stats = request.stats
    assert stats.denoising_steps + stats.commit_passes <= most
    assert stats.tokens_per_pass == 33 / (stats.denoising_steps + stats.commit_passes) > 2
    if not wrong:
        assert (stats.denoising_steps, stats.commit_passes) == (4, 1), "canvases ride behind what is verified"
        assert stats.accepted_lengths[1:] == [8, 8, 8, 8] or stats.accepted_lengths == [8, 8, 8, 8]


def test_a_pass_that_verifies_has_a_mask_for_each_token(sdar: Masked) -> None:
    seen = list[tuple[Phase, int, int]]()

    class Noted(InPlace):
        def segment(self, work: Work[Request]) -> tuple[list[int], Segment]:
            tokens, segment = super().segment(work)
            seen.append((work.phase, len(tokens), tokens.count(MASK)))
            return tokens, segment

    engine = Engine(sdar.target, page_size=4, max_batch_tokens=8)
    assert sdar.target.diffusion is not None
    procedure = SelfSpeculative(sdar.target, sdar.target.diffusion, Noted(engine.config, MASK))
    _, own = engine.procedures.choose(params(drafted(4, 4), max_tokens=9))
    tiny.finish(engine, [engine.add_request(list(range(13)), own, procedure)])
    assert [entry for entry in seen if entry[0] is Phase.PREFILL] == [(Phase.PREFILL, 8, 0), (Phase.PREFILL, 6, 1)]
    verified = [entry for entry in seen if entry[0] is Phase.VERIFY]
    assert verified
    assert all(tokens == 2 * masks for _, tokens, masks in verified)


# -- planted faults ----------------------------------------------------------------------------------------------------


class LeavesOneOff(InPlace):
    """Each mask sees one token too few."""

    def segment(self, work: Work[Request]) -> tuple[list[int], Segment]:
        tokens, segment = super().segment(work)
        if segment.parents is not None:
            chain = segment.length - 1 - len(work.proposal.token_ids)
            own = segment.parents
            segment.parents = (*own[: chain - 1], *(max(0, parent - 1) for parent in own[chain - 1 :]))
        return tokens, segment


class LeavesSeeAll(InPlace):
    """The masks are a chain, each behind the one before."""

    def segment(self, work: Work[Request]) -> tuple[list[int], Segment]:
        tokens, segment = super().segment(work)
        if segment.parents is not None:
            segment.parents = tuple(range(segment.length - 1))
        return tokens, segment


class Eager(InPlace):
    """The first token of a draft is taken unseen."""

    def verify(self, works: Any, logits: Tensor) -> Reading:
        super().verify(works, logits).read()
        keep_first_drafted(works)
        return Reading()


class MaskMayBeChosen(InPlace):
    def choosable(self, logits: Tensor) -> Tensor:
        return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [InPlace, LeavesOneOff, LeavesSeeAll, Eager, MaskMayBeChosen])
def test_planted_faults_are_seen(kind: type[InPlace], temperature: float) -> None:
    own = masked_model(SDAR)
    if kind is MaskMayBeChosen:  # else it seldom would be
        with torch.no_grad():
            own.target.model.get_output_embeddings().weight[MASK] *= 4
    prompts = tiny.random_prompts(8, vocab=MASK)
    expected = answers(own.target, prompts, params(ONE, temperature))
    engine = Engine(own.target, page_size=4)
    assert own.target.diffusion is not None
    procedure = SelfSpeculative(own.target, own.target.diffusion, kind(engine.config, MASK))
    _, filled = engine.procedures.choose(params(drafted(), temperature))
    found = tiny.finish(engine, [engine.add_request(prompt, filled, procedure) for prompt in prompts])
    assert (found == expected) == (kind is InPlace)


# -- sampled -----------------------------------------------------------------------------------------------------------

V, PROMPT = 6, [1, 2]


def exact(hf: PreTrainedModel) -> Tensor:
    """The distribution of three tokens after the prompt ``[V³]``."""

    def behind(texts: Tensor) -> Tensor:
        masks = torch.full((len(texts), 1), V - 1)
        logits: Tensor = hf(input_ids=torch.cat([texts, masks], dim=1)).logits[:, -1].float()
        logits[:, V - 1] = -torch.inf
        return logits

    return joint_law(behind, PROMPT, SamplingParams(temperature=1.0, max_tokens=3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "diffusion"),
    [(InPlace, drafted(3)), (InPlace, drafted(4, 2)), (InPlace, AUTOREGRESSIVE), (InPlace, ONE), (Eager, drafted(3))],
)
def test_sampled_tokens_have_the_distribution_of_masks_behind_the_text(
    kind: type[InPlace], diffusion: DiffusionParams
) -> None:
    hf = tiny.eager_model(tiny.target_config(num_hidden_layers=2, vocab_size=V))
    own = Target(copy.deepcopy(hf), None, replace(SDAR, mask_token_id=V - 1))
    engine = Engine(own, max_running=500, max_batch_tokens=4000, prefix_caching=False, num_pages=1000)
    assert own.diffusion is not None
    procedure: Any = None
    if diffusion.mode == "self":
        procedure = SelfSpeculative(own, own.diffusion, kind(engine.config, V - 1))
    requests = []
    for seed in range(1500):
        _, filled = engine.procedures.choose(params(diffusion, 1.0, seed=seed, max_tokens=4))
        requests.append(engine.add_request(PROMPT, filled, procedure))
    while engine.has_work:
        engine.step()
    tokens = torch.tensor([request.token_ids[2:5] for request in requests])
    p_value = chi_square_p(joint_counts(tokens, V), exact(hf))
    assert (p_value > 1e-3) == (kind is InPlace)


# -- pages, parameters -------------------------------------------------------------------------------------------------


def test_pages_are_shared_among_all_that_write_token_by_token(sdar: Masked) -> None:
    prompt, engine = [*range(40)], Engine(sdar.target, page_size=4)
    modes = [DiffusionParams(canvas_length=4), ONE, AUTOREGRESSIVE, drafted(), DiffusionParams(canvas_length=4)]
    results = [next(engine.generate([prompt], params(mode))) for mode in modes]
    assert [result.stats.cached_tokens for result in results] == [0, 0, 36, 36, 40]
    assert results[1].token_ids == results[2].token_ids == results[3].token_ids
    assert results[0].token_ids == results[4].token_ids


def test_a_page_of_blocks_would_change_the_answer(sdar: Masked) -> None:
    """Planted: the K/V of blocks, which attend both ways, are found by a request that reads causally."""

    class SharesWithBlocks(SelfSpeculative):
        def prefix_root(self, params: SamplingParams, page_size: int) -> bytes:
            return b"blocks of 4"

    prompt, engine = [*range(40)], Engine(sdar.target, page_size=4)
    (expected,) = answers(sdar.target, [prompt], params(ONE))
    next(engine.generate([prompt], params(DiffusionParams(canvas_length=4))))
    _, own = engine.procedures.choose(params(drafted()))
    assert sdar.target.diffusion is not None
    procedure = SharesWithBlocks(sdar.target, sdar.target.diffusion, InPlace(engine.config, MASK))
    request = engine.add_request(prompt, own, procedure)
    assert tiny.finish(engine, [request]) != [expected]
    assert request.stats.cached_tokens == 36


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parameters_mean_the_same(sdar: Masked, temperature: float) -> None:
    prompts = tiny.random_prompts(3, vocab=MASK)
    for changes in (
        {"presence_penalty": 0.8, "repetition_penalty": 1.3},
        {"logit_bias": ((5, 4.0), (MASK, 50.0))},
        {"top_k": 5, "top_p": 0.8},
        {"stop_token_ids": (7, 11, 13), "max_tokens": 60},
        {"logprobs": True, "top_logprobs": 2},
    ):
        own = params(ONE, temperature, **changes)
        expected = list(Engine(sdar.target).generate(prompts, own))
        for diffusion in (AUTOREGRESSIVE, drafted()):
            found = list(Engine(sdar.target).generate(prompts, replace(own, diffusion=diffusion)))
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
            if own.logprobs:
                for one, other in zip(found, expected, strict=True):
                    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
                    assert [[token for token, _ in pairs] for pairs in one.top_logprobs or []] == [
                        [token for token, _ in pairs] for pairs in other.top_logprobs or []
                    ]


def test_rules_follow_the_text_and_a_prompt_has_no_log_probabilities(sdar: Masked) -> None:
    rule = (lambda *_: AtLeast(12, [5], torch.device("cpu")),)
    found = [
        answers(sdar.target, [[1, 2]], params(diffusion, stop_token_ids=(5,), rules=rule, logit_bias=((5, 30.0),)))
        for diffusion in (AUTOREGRESSIVE, drafted())
    ]
    assert found[0] == found[1]
    assert (found[0][0].index(5), len(found[0][0])) == (12, 13)
    for diffusion in (AUTOREGRESSIVE, drafted()):
        with pytest.raises(ConfigError, match=r"prompt_logprobs.*its own token"):
            Engine(sdar.target).add_request([1, 2], params(diffusion, prompt_logprobs=0))
        assert answers(sdar.target, [[1, 2]], params(diffusion, max_tokens=0)) == [[]]


def test_the_logits_of_the_next_token_are_those_by_which_the_model_writes(sdar: Masked) -> None:
    """The test of ties reads these logits."""
    engine, prompts = Engine(sdar.target, page_size=4), tiny.random_prompts(6, vocab=MASK)
    written = [result.token_ids for result in engine.generate(prompts, params(AUTOREGRESSIVE, max_tokens=3))]
    for prompt, answer in zip(prompts, written, strict=True):
        assert [int(engine.next_logits([*prompt, *answer[:known]]).argmax()) for known in range(3)] == answer
    assert engine.next_logits(prompts[0])[MASK] == -torch.inf
