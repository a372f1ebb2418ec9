"""A drafter says itself which target's weights it was trained on: bundled, exported or certified, without a training report."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.doctor.answers import TARGET, write_answers
from tests.quantised import save_compressed
from volley.doctor.diagnosis import Doctor
from volley.errors import ConfigError
from volley.files import REFERENCE
from volley.models.checkpoints.formats import Format, parse_config, read_checkpoint
from volley.models.drafters.export import export
from volley.train.features import FrozenTarget

NAMES = ("drafter", "drafter-dflash", "drafter-markov")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answers(tmp_path_factory.mktemp("rows") / "rows.jsonl")


def load() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A fine-tune of the bundled target that hardly differs, and an int4 checkpoint of it."""
    pytest.importorskip("compressed_tensors")
    folders = {}
    for name in ("fine-tune", "int4"):
        folder = folders[name] = tmp_path_factory.mktemp(name) / "target"
        shutil.copytree(TARGET, folder)
        (folder / "model.safetensors").unlink()
        model = load()
        if name == "int4":
            save_compressed(model, "W4A16", folder)
            continue
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.01 * weight.std() * torch.randn(weight.shape))
        model.save_pretrained(folder)
    return folders


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("other", "name"), [("fine-tune", "drafter"), ("int4", "drafter-dflash")])
def test_another_target_under_a_bundled_drafter_is_named_first(
    rows: Path, others: dict[str, Path], other: str, name: str
) -> None:
    findings = Doctor(str(others[other]), REFERENCE / name, [rows]).examine().findings
    assert [finding.name for finding in findings][:1] == ["another target's weights"]


def test_all_bundled_drafters_know_their_target() -> None:
    own = FrozenTarget(TARGET, torch.float32, torch.device("cpu")).fingerprint
    assert {read_checkpoint(REFERENCE / name).config.target_fingerprint for name in NAMES} == {own}


@pytest.mark.parametrize("form", ["zlab", "sglang", "speculators", "transformers"])
def test_exported_drafters_know_it_too(tmp_path: Path, form: Format) -> None:
    export(REFERENCE / "drafter-dflash", tmp_path / form, form)
    known = read_checkpoint(REFERENCE / "drafter-dflash").config
    assert read_checkpoint(tmp_path / form).config.target_fingerprint == known.target_fingerprint


@pytest.mark.slow
def test_a_certificate_beside_a_drafter_that_does_not_say_it_tells_it(rows: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(REFERENCE / "drafter-dflash", drafter)
    config = json.loads((drafter / "config.json").read_text())
    fingerprint = config.pop("target_fingerprint")
    (drafter / "config.json").write_text(json.dumps(config))
    for certified, expected in ((fingerprint, []), ("another", ["another target's weights"])):
        (drafter / "certificate.json").write_text(json.dumps({"subject": {"target": certified}}))
        findings = Doctor(TARGET, drafter, [rows]).examine().findings
        assert [finding.name for finding in findings] == expected


def test_a_fingerprint_is_text() -> None:
    config = json.loads((REFERENCE / "drafter" / "config.json").read_text())
    with pytest.raises(ConfigError, match="target_fingerprint is 7; it must be text"):
        parse_config({**config, "target_fingerprint": 7})
