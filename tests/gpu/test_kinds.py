"""Other requests and models on a pretended GPU: the CPU's tokens, no mixed devices, and few waits a step."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
from transformers import Gemma3TextConfig, PreTrainedModel, Qwen3MoeConfig

pytest.importorskip("triton")

from tests import hybrid
from tests.conftest import byte_tokenizer
from tests.costs import settle
from tests.diffusion_gemma import random_model
from tests.engine.test_grammars import GRAMMAR
from tests.gpu.pretended import move, pretended_cuda
from tests.procedures.test_denoising import BOTH_WAYS, MASK, masked_model
from tests.tiny import eager_model, random_drafter, random_prompts, target_config
from volley import DiffusionParams, Engine, SamplingParams
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.drafters.drafter import Drafter
from volley.models.targets.diffusion_gemma import DiffusionGemma
from volley.models.targets.families import FAST_DLLM, SDAR
from volley.models.targets.target import Target

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 1}
DRAFTER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "num_target_layers": 2,
    "target_layer_ids": (0,),
}
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=3)
CANVAS = replace(GREEDY, max_tokens=8, diffusion=DiffusionParams(canvas_length=8, threshold=0.3))


class Kind(NamedTuple):
    """A model, its drafter and what they are asked."""

    hf: PreTrainedModel
    make: Callable[[PreTrainedModel], Target]
    drafter: Drafter | None
    params: SamplingParams
    options: dict[str, Any] = {}  # noqa: RUF012

    def run(self, hf: PreTrainedModel, drafter: Drafter | None) -> Engine:
        return Engine(self.make(hf), drafter, **{"num_pages": 64, "policy": "fixed", **self.options})

    def prompts(self) -> Sequence[list[int]]:
        return random_prompts(2, longest=14, seed=1)


def plain(params: SamplingParams, options: dict[str, Any] | None = None, **changes: Any) -> Kind:
    """With a drafter that has such ``changes``."""
    drafter = random_drafter(2, **{**DRAFTER, **changes})
    return Kind(eager_model(target_config(**SMALL)), Target, drafter, params, options or {})


def bound(params: SamplingParams, *, head: str | None = None, drafts: bool = True, **options: Any) -> Kind:
    """Under a grammar."""
    hf = eager_model(target_config(vocab_size=260, eos_token_id=2, **SMALL))
    changes = {"head": HeadConfig(type=head, rank=4)} if head else {}
    drafter = random_drafter(2, **DRAFTER, vocab_size=260, **changes) if drafts else None
    own = replace(params, grammar=GRAMMAR, ignore_eos=False, max_tokens=16)
    return Kind(hf, partial(Target, tokenizer=byte_tokenizer()), drafter, own, options)


def canvas(params: SamplingParams, family: Any = SDAR, **changes: Any) -> Kind:
    """A diffusion language model."""
    assert params.diffusion is not None
    own = replace(params, diffusion=replace(params.diffusion, **changes))
    make = partial(Target, tokenizer=None, diffusion=replace(family, mask_token_id=MASK))
    return Kind(masked_model(family).hf, make, None, own, {"page_size": 8})


def gemma(params: SamplingParams, **changes: Any) -> Kind:
    """DiffusionGemma, whose experts are multiplied as a group."""
    own = replace(params, diffusion=DiffusionParams(**{"max_steps": 3, **changes}))
    return Kind(random_model(), DiffusionGemma, None, own, {"page_size": 8})  # type: ignore[arg-type]


def recurrent(name: str, params: SamplingParams, **options: Any) -> Kind:
    hf = hybrid.model(name)
    drafter = random_drafter(num_target_layers=hf.config.get_text_config().num_hidden_layers)
    return Kind(hf, Target, drafter, params, {"page_size": 4, **options})


def family(config: Any, params: SamplingParams, **options: Any) -> Kind:
    """A model of another family, with a drafter."""
    return Kind(eager_model(config), Target, random_drafter(2, **DRAFTER), params, options)


LIKE: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
OF_EXPERTS = Qwen3MoeConfig(**{**target_config(**SMALL).to_dict(), **LIKE}, num_experts=4, num_experts_per_tok=2)
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
NORMED = Gemma3TextConfig(**{**target_config(**SMALL).to_dict(), **LIKE, **WINDOWS})
DSPARK = {"head": HeadConfig(type="dspark", rank=4), "confidence_width": 36}
KINDS: dict[str, tuple[Callable[[], Kind], int]] = {
    "log-probabilities of prompts": (lambda: plain(replace(GREEDY, prompt_logprobs=2)), 1),
    "confidence head": (lambda: plain(GREEDY, {"policy": "goodput"}, confidence_width=32), 2),
    "confidence head, sampled": (lambda: plain(SEEDED, {"policy": "goodput"}, **DSPARK), 2),
    "grammar, plain": (lambda: bound(GREEDY, drafts=False), 1),
    "grammar, sampled with a seed": (lambda: bound(SEEDED), 2),
    "grammar, trees": (lambda: bound(GREEDY, tree_nodes=6), 2),
    "canvas": (lambda: canvas(CANVAS), 2),
    "canvas, sampled": (lambda: canvas(replace(CANVAS, temperature=0.8, seed=1)), 2),
    "shifted canvas": (lambda: canvas(CANVAS, FAST_DLLM), 3),
    "canvas, self-speculation": (lambda: canvas(CANVAS, BOTH_WAYS, mode="self"), 3),
    "DiffusionGemma": (lambda: gemma(replace(GREEDY, seed=3)), 2),
    "DiffusionGemma, sampled": (lambda: gemma(SEEDED), 3),
    "DiffusionGemma, filtered": (lambda: gemma(replace(SEEDED, top_k=20, top_p=0.9)), 3),
    "DiffusionGemma, causal": (lambda: gemma(SEEDED, mode="autoregressive"), 1),
    "experts": (lambda: family(OF_EXPERTS, GREEDY), 1),
    "experts, trees": (lambda: family(OF_EXPERTS, GREEDY, tree_nodes=6), 2),
    "Gemma's norms and windows": (lambda: family(NORMED, GREEDY), 1),
    "short convolutions": (lambda: recurrent("lfm2", GREEDY), 1),
    "gated delta nets": (lambda: recurrent("qwen3_5_text", GREEDY), 1),
    "gated delta nets, trees": (lambda: recurrent("qwen3_5_text", GREEDY, tree_nodes=6), 2),
}
"""Each with the waits of a step of two requests, at most: one for each canvas, one for drafts that the host has to look at."""
BY_OPERATION = {"short convolutions", "gated delta nets", "gated delta nets, trees"}
"""Models whose target passes are no graphs."""
QUICK = {"confidence head", "canvas, self-speculation", "experts"}
"""One of each sort, for every run of the tests; the others are among the slow ones."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_tokens_are_the_cpus_and_waits_are_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    make, most = KINDS[name]
    kind = make()
    expected = [
        own.token_ids for own in kind.run(copy.deepcopy(kind.hf), kind.drafter).generate(kind.prompts(), kind.params)
    ]
    with pretended_cuda(runs_kernels=True) as counts:
        engine = kind.run(
            move(copy.deepcopy(kind.hf)), None if kind.drafter is None else move(copy.deepcopy(kind.drafter))
        )
        requests = [engine.add_request(prompt, kind.params) for prompt in kind.prompts()]
        waits = list[int]()
        while engine.has_work:
            is_counted = kind.params.prompt_logprobs or all(own.is_decoding for own in requests)
            counts.clear()
            engine.step()
            if is_counted:
                waits.append(counts.waits.total())
                assert waits[-1] <= most, f"a step waits too often: {dict(counts.waits)}"
        assert [own.token_ids[own.num_prompt :] for own in requests] == expected
        passes = engine.core.runner.passes
        assert (passes is None or not passes.num_graphs) == (name in BY_OPERATION)
    assert waits or kind.params.diffusion is not None
    if kind.params.prompt_logprobs:
        assert all(len(own.prompt_scores) == own.num_prompt - 1 for own in requests)


def test_forced_tokens_beside_drawn_ones_mix_no_devices() -> None:
    """A token that a grammar forces has a distribution too, where the drafter's head has the others on the device."""
    kind = bound(replace(GREEDY, temperature=1.0), head="markov")
    with pretended_cuda(runs_kernels=True):
        engine = kind.run(move(copy.deepcopy(kind.hf)), move(copy.deepcopy(kind.drafter)))
        (result,) = engine.generate(kind.prompts()[:1], kind.params)
    assert result.text.startswith('{"category":"')
