"""A widened pair says what the pair says, token for token, and accepts as much; a reader that is not rescaled is found."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import inflate
from benchmarks.inflate import Axis, Shape, Widening, shares
from volley import Engine, SamplingParams
from volley.errors import ConfigError
from volley.files import REFERENCE

SMALL = Shape(1024, 22, 8, 4, 1536, 9000)
CHATS = [[{"role": "user", "content": text}] for text in ("How do I use `tar`?", "Explain “Lifetimes” in Rust.")]
CLOSE = 4e-3  # of logits of about 17: what the constant channel does to the first layer's norm


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return inflate.inflate(tmp_path_factory.mktemp("pair"), SMALL, dtype=torch.float32)


@pytest.mark.slow
def test_tokens_and_accepted_lengths_stay(folders: dict[str, Path]) -> None:
    answers = []
    for target, own in ((REFERENCE / "target", REFERENCE / "drafter"), (folders["target"], folders["drafter"])):
        engine = Engine.from_pretrained(target, own, dtype=torch.float32, policy="fixed")
        answers.append(list(engine.generate(CHATS, SamplingParams(max_tokens=32))))
    for small, wide in zip(*answers, strict=True):
        assert small.token_ids == wide.token_ids
        assert small.stats.accepted_lengths == wide.stats.accepted_lengths
        assert max(small.stats.accepted_lengths) > 2


def logits(folder: Path) -> torch.Tensor:
    """Return the logits of every token of a text, as transformers computes them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(100, 164)[None]
    with torch.inference_mode():
        found: torch.Tensor = model(tokens).logits[0]
    return found


def test_logits_stay_and_added_rows_never_win(folders: dict[str, Path]) -> None:
    old, new = logits(REFERENCE / "target"), logits(folders["target"])
    assert (new[:, : old.shape[1]] - old).abs().max() < CLOSE
    assert new.shape[1] == SMALL.vocab_size
    assert new[:, old.shape[1] :].max() < -500


def test_a_reader_that_is_not_rescaled_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(Widening):
        def __init__(self, config: dict[str, int], shape: Shape) -> None:
            super().__init__(config, shape)
            neurons, states = self.axes["up_proj.weight"]
            assert states is not None
            self.axes["up_proj.weight"] = neurons, Axis(states.source, torch.ones_like(states.scale))

    monkeypatch.setattr(inflate, "Widening", Faulty)
    shape = Shape(512, 20, 4, 2, 512)
    old, new = logits(REFERENCE / "target"), logits(inflate.inflate(tmp_path, shape, drafters=())["target"])
    assert (new - old).abs().max() > 100 * CLOSE


def test_without_a_larger_vocabulary_twice_the_width_is_enough(tmp_path: Path) -> None:
    folders = inflate.inflate(tmp_path, Shape(512, 20, 4, 2, 512), drafters=())
    assert (logits(folders["target"]) - logits(REFERENCE / "target")).abs().max() < 1e-3


def test_configs_say_the_shape(folders: dict[str, Path]) -> None:
    target, drafter = (json.loads((folders[name] / "config.json").read_text()) for name in ("target", "drafter"))
    assert (target["num_hidden_layers"], len(target["layer_types"]), drafter["num_target_layers"]) == (22, 22, 22)
    for config in (target, drafter):
        assert (config["hidden_size"], config["vocab_size"], config["dtype"]) == (1024, 9000, "float32")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 8, 12])
def test_shares_are_powers_of_two_that_sum_to_one(count: int) -> None:
    assert len(shares(count)) == count
    assert sum(shares(count)) == 1
    assert all(share.hex().startswith("0x1.0000000000000p") for share in shares(count))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(300, 20, 4, 2, 512), "hidden size: 300 is no multiple"),
        (Shape(512, 20, 4, 2, 512, 9000), "four times the pair's hidden size"),
        (Shape(1024, 20, 4, 2, 512, 100), "vocabulary: 100 is less"),
        (Shape(1024, 20, 8, 2, 512), "must grow alike"),
        (Shape(1024, 8, 4, 2, 512), "layers: 8 are fewer"),
    ],
)
def test_shapes_that_cannot_be_made_are_refused(tmp_path: Path, shape: Shape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inflate.inflate(tmp_path, shape, drafters=())
