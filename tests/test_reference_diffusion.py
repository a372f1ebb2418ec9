"""The bundled diffusion model does what it is bundled for: a causal LM to transformers, several tokens a pass here."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.test_reference_pair import CHATS
from volley import DiffusionParams, Engine, SamplingParams
from volley.files import BUNDLED_TARGETS

FOLDER = BUNDLED_TARGETS["reference-diffusion"]
TOKENS = 40


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("reference-diffusion", dtype=torch.float32)


def params(mode: str, **own: object) -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, diffusion=DiffusionParams.from_mapping({"mode": mode, **own}))


@pytest.mark.slow
def test_both_causal_modes_have_the_tokens_of_transformers(engine: Engine) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    written = {mode: list(engine.generate(CHATS, params(mode))) for mode in ("autoregressive", "self")}
    for place, chat in enumerate(CHATS):
        prompt = torch.tensor([engine.encode(chat)])
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False)
        expected = output[0, prompt.shape[1] :].tolist()
        assert [results[place].token_ids for results in written.values()] == [expected, expected]


@pytest.mark.slow
def test_a_lower_threshold_takes_fewer_passes(engine: Engine) -> None:
    gains = []
    for threshold in (0.5, 0.9):
        results = list(engine.generate(CHATS, params("diffusion", threshold=threshold)))
        gains.append(sum(result.stats.tokens_per_pass for result in results) / len(results))
    assert gains[0] > gains[1] > 1


def test_its_card_says_what_it_was_made_of() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "float8" in card
    assert "Weights: Apache-2.0" in card
