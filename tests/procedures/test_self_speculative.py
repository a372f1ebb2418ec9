"""Self-speculation answers as the autoregressive mode of the same weights does, whatever the canvas drafts."""

import copy
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.chi_square import chi_square_p, joint_counts, joint_law
from tests.costs import settle
from tests.diffusion_gemma import VOCAB as GEMMA_VOCAB
from tests.diffusion_gemma import random_model
from tests.made_up import keep_first_drafted
from tests.procedures.test_denoising import BOTH_WAYS
from volley import DiffusionParams, Engine, SamplingParams
from volley.decode.canvas import CoupledNoise
from volley.decode.sampling import PositionNoise
from volley.decode.work import DraftSpec, Work
from volley.models.targets.diffusion_gemma import DiffusionGemma
from volley.models.targets.families import FAST_DLLM
from volley.models.targets.target import Target
from volley.policies.cost import PassCost
from volley.policies.draft_steps import DraftSteps
from volley.procedures.request import Request
from volley.procedures.self_speculative import SelfCheck, SelfSpeculative

MASK = tiny.VOCAB - 1
AUTOREGRESSIVE = DiffusionParams(mode="autoregressive")


def target(family: str = "sdar", **changes: Any) -> Target:
    if family == "gemma":
        return DiffusionGemma(random_model())
    rules = replace(
        {"sdar": BOTH_WAYS, "fast_dllm": FAST_DLLM}[family], mask_token_id=changes.get("vocab_size", MASK + 1) - 1
    )
    return Target(tiny.eager_model(tiny.target_config(num_hidden_layers=2, **changes)), None, rules)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdar", "fast_dllm", "gemma"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_the_autoregressive_mode(family: str, steps: int, temperature: float) -> None:
    engine = Engine(target(family), page_size=4)
    prompts = tiny.random_prompts(4, vocab=min(MASK, GEMMA_VOCAB))
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=21)
    own = DiffusionParams(mode="self", canvas_length=5, max_steps=steps)
    drafted = list(engine.generate(prompts, replace(params, diffusion=own)))
    engine.reset_prefix_cache()
    plain = list(engine.generate(prompts, replace(params, diffusion=AUTOREGRESSIVE)))
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert all(result.stats.denoising_steps >= steps for result in drafted)
    engine.check_integrity()
    assert engine.snapshot().pages_used == 0


def test_no_canvas_lies_behind_the_end_of_an_answer() -> None:
    own = target()
    params = SamplingParams(max_tokens=14, diffusion=DiffusionParams(mode="self", canvas_length=8, max_steps=2))
    engine = Engine(own, page_size=4, num_pages=4)
    (result,) = engine.generate([[1, 2]], params)
    (plain,) = engine.generate([[1, 2]], replace(params, diffusion=AUTOREGRESSIVE))
    assert result.token_ids == plain.token_ids


def test_a_repeating_answer_is_accepted_several_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that always says the same token: a canvas that is right saves passes, and rides where rows are free."""
    settle(monkeypatch, token=0.0)
    own = target()
    head = own.model.get_output_embeddings().weight
    with torch.no_grad():
        head.zero_()
    engine = Engine(own)
    params = SamplingParams(max_tokens=33, diffusion=DiffusionParams(mode="self", canvas_length=8, max_steps=1))
    (result,) = engine.generate([[1, 2, 3]], params)
    assert result.token_ids == [0] * 33
    assert (result.stats.denoising_steps, result.stats.commit_passes) == (4, 1), "canvases ride behind what is verified"
    assert result.stats.acceptance_length == 8
    assert result.stats.tokens_per_pass == 33 / 5


@pytest.mark.parametrize(("max_tokens", "steps"), [(9, 1), (10, 1), (11, 2)])
def test_no_canvas_rides_where_nothing_is_left_to_draft(max_tokens: int, steps: int) -> None:
    """The first draft brings nine tokens. A further one is the verifier's own; only of two is one drafted."""
    own = target()
    with torch.no_grad():
        own.model.get_output_embeddings().weight.zero_()
    asked = DiffusionParams(mode="self", canvas_length=8, max_steps=1)
    (result,) = Engine(own).generate([[1, 2, 3]], SamplingParams(max_tokens=max_tokens, diffusion=asked))
    assert result.stats.denoising_steps == steps


class Whim(DraftSteps):
    """Chooses at random: whatever it is, no token may change."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(PassCost(lambda tokens, requests: 1.0))
        self._whim, self.chosen = random.Random(seed), Counter[int]()
        self.seen, self.rode = Counter[int](), Counter[bool]()

    def choose(self, length: int, requests: int, *, is_greedy: bool) -> int:
        steps = self._whim.choice([0, 1, 2, 4])
        self.chosen[steps] += 1
        return steps

    def should_fuse(
        self, confidence: Sequence[float], verified: int, length: int, requests: int, *, is_greedy: bool
    ) -> bool:
        assert len(confidence) == verified - 1 < length
        assert all(0 < sure <= 1 + 1e-6 for sure in confidence)
        rides = self._whim.random() < 0.5
        self.rode[rides] += 1
        return rides

    def observe(self, length: int, steps: int, *, is_greedy: bool, tokens: int, alone: int, verified: int) -> None:
        self.seen[steps] += 1
        assert 1 <= tokens <= length <= verified
        assert alone <= steps


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdar", "fast_dllm", "gemma"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_number_of_passes_changes_a_token(family: str, temperature: float) -> None:
    engine = Engine(target(family), page_size=4)
    assert engine.target.diffusion is not None
    whim = Whim()
    procedure = SelfSpeculative(engine.target, engine.target.diffusion, engine.procedure, whim)
    prompts = tiny.random_prompts(6, vocab=min(MASK, GEMMA_VOCAB))
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=30)
    _, own = engine.procedures.choose(replace(params, diffusion=DiffusionParams(mode="self", canvas_length=5)))
    requests = [engine.add_request(prompt, own, procedure) for prompt in prompts]
    while engine.has_work:
        engine.step()
    engine.reset_prefix_cache()
    plain = engine.generate(prompts, replace(params, diffusion=AUTOREGRESSIVE))
    assert [request.token_ids[request.num_prompt :] for request in requests] == [own.token_ids for own in plain]
    assert min(whim.chosen[steps] for steps in (0, 1, 2, 4)) >= 5
    assert min(whim.seen[steps] for steps in (1, 2, 4)) >= 3, "what came of them is told"
    assert min(whim.rode[rides] for rides in (True, False)) >= 5


@pytest.mark.slow
def test_drafts_that_are_right_are_made_and_others_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass is enough for a model that always says the same token; none pays for a random one."""
    settle(monkeypatch, token=0.01)
    params = SamplingParams(max_tokens=200, diffusion=DiffusionParams(mode="self", canvas_length=8))
    passes = {}
    for is_random in (True, False):
        own = target()
        if not is_random:
            with torch.no_grad():
                own.model.get_output_embeddings().weight.zero_()
        (result,) = Engine(own).generate([[1, 2, 3]], params)
        passes[is_random] = result.stats.denoising_steps + result.stats.commit_passes
    assert passes[False] < 200 / 4
    assert 200 <= passes[True] < 280, "but for the first cycles it decodes plainly"


def test_the_cost_table_learns_from_every_pass_but_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def note(table: PassCost, tokens: int, requests: int, seconds: float, read: int = 0) -> None:
        seen.append((tokens, requests))

    monkeypatch.setattr(PassCost, "observe", note)
    params = SamplingParams(max_tokens=20, diffusion=DiffusionParams(mode="self", canvas_length=4, max_steps=1))
    (result,) = Engine(target()).generate([[1, 2, 3]], params)
    assert len(seen) == result.stats.denoising_steps + result.stats.commit_passes
    assert {requests for _, requests in seen} == {1}
    assert max(tokens for tokens, _ in seen) <= 8, "a draft behind its anchor, and the next canvas"


class Peeks(DraftSteps):
    """A canvas rides where the model was sure of what it drew, which depends on the draw."""

    def choose(self, length: int, requests: int, *, is_greedy: bool) -> int:
        return 1

    def should_fuse(
        self, confidence: Sequence[float], verified: int, length: int, requests: int, *, is_greedy: bool
    ) -> bool:
        return confidence[0] > 0.3


class Unmatched(SelfSpeculative):
    """Planted: verification draws with the position's noise, and the first token of a draft is taken unseen."""

    def verify(self, works: Any, logits: Tensor) -> None:
        super().verify(works, logits)
        keep_first_drafted(works)


class Independent(SelfSpeculative):
    """Drafts with noise of its own, as others do."""

    def noise(self, request: Request) -> PositionNoise:
        return PositionNoise(request.noise.seed)


class Watched(SelfSpeculative):
    """Notes what is verified: tokens drafted, passes over them, and whether another canvas rides behind."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.verified = Counter[tuple[int, int, bool]]()

    def next_work(self, request: Request, spec: DraftSpec) -> Work[Request]:
        canvas = request.canvas
        work = super().next_work(request, spec)
        if isinstance(work, SelfCheck):
            assert canvas is not None
            self.verified[len(work.proposal.token_ids), canvas.step, work.num_fused > 0] += 1
        return work


def draws(engine: Engine, procedure: Any, count: int, params: SamplingParams, first: int = 0) -> tuple[Tensor, float]:
    """Tokens of ``count`` answers with the seeds from ``first`` on, and their mean acceptance length."""
    requests = []
    for seed in range(first, first + count):
        _, own = engine.procedures.choose(replace(params, seed=seed))
        requests.append(engine.add_request([1, 2], own, procedure))
    while engine.has_work:
        engine.step()
    lengths = [length for request in requests for length in request.stats.accepted_lengths]
    return torch.tensor([request.token_ids[2:] for request in requests]), sum(lengths) / len(lengths)


V, TOKENS = 3, 5
"""Vocabulary, and the number of tokens whose joint distribution is known."""


def exact(own: Target) -> Tensor:
    """The distribution of :data:`TOKENS` tokens after the prompt ``[V ** TOKENS]``."""
    hf = copy.deepcopy(own.model)
    hf.set_attn_implementation("eager")
    params = SamplingParams(temperature=1.0, max_tokens=TOKENS)
    return joint_law(lambda texts: hf(input_ids=texts).logits[:, -1], [1, 2], params)


def drawn(steps: int | None) -> SamplingParams:
    """Canvases that can take so many passes, and answers that have room for one behind another."""
    length = 6 if steps == 4 else 3
    own = DiffusionParams(mode="self", canvas_length=length, max_steps=steps)
    return SamplingParams(temperature=1.0, max_tokens=2 * length, diffusion=own)


def sampled(kind: type[SelfSpeculative], steps: int | None, rule: type[DraftSteps]) -> tuple[float, SelfSpeculative]:
    """How probable 1500 answers are under the model's own distribution, and the procedure that wrote them."""
    own = target(vocab_size=V)
    engine = Engine(own, max_running=500, max_batch_tokens=8000, prefix_caching=False, num_pages=1000)
    assert own.diffusion is not None
    chooser = Whim() if rule is Whim else rule(PassCost(lambda tokens, requests: 1 + 0.1 * tokens / requests))
    procedure = kind(own, own.diffusion, engine.procedure, chooser)
    tokens, _ = draws(engine, procedure, 1500, drawn(steps))
    return chi_square_p(joint_counts(tokens[:, :TOKENS], V), exact(own)), procedure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "rule"), [(1, Whim), (2, Whim), (4, Whim), (None, Whim), (None, Peeks), (1, DraftSteps)]
)
def test_sampled_tokens_have_the_models_own_distribution(steps: int | None, rule: type[DraftSteps]) -> None:
    probability, procedure = sampled(Watched, steps, rule)
    assert probability > 1e-3
    assert isinstance(procedure, Watched)
    seen = procedure.verified
    assert sum(count for (drafted, _, _), count in seen.items() if drafted > 1) > 100
    assert rule is DraftSteps or sum(count for (_, _, rode), count in seen.items() if rode) > 100
    assert steps is None or sum(count for (_, passes, _), count in seen.items() if passes == steps) > 100


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "rule"), [(1, Whim), (4, Whim), (None, Whim), (None, Peeks)])
def test_a_planted_bias_is_seen(steps: int | None, rule: type[DraftSteps]) -> None:
    assert sampled(Unmatched, steps, rule)[0] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_coupled_canvas_is_accepted_more_often_than_an_independent_one(steps: int) -> None:
    own = target()
    with torch.no_grad():
        own.model.get_output_embeddings().weight.mul_(0.3)  # flat distributions: what is drawn is the noise's choice
    engine = Engine(own, max_running=300, max_batch_tokens=4000, prefix_caching=False, num_pages=1000)
    assert own.diffusion is not None
    params = SamplingParams(
        temperature=1.0, max_tokens=9, diffusion=DiffusionParams(mode="self", canvas_length=4, max_steps=steps)
    )
    _, coupled = draws(engine, None, 150, params)
    _, independent = draws(engine, Independent(own, own.diffusion, engine.procedure), 150, params)
    assert coupled > 1.1 * independent


def test_coupled_noise_is_the_noise_of_positions() -> None:
    probs = torch.rand(3, 7)
    noise = CoupledNoise(5)
    chosen = noise.choose(probs, 11, 2)
    expected = (probs / PositionNoise(5).exponentials([11, 12, 13], 7)).argmax(dim=-1)
    assert torch.equal(chosen, expected)
