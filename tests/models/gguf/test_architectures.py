"""Architectures whose files differ from Llama's: same tokens and logits as transformers."""

from pathlib import Path

import pytest
import torch

from tests.models.gguf.converted import CASES, random_model, write
from tests.models.gguf.files import VOCAB
from tests.tiny import greedy
from volley import Engine, SamplingParams
from volley.models.gguf.architectures import ARCHITECTURES
from volley.models.gguf.model import load_model
from volley.models.targets.target import Target

PROMPTS = [[5, 9, 17, 33, 8], list(range(40, 75))]
LIKE_LLAMA = {"llama", "qwen2", "qwen3", "qwen3moe"}  # see test_target.py


def test_every_architecture_is_tested() -> None:
    assert {architecture for architecture, _ in CASES.values()} | LIKE_LLAMA == ARCHITECTURES.keys()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_weights_are_transformers(tmp_path: Path, case: str) -> None:
    model = random_model(case)
    loaded = load_model(write(tmp_path / "model.gguf", model, CASES[case][0]), torch.float32)
    assert type(loaded) is type(model)
    for name, weight in model.state_dict().items():
        assert torch.allclose(loaded.state_dict()[name], weight, atol=1e-6), name
    loaded.load_state_dict(model.state_dict())  # where one was added and taken away again, the last bit differs
    ids = torch.randint(VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(loaded(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("case", CASES)
def test_answers_are_transformers(tmp_path: Path, case: str) -> None:
    model = random_model(case)
    path = write(tmp_path / "model.gguf", model, CASES[case][0])
    engine = Engine(Target(load_model(path, torch.float32)))
    answers = [result.token_ids for result in engine.generate(PROMPTS, SamplingParams(max_tokens=20))]
    assert answers == [greedy(model, prompt, 20) for prompt in PROMPTS]
