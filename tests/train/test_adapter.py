"""Training an adapter: the drafter stays, the adapter learns, survives a kill, and what cannot be adapted is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TinyPair
from tests.train.runs import tiny_run, weights
from volley import Engine, SamplingParams
from volley.errors import ConfigError, MismatchError
from volley.models.drafters.adapter import adapted
from volley.models.drafters.drafter import Drafter
from volley.train.loop import Trainer, train
from volley.train.options import TrainConfig
from volley.train.parallel import Ranks


def base_drafter(pair: TinyPair, folder: Path, **changes: Any) -> Path:
    (folder / "base").mkdir()
    return train(TrainConfig(**tiny_run(pair.target, folder / "base", max_steps=3, **changes)))


def adapter_run(pair: TinyPair, folder: Path, init: Path, **changes: Any) -> dict[str, Any]:
    options = tiny_run(pair.target, folder, init=str(init), lora_rank=3, learning_rate=5e-3)
    for name in ("block_size", "taps", "num_layers"):
        del options[name]
    return {**options, **changes}


@pytest.mark.slow
@pytest.mark.parametrize("head", ["none", "residual"])
def test_an_adapter_learns_and_decodes(tiny_pair: TinyPair, tmp_path: Path, head: str) -> None:
    init = base_drafter(tiny_pair, tmp_path, head=head, head_rank=4)
    options = adapter_run(tiny_pair, tmp_path, init, max_steps=30, eval_prompts=1, eval_max_tokens=4)
    folder = train(TrainConfig(**options))
    assert folder == tmp_path / "run" / "adapter"
    assert not (tmp_path / "run" / "drafter").exists()
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in log if row["kind"] == "train"]
    assert losses[-1] < 0.95 * losses[0]
    base = Drafter.from_pretrained(init)
    for name, tensor in weights(options["out"]).items():
        if "lora_" not in name:
            plain = name.removeprefix("drafter.").replace(".parametrizations.weight.original", ".weight")
            assert torch.equal(tensor.to(torch.bfloat16), base.state_dict()[plain]), "the drafter itself stays"
    assert not torch.equal(adapted(base, folder).fc.weight, base.fc.weight)
    engine = Engine.from_pretrained(tiny_pair.target, drafter=init, dtype=torch.float32)
    engine.load_adapter("words", folder)
    for name in ("words", None):
        params = SamplingParams(max_tokens=8, draft_adapter=name)
        assert len(next(engine.generate("the cat sat", params)).token_ids) > 0


@pytest.mark.slow
def test_a_run_that_died_goes_on_to_the_same_adapter(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = {"features": "cache", "cache_dir": str(tmp_path / "features")}  # one cache serves both trainings
    init = base_drafter(tiny_pair, tmp_path, **cache)
    options = adapter_run(tiny_pair, tmp_path, init, max_steps=12, epochs=99, save_steps=5, **cache)
    whole = {**options, "out": str(tmp_path / "whole")}
    train(TrainConfig(**whole))
    step = Trainer.step

    def die(self: Trainer, indices: list[int], progress: float) -> Any:
        if self.schedule.position.step == 8:
            raise RuntimeError("died")
        return step(self, indices, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", die)
        with pytest.raises(RuntimeError, match="died"):
            train(TrainConfig(**options))
    train(TrainConfig(**options))
    once, resumed = weights(whole["out"]), weights(options["out"])
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in once.items())
    Drafter(Drafter.from_pretrained(init).config).save_pretrained(init)
    with pytest.raises(ConfigError, match="another drafter; restore it"):
        train(TrainConfig(**options))


def test_what_cannot_be_adapted_is_refused(tiny_pair: TinyPair, tmp_path: Path) -> None:
    options = adapter_run(tiny_pair, tmp_path, tiny_pair.drafter)
    config = json.loads((tiny_pair.drafter / "config.json").read_text())
    other = tmp_path / "other"
    Drafter.from_pretrained(tiny_pair.drafter).save_pretrained(other)
    (other / "config.json").write_text(json.dumps({**config, "num_target_layers": 9}))
    with pytest.raises(MismatchError, match="number of target layers is 9, this target's is 4"):
        train(TrainConfig(**{**options, "init": str(other)}))
    for changes, message in (
        ({"init": None}, "give its folder as init"),
        ({"optimizer": "muon"}, "with AdamW"),
        ({"block_size": 4}, "leave out block_size"),
        ({"head": "residual"}, "leave out head"),
        ({"lora_rank": 0}, "lora_rank is 0; it must be positive"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainConfig(**{**options, **changes})


def test_rows_are_as_long_as_the_target_allows(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """The tiny target's context is 1024 tokens, one a letter."""
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "cat " * 400}]}
    data = tmp_path / "long.jsonl"
    data.write_text(json.dumps(row) + "\n")
    for changes, longest in (({"tokens_per_batch": 4096}, 1024), ({}, 400), ({"max_length": 600}, 600)):
        options = tiny_run(tiny_pair.target, tmp_path, eval_share=0.0, **changes)
        trainer = Trainer(TrainConfig(**{**options, "data": [str(data)]}), Ranks("cpu"))
        assert trainer.data.lengths == [longest]
        trainer.step(trainer.schedule.batch, 0.0)
