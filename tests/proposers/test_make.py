"""Each kind of drafter gets its model and its proposer, with the attention and the compiler that the settings name."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests import eagle
from tests.conftest import TinyPair
from tests.tiny import Pair, answers_and_drafts, random_prompts
from volley import Engine, SamplingParams, native
from volley.config import DecodingConfig
from volley.errors import ConfigError
from volley.memory import kernels
from volley.memory.attention import paged_attention
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.eagle_model import EagleModel
from volley.proposers.block import BlockProposer
from volley.proposers.eagle import EagleProposer


@pytest.mark.slow
def test_a_drafter_is_driven_by_what_it_is(pair: Pair, tmp_path: Path) -> None:
    block = Engine(pair.target, pair.drafter)
    assert isinstance(block.core.proposer, BlockProposer)
    assert block.core.proposer.model is block.core.draft_model
    chain = Engine(pair.target, load_drafter(eagle.checkpoint(tmp_path), pair.target, "bf16"))
    assert isinstance(chain.core.proposer, EagleProposer)
    assert isinstance(chain.core.draft_model, EagleModel)
    assert chain.core.proposer.model is chain.core.draft_model
    assert chain.block_size <= 8


GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.mark.skipif(not native.available, reason="needs the C kernels")
def test_the_drafter_has_an_attention_of_its_own(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def counted(*given: Any) -> torch.Tensor:
        calls.append(given[2])
        return paged_attention(*given)

    monkeypatch.setattr(kernels, "paged_attention", counted)
    found, prompts = [], random_prompts(2, longest=20, vocab=260)
    for name in ("target", "native", "torch"):
        engine = Engine.from_pretrained(tiny_pair.target, tiny_pair.drafter, policy="fixed", draft_attention=name)
        found.append([result.token_ids for result in engine.generate(prompts, GREEDY)])
        assert bool(calls) == (name == "torch"), (
            "PyTorch's operations run where they are asked for, in the drafter alone"
        )
    assert set(calls) == {0}, "the drafter has one layer, and the target more"
    assert found[0] == found[1] == found[2]


def test_an_attention_that_does_not_run_here_is_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"draft_attention .triton. needs an NVIDIA GPU .* use target or torch"):
        Engine(pair.target, pair.drafter, draft_attention="triton")
    with pytest.raises(ConfigError, match="needs a CPU with AVX2, and the device is cuda"):
        kernels.attention_named("native", torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"unknown draft attention .trition..*triton"):
        DecodingConfig(draft_attention="trition")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="draft_attention: only a drafter reads such a setting"):
        Engine(pair.target, draft_attention="torch")
    engine = Engine(pair.target, pair.drafter)
    with pytest.raises(ConfigError, match="compile decides how the drafter runs and cannot change"):
        engine.reconfigure(DecodingConfig(compile=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's compiler imports what it deprecates
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler")
def test_a_compiled_drafter_drafts_the_same(pair: Pair) -> None:
    """Its layers are compiled once, for all numbers of tokens."""
    prompts = random_prompts(3, longest=30)
    expected = answers_and_drafts(Engine(pair.target, pair.drafter, policy="fixed"), prompts, GREEDY)
    before = counters["stats"]["unique_graphs"]
    engine = Engine(pair.target, pair.drafter, policy="fixed", compile=True)
    results, drafts = answers_and_drafts(engine, prompts, GREEDY)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled - before > pair.drafter.config.num_hidden_layers
    assert drafts == expected[1]
    assert [result.token_ids for result in results] == [result.token_ids for result in expected[0]]
    list(engine.generate(random_prompts(5, seed=3), GREEDY))
    assert counters["stats"]["unique_graphs"] == compiled


def test_what_cannot_be_compiled_is_refused(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="a compiled drafter has no int8 weights"):
        load_drafter(tmp_path, pair.target, "int8", compiled=True)
    chain = load_drafter(eagle.checkpoint(tmp_path), pair.target, "bf16", compiled=True)
    with pytest.raises(ConfigError, match="EAGLE-3 drafter is not compiled"):
        Engine(pair.target, chain, compile=True)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler, and none is found"):
        Engine(pair.target, pair.drafter, compile=True)
