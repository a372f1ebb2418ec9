"""Whole trainings of a tiny target: they learn, resume bit for bit, and refuse what cannot be."""

import json
import os
import shutil
import signal
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from volley.errors import CheckpointError, ConfigError, InputError
from volley.models.drafters.drafter import Drafter
from volley.train import cache as cache_module
from volley.train import loop
from volley.train.loop import Trainer, train
from volley.train.options import RANDOM, TrainConfig
from volley.train.parallel import Ranks

from ..conftest import TinyPair
from .runs import drafter_weights, start, start_nodes, tiny_run, weights, write_rows


def run(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    train(TrainConfig(**options))
    return weights(options["out"])


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.slow
def test_a_run_learns_reports_and_saves_a_drafter(tiny_pair: TinyPair, tmp_path: Path, capsys: Any) -> None:
    options = tiny_run(tiny_pair.target, tmp_path, max_steps=40, eval_prompts=2, eval_max_tokens=6, learning_rate=0.01)
    options |= {"epochs": 99, "eval_steps": 25, "init": RANDOM}
    folder = train(TrainConfig(**options))
    drafter = Drafter.from_pretrained(folder)
    assert drafter.config.target_layer_ids == (0, 2)
    assert drafter.config.mask_token_id == 3
    assert (
        drafter.config.draft_window
        == json.loads((tmp_path / "run" / "training_report.json").read_text())["data"]["longest"]
    )
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    steps = [row for row in log if row["kind"] == "train"]
    assert [row["step"] for row in steps] == list(range(2, 41, 2))
    assert steps[-1]["loss"] < 0.95 * steps[0]["loss"]
    assert [row["step"] for row in log if row["kind"] == "eval"] == [25, 40]
    report = json.loads((tmp_path / "run" / "training_report.json").read_text())
    assert report["held_out"]["decoded"]["tau"] >= 1
    assert len(report["held_out"]["accuracy"]) == 3
    assert report["data"]["rows"] == 22
    assert drafter.config.target_fingerprint == report["fingerprints"]["target"]
    printed = capsys.readouterr().out
    assert printed.index("a step takes some ") < printed.index("accuracy")
    assert "real τ" in printed


def test_a_run_starts_from_another_drafter_and_adds_a_head(tiny_pair: TinyPair, tmp_path: Path) -> None:
    first = train(TrainConfig(**tiny_run(tiny_pair.target, tmp_path, max_steps=2)))
    options = tiny_run(tiny_pair.target, tmp_path, max_steps=1, learning_rate=1e-9, init=str(first))
    second = train(TrainConfig(**{**options, "out": str(tmp_path / "second"), "head": "residual", "head_rank": 4}))
    before, after = (Drafter.from_pretrained(path).state_dict() for path in (first, second))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert set(after.keys() - before.keys()) == {f"head.{n}.weight" for n in ("previous", "context", "output")}
    with pytest.raises(ConfigError, match=r"num_hidden_layers 1, not 2.*give its shape as options"):
        train(TrainConfig(**{**options, "out": str(tmp_path / "third"), "num_layers": 2}))


def test_a_markov_head_starts_from_a_residual_one(tiny_pair: TinyPair, tmp_path: Path) -> None:
    options = tiny_run(tiny_pair.target, tmp_path, head="residual", head_rank=4, max_steps=3, learning_rate=0.01)
    first = train(TrainConfig(**options))
    options |= {"max_steps": 1, "learning_rate": 1e-9, "init": str(first), "head": "markov"}
    second = train(TrainConfig(**{**options, "out": str(tmp_path / "second")}))
    before, after = (Drafter.from_pretrained(path).state_dict() for path in (first, second))
    assert before.keys() - after.keys() == {"head.context.weight"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    with pytest.raises(ConfigError, match=r"'rank': 4, .*, not .*'rank': 5"):
        train(TrainConfig(**{**options, "out": str(tmp_path / "third"), "head_rank": 5}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"reveal": 0.5}, {"head": "residual", "head_rank": 8, "optimizer": "muon", "soft_targets": 0.5}]
)
def test_killed_at_any_moment_it_goes_on_to_the_same_weights(
    tiny_pair: TinyPair, tmp_path: Path, changes: dict[str, Any]
) -> None:
    options = tiny_run(tiny_pair.target, tmp_path, max_steps=60, epochs=99, save_steps=7, log_steps=1, **changes)
    whole = run({**options, "out": str(tmp_path / "whole")})
    start(options, DIES_AFTER="step 24 ").die()
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["position"]["step"]
    assert saved == 21
    assert f"going on from step {saved}" in start(options).finish()
    assert_same(weights(options["out"]), whole)
    steps = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if row["kind"] == "train"] == list(range(1, 61))


def test_an_interrupt_saves_and_the_run_goes_on(tiny_pair: TinyPair, tmp_path: Path) -> None:
    options = tiny_run(tiny_pair.target, tmp_path, max_steps=400, epochs=999, log_steps=1)
    log = tmp_path / "run" / "log.jsonl"

    def interrupt() -> None:
        while not log.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt, match="goes on from there"):
        train(TrainConfig(**options))
    step = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["position"]["step"]
    assert 1 <= step < 400
    trainer = Trainer(TrainConfig(**options), Ranks("cpu"))
    trainer.resume()
    assert trainer.schedule.position.step == step


@pytest.mark.slow
def test_resuming_another_run_is_refused(tiny_pair: TinyPair, tmp_path: Path) -> None:
    options = tiny_run(tiny_pair.target, tmp_path, max_steps=2)
    run(options)
    with pytest.raises(ConfigError, match=r"learning_rate = 0\.0006, this run has 0\.1"):
        run({**options, "learning_rate": 0.1})
    run({**options, "log_steps": 5, "eval_max_tokens": 3})
    write_rows(tmp_path / "rows.jsonl", [{"prompt_token_ids": [5, 6], "response_token_ids": [7, 8, 9]}] * 4)
    with pytest.raises(ConfigError, match="another data"):
        run(options)
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="remove it to start over"):
        run(options)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"soft_targets": 0.5, "window": 6}])
def test_grouped_attention_trains_like_the_masked_one(
    tiny_pair: TinyPair, tmp_path: Path, changes: dict[str, Any]
) -> None:
    found = []
    for attention in ("sdpa", "grouped"):
        options = tiny_run(tiny_pair.target, tmp_path, attention=attention, out=str(tmp_path / attention), **changes)
        found.append(run(options))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-4, rtol=1e-3, msg=name)


def test_passes_do_not_change_the_step(tiny_pair: TinyPair, tmp_path: Path) -> None:
    whole = run(tiny_run(tiny_pair.target, tmp_path, max_steps=3))
    parts = run(tiny_run(tiny_pair.target, tmp_path, max_steps=3, rows_per_pass=30, out=str(tmp_path / "parts")))
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.slow
def test_a_drafter_learns_the_same_from_memory(tiny_pair: TinyPair, tmp_path: Path) -> None:
    options = tiny_run(tiny_pair.target, tmp_path, soft_targets=0.5, max_steps=8)
    online, memory, default = (
        run({**options, "features": features, "out": str(tmp_path / features)})
        for features in ("online", "memory", "auto")
    )
    assert_same(memory, default)
    for name, tensor in online.items():
        torch.testing.assert_close(memory[name], tensor, atol=1e-3, rtol=1e-2, msg=name)


@pytest.mark.slow
def test_cached_features_train_like_online_ones(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(cache_module, "SHARD_TOKENS", 300)
    options = tiny_run(tiny_pair.target, tmp_path, dtype="bfloat16", soft_targets=0.5)
    online = run({**options, "features": "online", "out": str(tmp_path / "online")})
    cached = run({**options, "features": "cache", "cache_dir": str(tmp_path / "cache")})
    for name, tensor in online.items():
        torch.testing.assert_close(cached[name], tensor, atol=2e-3, rtol=0.02, msg=name)
    assert "GB in" in capsys.readouterr().out
    shards = sorted((tmp_path / "cache").glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    times = {path: path.stat().st_mtime_ns for path in shards if path.exists()}
    again = run({**options, "features": "cache", "cache_dir": str(tmp_path / "cache"), "out": str(tmp_path / "again")})
    assert_same(again, cached)
    assert all(path.stat().st_mtime_ns == at for path, at in times.items())
    hard = {**options, "soft_targets": 0.0, "max_steps": 1, "out": str(tmp_path / "hard")}
    run({**hard, "features": "cache", "cache_dir": str(tmp_path / "cache")})  # final states it does not need do no harm
    assert all(path.stat().st_mtime_ns == at for path, at in times.items())
    with pytest.raises(ConfigError, match="made with another taps"):
        run({**options, "features": "cache", "cache_dir": str(tmp_path / "cache"), "out": "x", "taps": [0, 1]})
    shards[0].write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="remove the file"):
        run({**options, "features": "cache", "cache_dir": str(tmp_path / "cache"), "out": str(tmp_path / "bad")})


@pytest.mark.parametrize(
    "changes",
    [
        {"taps": (-1,)},
        {"num_layers": 2, "taps": "1", "intermediate_size": 20},
        {"block_size": 9, "gamma": 2.0, "window": 5, "soft_targets": 1.0, "dtype": "bfloat16"},
        {"head": "residual", "head_rank": 8, "soft_targets": 0.1, "dtype": "bfloat16"},
        {"head": "markov", "head_rank": 8, "loss_decay": "pace"},
    ],
)
def test_every_ablation_trains(tiny_pair: TinyPair, tmp_path: Path, changes: dict[str, Any]) -> None:
    options = tiny_run(
        tiny_pair.target, tmp_path, **{"max_steps": 2, "eval_prompts": 1, "eval_max_tokens": 4, **changes}
    )
    run(options)
    shape = Drafter.from_pretrained(tmp_path / "run" / "drafter").config
    if changes.get("taps") == (-1,):
        assert shape.target_layer_ids == (-1,)
    if "window" in changes:
        assert shape.sliding_window == 5
        assert shape.block_size == 9
    assert (shape.head.type if shape.head else "none") == changes.get("head", "none")
    if "num_layers" in changes:
        assert (shape.num_hidden_layers, shape.intermediate_size) == (2, 20)
        assert shape.target_layer_ids == (1,)


def test_a_block_depends_on_its_own_tokens_and_on_features_before_its_anchor_only(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    trainer = Trainer(TrainConfig(**tiny_run(tiny_pair.target, tmp_path)), Ranks("cpu"))
    torch.manual_seed(0)
    anchors = torch.tensor([[2, 5], [1, 7]])
    taps, embeddings = torch.randn(2, 9, 64), torch.randn(2 * 2 * 4, 32)
    positions = (anchors[..., None] + torch.arange(4)).flatten()

    def hidden() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = trainer.learner.model(taps, anchors, embeddings, positions)
        return result.view(4, -1)

    def changed(before: torch.Tensor) -> list[int]:
        return (hidden() != before).any(1).nonzero().flatten().tolist()

    for block in range(4):
        before = hidden()
        embeddings[block * 4 + 1] += 1
        assert changed(before) == [block]
    for document, position, sees in [(0, 1, [0, 1]), (0, 2, [1]), (0, 5, []), (1, 0, [2, 3]), (1, 6, [3]), (1, 8, [])]:
        before = hidden()
        taps[document, position] += 1
        assert changed(before) == sees


@pytest.mark.slow
def test_two_processes_train_what_one_does_and_go_on_when_killed(tiny_pair: TinyPair, tmp_path: Path) -> None:
    options = tiny_run(tiny_pair.target, tmp_path, max_steps=9, tokens_per_batch=150, log_steps=1, save_steps=2)
    single = run({**options, "out": str(tmp_path / "single")})
    two = {**options, "out": str(tmp_path / "two")}
    for process in start_nodes(two, two):
        process.finish()
    for name, tensor in single.items():
        torch.testing.assert_close(weights(two["out"])[name], tensor, atol=1e-4, rtol=1e-3, msg=name)
    assert drafter_weights(tmp_path / "two").keys() == drafter_weights(tmp_path / "single").keys()
    killed = {**two, "out": str(tmp_path / "killed")}
    first, second = start_nodes(killed, killed, DIES_AFTER="step 4 ")
    first.die()
    second.kill()
    saved = torch.load(tmp_path / "killed" / "checkpoint.pt", weights_only=True)["position"]["step"]
    assert saved == 2
    outputs = [process.finish() for process in start_nodes(killed, killed)]
    assert f"going on from step {saved}" in outputs[0]
    assert_same(weights(tmp_path / "killed"), weights(two["out"]))


def test_nodes_that_share_no_files_are_refused(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "all_see", lambda self, value: False)
    with pytest.raises(ConfigError, match="put --out on a file system that all nodes share"):
        run(tiny_run(tiny_pair.target, tmp_path))


def test_minutes_bound_a_run(tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count(0, 0.05)
    monkeypatch.setattr("volley.train.loop.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    options = tiny_run(tiny_pair.target, tmp_path, max_steps=None, max_minutes=0.01, epochs=9999)
    run(options)
    position = json.loads((tmp_path / "run" / "training_report.json").read_text())["position"]
    assert position["step"] > 1
    assert 0.6 <= position["seconds"] < 0.9


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"taps": [0, 4]}, ConfigError, "layer 4 does not exist"),
        ({"taps": 3}, ConfigError, "only 1 layers lie between"),
        ({"mask_token_id": 400}, ConfigError, "outside the target's 260"),
        ({"mask_token_id": 1}, ConfigError, "occurs in the data"),
        ({"max_length": 8}, InputError, "raise --max-length"),
        ({"target": "/nowhere"}, CheckpointError, "/nowhere is no folder here"),
        ({"data": ["/nowhere.jsonl"]}, InputError, "does not exist"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_remedy(
    tiny_pair: TinyPair, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(TrainConfig(**tiny_run(tiny_pair.target, tmp_path, **changes)))


def test_a_damaged_target_is_refused(tiny_pair: TinyPair, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_pair.target, target)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read .*fetch the checkpoint again"):
        train(TrainConfig(**tiny_run(target, tmp_path)))
    shutil.copy(Path(tiny_pair.target) / "model.safetensors", weights)
    for path in target.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        train(TrainConfig(**tiny_run(target, tmp_path)))


def test_token_ids_of_another_target_are_refused(tiny_pair: TinyPair, tmp_path: Path) -> None:
    options = tiny_run(tiny_pair.target, tmp_path)
    write_rows(tmp_path / "rows.jsonl", [{"prompt_token_ids": [5], "response_token_ids": [7, 900]}])
    with pytest.raises(InputError, match="outside the target's vocabulary of 260"):
        loop.train(TrainConfig(**options))
