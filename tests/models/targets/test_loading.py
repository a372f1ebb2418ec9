"""Places that models come from, and places that their weights go to."""

import json
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.tiny import make_pair, random_drafter
from volley.errors import CheckpointError
from volley.models.drafters.drafter import Drafter
from volley.models.layers.empty_weights import empty_weights
from volley.models.layers.host_memory import MappedFiles
from volley.models.targets import diffusion, loading
from volley.models.targets.loading import (
    announce_download,
    auto_tokenizer,
    drafter_path,
    load_causal_lm,
    load_config,
    straight_to,
)


def test_weights_are_read_where_they_stay(tmp_path: Path) -> None:
    make_pair().hf.save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path, torch.float32, device=torch.device("meta"))
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert straight_to(torch.device("meta")) == {"device_map": torch.device("meta")}
    assert straight_to(torch.device("cpu")) == {}


def test_a_drafter_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_drafter().save_pretrained(tmp_path / "snapshot")
    asked: list[str] = []

    def fetch(name: str, *, dry_run: bool = False, **_: object) -> Any:
        if dry_run:
            return []
        asked.append(name)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(loading, "snapshot_download", fetch)
    drafter = Drafter.from_pretrained("somebody/drafter", torch.float32)
    assert (asked, drafter.folder) == (["somebody/drafter"], tmp_path / "snapshot")


def test_the_size_of_a_download_is_told_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only what is not here yet counts."""
    sizes = {
        "model-00001-of-00002.safetensors": 1_200_000_000,
        "config.json": 1_000,
        "model-00002-of-00002.safetensors": 9e8,
    }
    told_before = list[str]()

    def fetch(name: str, *, allow_patterns: list[str], dry_run: bool = False) -> Any:
        if not dry_run:
            told_before.extend(caplog.messages)
            return str(tmp_path)
        assert any(fnmatch("model-00001-of-00002.safetensors", pattern) for pattern in allow_patterns)
        return [SimpleNamespace(file_size=size, will_download="00002-of" not in name) for name, size in sizes.items()]

    monkeypatch.setattr(loading, "snapshot_download", fetch)
    drafter_path("somebody/drafter")
    assert told_before == ["somebody/drafter: fetching 1.2 GB from the hub"]
    caplog.clear()
    sizes["model-00001-of-00002.safetensors"] = 34_000_000
    monkeypatch.setattr(diffusion, "read_kind", lambda _: ({}, "qwen3"))
    monkeypatch.setattr(diffusion.Target, "from_pretrained", lambda *_: told_before.extend(caplog.messages))
    diffusion.load_target("gpt2", torch.float32, "cpu")
    assert told_before[1:] == ["gpt2: fetching 34 MB from the hub"]
    for name in (tmp_path, "some/file.gguf"):
        announce_download(name)
    sizes.clear()
    announce_download("somebody/target")
    assert len(caplog.messages) == 1


def test_an_unreachable_hub_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, **_: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr(loading, "snapshot_download", fetch)
    with pytest.raises(CheckpointError, match=r"'somebody/drafter'.*no route.*give its folder"):
        drafter_path("somebody/drafter")


@pytest.mark.slow
def test_a_target_that_neither_this_machine_nor_the_hub_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, **_: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", fetch)
    with pytest.raises(
        CheckpointError, match=r"target 'somebody/target' is no folder here .*no route.*give its folder"
    ):
        load_config("somebody/target")


def test_weights_are_loaded_without_a_bar_where_nobody_looks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_pair().hf.save_pretrained(tmp_path)
    capfd.readouterr()
    load_causal_lm(tmp_path, torch.float32)
    assert "Loading weights" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["/no/such/folder", "drafter", "a/b/c", "some/file.gguf", "./drafter", "../drafter"])
def test_what_is_no_hub_name_is_a_path(name: str) -> None:
    assert drafter_path(name) == Path(name)


def test_a_bundled_targets_name_is_known_wherever_a_target_is_read() -> None:
    assert load_config("reference-diffusion").model_type == "qwen3"
    assert len(auto_tokenizer("reference-diffusion")) == load_config("reference-diffusion").vocab_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_only_need_a_place_lie_in_the_mapped_file(
    tmp_path: Path, *, tied: bool, dtype: torch.dtype
) -> None:
    made = make_pair(tie_word_embeddings=tied).hf
    made.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model, usual = load_causal_lm(tmp_path, dtype), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert model.config.to_dict() == usual.config.to_dict()
    assert model.generation_config.to_dict() == usual.generation_config.to_dict()
    assert not model.training
    assert_close(model.state_dict(), usual.state_dict(), rtol=0, atol=0)
    assert_close(dict(model.named_buffers()), dict(usual.named_buffers()), rtol=0, atol=0)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    files = MappedFiles()
    held = [files.covers(own.data_ptr(), own.data_ptr() + own.nbytes) for own in model.parameters()]
    assert set(held) == {dtype == torch.float32}


@pytest.mark.parametrize("change", ["two heads", "no class", "misshapen", "missing"])
def test_transformers_reads_what_needs_more_than_a_place(tmp_path: Path, change: str) -> None:
    made = make_pair(tie_word_embeddings=True).hf
    made.save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    if change == "two heads":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    elif change == "no class":
        config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": None}))
    elif change == "misshapen":
        tensors["model.norm.weight"] = torch.ones(3)
    else:
        del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    if change in ("misshapen", "missing"):
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
            load_causal_lm(tmp_path, torch.float32)
        return
    usual = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_close(load_causal_lm(tmp_path, torch.float32).state_dict(), usual.state_dict(), rtol=0, atol=0)


def test_models_without_memory_are_made_in_one_thread_alone() -> None:
    made: list[torch.nn.Linear] = []
    with empty_weights():
        thread = Thread(target=lambda: made.append(torch.nn.Linear(2, 2)))
        thread.start()
        thread.join()
        empty = torch.nn.Linear(2, 2)
    later = torch.nn.Linear(2, 2)
    assert [layer.weight.device.type for layer in (made[0], empty, later)] == ["cpu", "meta", "cpu"]
    assert empty.weight.requires_grad


def test_models_made_in_two_threads_at_once_leave_initial_values_to_others() -> None:
    """First in, first out: functions of PyTorch that each replaced and put back as found would stay replaced."""
    inside, first_left = Event(), Event()

    def make_another() -> None:
        with empty_weights():
            inside.set()
            first_left.wait()

    thread = Thread(target=make_another)
    with empty_weights():
        thread.start()
        inside.wait()
        layers = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)]
    first_left.set()
    thread.join()
    assert all(layer.weight.is_meta for layer in layers)
    torch.manual_seed(0)
    later = torch.nn.Linear(64, 64).weight
    assert 0.1 < float(later.detach().abs().max()) <= 0.125, "uniform within 1 / sqrt(inputs)"


def test_a_hook_is_there_before_threads_go_over_all_of_them() -> None:
    """Drafters are loaded while other threads make modules."""
    failed: list[BaseException] = []

    def make(empty: bool) -> None:
        try:
            for _ in range(2000):
                with empty_weights() if empty else nullcontext():
                    torch.nn.Linear(2, 2)
        except RuntimeError as error:
            failed.append(error)

    threads = [Thread(target=make, args=(empty,)) for empty in (True, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
