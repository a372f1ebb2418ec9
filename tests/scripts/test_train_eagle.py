"""The training of an EAGLE-3 drafter: its unrolled steps against the definition, and a short run that goes on."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import embedding

from tests import eagle
from tests.tiny import Pair
from volley import Engine, SamplingParams
from volley.files import REFERENCE, weight_files
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.eagle import EagleDrafter

SCRIPTS = Path(__file__).parents[2] / "scripts" / "reference"
sys.path.append(str(SCRIPTS))

import train_eagle as training  # noqa: E402


def test_unrolled_steps_are_what_drafting_computes(pair: Pair, tmp_path: Path) -> None:
    """A step at a position is compared with a chain from so many tokens before, fed the text's own tokens."""
    folder = eagle.checkpoint(tmp_path)
    drafter = load_drafter(folder, pair.target, "bf16")
    assert isinstance(drafter, EagleDrafter)
    weights, text = eagle.tensors(), torch.randint(50, (14,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        hidden = pair.hf(text[None], output_hidden_states=True).hidden_states
        tapped = torch.cat([hidden[tap + 1][0] for tap in eagle.TAPS], -1)[:-1]
        embeddings = embedding(text[1:], pair.hf.get_input_embeddings().weight)
        steps = training.unroll(drafter, tapped[None], embeddings[None], 4)
        for position in range(3, 13):
            for step in range(4):
                states = (tapped @ weights["fc.weight"].T)[: position - step + 1]
                for _ in range(step):
                    own = eagle.layer(weights, embeddings[: len(states)], states)
                    states = torch.cat([states, own[-1:]])
                own = eagle.layer(weights, embeddings[: position + 1], states)[-1]
                normed = own * torch.rsqrt(own.pow(2).mean() + 1e-6) * weights["norm.weight"]
                torch.testing.assert_close(steps[step][0, position], normed, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_run_writes_a_published_checkpoint_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "responses.jsonl"
    data.write_text(json.dumps({"prompt_token_ids": [5, 6, 7], "response_token_ids": [*range(9, 600)]}) + "\n")
    options = ["--data", str(data), "--out", str(tmp_path / "run"), "--steps", "2", "--rows", "1", "--every", "1"]
    training.main([*options, "--minutes", "0.001"])
    spent = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["state"]["seconds"]
    training.main([*options, "--minutes", str(spent / 60 + 0.001)])
    numbers = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert numbers == list(range(1, len(numbers) + 1)), "the second run goes on where the first ended"
    assert len(numbers) > 1
    assert weight_files(tmp_path / "run" / "drafter")[0].exists()
    engine = Engine.from_pretrained(REFERENCE / "target", tmp_path / "run" / "drafter", block_size=4)
    plain = Engine.from_pretrained(REFERENCE / "target")
    params = SamplingParams(max_tokens=12)
    answers = [next(one.generate([[5, 6, 7]], params)).token_ids for one in (engine, plain)]
    assert answers[0] == answers[1]
