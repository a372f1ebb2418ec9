"""Folders of targets whose files are not what they should be: what is said of them, on loading and by ``volley inspect``."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import TinyPair
from tests.tiny import random_drafter
from volley.errors import CheckpointError, UnsupportedModelError
from volley.models.diagnosis import diagnose
from volley.models.targets.target import Target, load_tokenizer


@pytest.fixture
def folder(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A whole target whose weights are in several files."""
    own = tmp_path / "target"
    shutil.copytree(tiny_pair.target, own)
    (own / "model.safetensors").unlink()
    tiny_pair_model(tiny_pair).save_pretrained(own, max_shard_size="20KB")
    assert len(shards(own)) > 2
    return own


def tiny_pair_model(tiny_pair: TinyPair) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_pair.target)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(folder: Path) -> None:
    shards(folder)[1].write_bytes(shards(folder)[1].read_bytes()[:-10])


def empty(folder: Path) -> None:
    shards(folder)[1].write_bytes(b"")


def pointer(folder: Path) -> None:
    shards(folder)[1].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")


def lost(folder: Path) -> None:
    shards(folder)[1].unlink()


def no_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def no_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, r"model-00002-of-\d+\.safetensors is truncated or damaged .*; fetch it again"),
        (empty, r"model-00002-of-\d+\.safetensors is truncated or damaged .*; fetch it again"),
        (pointer, r"model-00002-of-\d+\.safetensors is a pointer of Git LFS.*git lfs pull"),
        (lost, r"target lacks model-00002-of-\d+\.safetensors; fetch the checkpoint again"),
        (no_map, r"index\.json has no 'weight_map'; fetch"),
        (no_index, r"target lacks model\.safetensors; fetch"),
        (no_tokenizer, r"target has no tokenizer files; put the target's tokenizer files there"),
    ],
)
def test_damaged_files_are_named(folder: Path, damage: Callable[[Path], None], said: str) -> None:
    assert diagnose(folder).problems == []
    damage(folder)
    with pytest.raises(CheckpointError, match=said):
        Target.from_pretrained(folder)
    (problem,) = diagnose(folder).problems
    with pytest.raises(CheckpointError, match=said):
        raise CheckpointError(problem)


def test_weights_of_another_shape_are_named(folder: Path) -> None:
    edit(folder, intermediate_size=24)
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.down_proj\.weight has shape .*, where config.json makes it"
    ):
        Target.from_pretrained(folder, torch.float32)


def test_a_config_that_contradicts_itself_is_a_problem_and_no_crash(folder: Path) -> None:
    edit(folder, layer_types=["full_attention"])
    assert "the config cannot be read" in diagnose(folder).problems[0]


def test_code_that_a_checkpoint_brings_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask on the terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run the code"))
    edit(
        folder,
        model_type="their_own",
        auto_map={"AutoConfig": "theirs.TheirConfig", "AutoModelForCausalLM": "theirs.Theirs"},
    )
    assert "; give it model_type 'qwen3' in its config.json" in diagnose(folder).problems[0]
    edit(folder, architectures=["TheirsForCausalLM"])
    with pytest.raises(
        UnsupportedModelError, match=r"needs Python code of its own .*; give a model whose type transformers"
    ):
        Target.from_pretrained(folder, torch.float32)
    assert "needs Python code of its own" in diagnose(folder).problems[0]
    edit(folder, auto_map={})
    assert "is of a type that transformers" in diagnose(folder).problems[0]
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    settings = {"tokenizer_class": "TheirTokenizer", "auto_map": {"AutoTokenizer": ["theirs.TheirTokenizer", None]}}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        UnsupportedModelError, match=r"needs Python code of its own .*; give one with a tokenizer\.json"
    ):
        load_tokenizer(tokenizer)


def test_a_tokenizer_that_cannot_be_read(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("")
    with pytest.raises(
        CheckpointError, match=r"the tokenizer cannot be read .*; put the target's tokenizer files there again"
    ):
        Target.from_pretrained(folder, torch.float32)


def test_what_is_given_in_the_place_of_a_target(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a file, and no GGUF file; give the folder that holds it"):
        Target.from_pretrained(shards(folder)[0])
    random_drafter().save_pretrained(tmp_path / "drafter")
    with pytest.raises(
        CheckpointError, match=r"holds a drafter, no target; give it as the drafter, and its target as the"
    ):
        Target.from_pretrained(tmp_path / "drafter")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    with pytest.raises(CheckpointError, match=r"nothing has no config\.json: it is empty; give a folder"):
        Target.from_pretrained(nothing)
    (nothing / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds an adapter .* merge it into its base model"):
        Target.from_pretrained(nothing)
