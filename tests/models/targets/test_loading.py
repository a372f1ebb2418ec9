"""Where models come from, and where their weights go."""

from pathlib import Path

import pytest
import torch

from tests.tiny import make_pair, random_drafter
from volley.errors import CheckpointError
from volley.models.drafters.drafter import Drafter
from volley.models.targets import loading
from volley.models.targets.loading import auto_tokenizer, drafter_path, load_causal_lm, load_config, straight_to


def test_weights_are_read_where_they_stay(tmp_path: Path) -> None:
    make_pair().hf.save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path, torch.float32, device=torch.device("meta"))
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert straight_to(torch.device("meta")) == {"device_map": torch.device("meta")}
    assert straight_to(torch.device("cpu")) == {}


def test_a_drafter_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_drafter().save_pretrained(tmp_path / "snapshot")
    asked: list[str] = []

    def fetch(name: str, **_: object) -> str:
        asked.append(name)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(loading, "snapshot_download", fetch)
    drafter = Drafter.from_pretrained("somebody/drafter", torch.float32)
    assert (asked, drafter.folder) == (["somebody/drafter"], tmp_path / "snapshot")


def test_an_unreachable_hub_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, **_: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr(loading, "snapshot_download", fetch)
    with pytest.raises(CheckpointError, match=r"'somebody/drafter'.*no route.*give its folder"):
        drafter_path("somebody/drafter")


@pytest.mark.parametrize("name", ["/no/such/folder", "drafter", "a/b/c", "some/file.gguf"])
def test_what_is_no_hub_name_is_a_path(name: str) -> None:
    assert drafter_path(name) == Path(name)


def test_a_bundled_targets_name_is_known_wherever_a_target_is_read() -> None:
    assert load_config("reference-diffusion").model_type == "qwen3"
    assert len(auto_tokenizer("reference-diffusion")) == load_config("reference-diffusion").vocab_size
