"""Files are written whole or not at all, and every way in which one can be wrong is a clear error."""

from pathlib import Path
from typing import Any

import pytest
import torch

from volley.errors import CheckpointError, ConfigError
from volley.files import BUNDLED_TARGETS, find_target, read_json, write_atomically
from volley.tensors import check_finite, check_weights, load_tensors, save_tensors


@pytest.mark.parametrize("text", ["{", '{"a": 1', "\xff", "[1, 2]"])
def test_a_damaged_config_is_a_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json is not (valid JSON|a JSON object)"):
        read_json(tmp_path / "config.json")


def test_a_file_where_a_folder_should_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(CheckpointError, match=r"file/config\.json does not exist; give a folder"):
        read_json(tmp_path / "file" / "config.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json(tmp_path)


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    write_atomically(file, "old")

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(ConfigError, match=r"config\.json cannot be written \(disk full\)"):
        write_atomically(file, "new")
    with pytest.raises(ConfigError, match="disk full"):
        save_tensors(tmp_path / "model.safetensors", {"x": torch.ones(1)})
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file cannot be made a folder \(File exists\)"):
        write_atomically(tmp_path / "file" / "config.json", "{}")


def test_tensors_survive_a_round_trip(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(1, dtype=torch.bfloat16)}
    save_tensors(tmp_path / "model.safetensors", tensors, {"key": "value"})
    loaded = load_tensors(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_tensors_in_use_outlive_their_file(tmp_path: Path) -> None:
    """A new drafter is often copied over the old one, which a server still uses."""
    path = tmp_path / "model.safetensors"
    save_tensors(path, {"weight": torch.ones(1000)})
    weight = load_tensors(path)["weight"]
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert weight.sum() == 1000
    path.write_bytes(b"torn")
    assert weight.sum() == 1000


def test_tensors_that_cannot_be_read_are_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist; give a folder"):
        load_tensors(file)
    file.write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_tensors(file)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing a; unknown b; .* belong together"):
        check_weights(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"a has shape \[3\], config\.json says \[2\]"):
        check_weights(tmp_path, {"a": torch.ones(2)}, {"a": torch.ones(3)})
    check_weights(tmp_path, {"a": torch.ones(2)}, {"a": torch.zeros(2)})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    check_finite(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match="not finite; train it again"):
        check_finite(tmp_path, {"a": torch.tensor([1.0, value])})


def test_a_bundled_targets_name_stands_for_its_folder_unless_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bundled = tmp_path / "package" / "diffusion"
    monkeypatch.setitem(BUNDLED_TARGETS, "reference-diffusion", bundled)
    with pytest.raises(CheckpointError, match=r"is missing; install volley again, or make the model with"):
        find_target("reference-diffusion")
    write_atomically(bundled / "config.json", "{}")
    assert find_target("reference-diffusion") == find_target(Path("reference-diffusion")) == bundled
    (tmp_path / "reference-diffusion").mkdir()
    assert find_target("reference-diffusion") == "reference-diffusion"
    assert find_target("some/model") == "some/model"
