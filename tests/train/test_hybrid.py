"""Drafters for targets with recurrent layers: features in training are those of decoding, and a trained drafter decodes."""

from pathlib import Path

import pytest
import torch

from tests import hybrid
from tests.conftest import byte_tokenizer
from tests.tiny import eager_model, random_drafter
from volley import Engine, SamplingParams
from volley.models.targets.target import Target
from volley.train.documents import Document
from volley.train.features import FrozenTarget, OnlineFeatures
from volley.train.loop import train
from volley.train.options import TrainConfig

from .runs import engine_features, tiny_run


def write_target(name: str, folder: Path) -> Path:
    config = hybrid.CONFIGS[name]()
    config.vocab_size, config.eos_token_id = 260, 2
    eager_model(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", hybrid.KINDS)
def test_features_in_training_are_those_of_decoding(name: str, tmp_path: Path) -> None:
    folder, token_ids = write_target(name, tmp_path), list(range(40, 70))
    frozen = FrozenTarget(str(folder), torch.float32, torch.device("cpu"))
    target = Target.from_pretrained(folder, dtype=torch.float32)
    drafter = random_drafter(vocab_size=260, num_target_layers=target.num_layers, target_layer_ids=(0, 2))
    engine = Engine(target, drafter, max_batch_tokens=7)
    found = engine_features(engine, token_ids)
    documents = [Document(torch.tensor(token_ids[:size], dtype=torch.int32), 1) for size in (30, 9)]
    features = OnlineFeatures(frozen, (0, 2), with_final=True)(documents, [0, 1])
    torch.testing.assert_close(features.taps[0], found, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(features.taps[1, :9], found[:9], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_trained_drafter_decodes(tmp_path: Path) -> None:
    folder = write_target("qwen3_5_text", tmp_path / "target")
    options = tiny_run(folder, tmp_path, max_steps=20, eval_prompts=2, eval_max_tokens=6, learning_rate=0.01)
    drafter = train(TrainConfig(**options))
    engine = Engine.from_pretrained(folder, drafter, dtype=torch.float32, policy="fixed")
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    (fast,), (plain,) = (own.generate("the cat sat", params) for own in (engine, Engine(engine.target, block_size=1)))
    assert fast.token_ids == plain.token_ids
