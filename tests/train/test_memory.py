"""The stated memory of a training, and what is refused."""

from pathlib import Path

import pytest
import torch

from tests.conftest import TinyPair
from tests.train.runs import tiny_run
from volley.errors import ConfigError
from volley.train import memory
from volley.train.loop import train
from volley.train.memory import Needs
from volley.train.options import TrainConfig


def test_a_training_says_what_it_takes_and_refuses_what_does_not_fit(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = tiny_run(tiny_pair.target, tmp_path)
    train(TrainConfig(**options))
    assert "memory: 0.7 GB at most (libraries 0.7)" in capsys.readouterr().out
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 600_000_000)
    with pytest.raises(ConfigError, match=r"needs 0\.7 GB and cpu has 0\.6; give fewer layers"):
        train(TrainConfig(**{**options, "out": str(tmp_path / "other")}))


def test_large_parts_are_named() -> None:
    found = Needs({"the target": 2_000_000_000, "features": 1_000_000, "a step": 500_000_000})
    assert found.describe() == "memory: 2.5 GB at most (the target 2.0, a step 0.5)"
    found.check(torch.device("cpu"))
