import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.gguf.converted import random_model
from tests.models.gguf.files import write_model
from tests.tiny import VOCAB, eager_model, random_drafter, target_config
from volley.files import BUNDLED_TARGETS, read_json, write_atomically
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.diagnosis import Diagnosis, diagnose, holds_target
from volley.models.drafters.export import export
from volley.tensors import load_tensors, save_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_drafter().save_pretrained(tmp_path)
    return tmp_path


def with_weights(folder: Path, **changes: torch.Tensor | None) -> Diagnosis:
    tensors: dict[str, Any] = {**load_tensors(folder / "model.safetensors"), **changes}
    save_tensors(folder / "model.safetensors", {name: tensor for name, tensor in tensors.items() if tensor is not None})
    return diagnose(folder)


def with_config(folder: Path, **changes: object) -> Diagnosis:
    raw = {**read_json(folder / "config.json"), **changes}
    write_atomically(folder / "config.json", json.dumps(raw))
    return diagnose(folder)


@pytest.mark.parametrize(
    ("form", "title"),
    [("zlab", "z-lab's"), ("speculators", "the speculators"), ("sglang", "z-lab's"), ("transformers", "transformers'")],
)
def test_a_sound_drafter_is_described(folder: Path, form: Any, title: str) -> None:
    export(folder, folder / "out", form)
    found = diagnose(folder / "out")
    assert found.title == f"a DFlash drafter in {title} format"
    assert found.problems == []
    assert found.facts["layers"] == "2 of hidden size 32, MLP 48, 4 heads (2 for K/V) of 8"
    assert found.facts["taps"] == "0, 2 (0-based)"
    assert found.facts["for a target of"] == "4 layers, hidden size 32, 50 tokens"
    assert found.facts["weights"].startswith("25 tensors, BF16, 0.")
    assert found.facts["loads in"] == "volley, vLLM, llama.cpp, SGLang, transformers"


def test_a_gguf_file_of_an_unknown_architecture_is_called_a_target(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", random_model("qwen3"), "qwen3")
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"mamba"))
    found = diagnose(path)
    assert (found.title, found.of_target) == ("a target of architecture mamba", True)
    (problem,) = found.problems
    assert "volley reads GGUF files of llama, qwen2" in problem
    path.write_bytes(path.read_bytes()[:200])
    found = diagnose(path)
    assert found.title == "no GGUF file that volley can read"
    assert "truncated or damaged" in found.problems[0]


def test_names_of_what_is_bundled_stand_for_its_folders(tmp_path: Path) -> None:
    found = diagnose(Path("reference-diffusion"), None)
    assert (found.title, found.of_target, found.problems) == ("a target of type qwen3", True, [])
    assert "by block_diffusion" in found.facts["canvases"]
    drafter = diagnose(Path("reference-markov"), "reference-diffusion")
    assert (drafter.of_target, drafter.problems) == (False, [])
    assert holds_target("reference-diffusion")
    assert not holds_target("reference-markov")
    export(Path("reference-markov"), tmp_path, "speculators", target="reference-diffusion")
    verifier = read_json(tmp_path / "config.json")["speculators_config"]["verifier"]
    assert Path(verifier["name_or_path"]) == BUNDLED_TARGETS["reference-diffusion"], "which others can open"


def test_what_other_engines_cannot_load_is_said(tmp_path: Path) -> None:
    random_drafter(head=HeadConfig(type="residual", rank=4), draft_vocab_size=20).save_pretrained(tmp_path)
    found = diagnose(tmp_path)
    assert found.problems == []
    assert found.facts["sequential head"] == "residual, rank 4"
    assert found.facts["vocabulary"] == "50 tokens, drafts 20 of them; mask token 3"
    assert found.facts["brings its own"] == "head"
    assert "not in vLLM, llama.cpp, SGLang, transformers: its sequential head (residual)" in found.facts["loads in"]


def test_every_wrong_tensor_is_named(folder: Path) -> None:
    found = with_weights(
        folder,
        **{"fc.weight": None, "norm.weight": torch.ones(31), "extra": torch.ones(1), "lm_head.bias": torch.ones(1)},
    )
    assert found.problems == [
        "fc.weight is missing",
        "extra belongs to no part of a drafter",
        "lm_head.bias belongs to no part of a drafter",
        "norm.weight has shape [31], config.json says [32]",
    ]


def test_a_wrong_vocabulary_table_is_named(tmp_path: Path) -> None:
    random_drafter(draft_vocab_size=3).save_pretrained(tmp_path)
    assert diagnose(tmp_path).problems == []
    assert with_weights(tmp_path, d2t=torch.tensor([0, 0, VOCAB])).problems == [
        f"d2t names tokens outside the vocabulary of {VOCAB}"
    ]
    assert "d2t is missing" in with_weights(tmp_path, d2t=None).problems


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (problem,) = diagnose(folder).problems
    assert problem.startswith(f"{file} is truncated or damaged")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": 5, "dflash_config": None}, "has no 'dflash_config'"),
        ({"rope_parameters": {"rope_type": "odd"}}, "cannot use the rope parameters"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads, 3"),
        ({"layer_types": ["full_attention", "odd"]}, "a layer is full_attention or sliding_attention"),
        ({"hidden_size": "32"}, "hidden_size is '32'; it must be an integer"),
        ({"dflash_config": 1, "architectures": []}, "has no 'dflash_config'"),
    ],
)
def test_a_wrong_config_is_named_and_the_weights_are_still_looked_at(
    folder: Path, changes: dict[str, Any], problem: str
) -> None:
    found = with_config(folder, **changes)
    assert problem in found.problems[0]
    assert "weights" in found.facts


def test_an_empty_folder_is_no_drafter(tmp_path: Path) -> None:
    assert len(diagnose(tmp_path).problems) == 2


def test_a_target_is_told_from_a_drafter(tmp_path: Path) -> None:
    eager_model(target_config()).save_pretrained(tmp_path)
    found = diagnose(tmp_path)
    assert found.title == "a target of type qwen3"
    assert found.problems == [f"{tmp_path} has no tokenizer files; put the target's tokenizer files there"]


@pytest.mark.parametrize(
    ("changes", "canvases", "problem"),
    [
        ({"model_type": "sdar"}, "those of sdar", "no tokenizer files"),
        ({"block_diffusion": {"mask_token_id": 3}}, "by block_diffusion", "no tokenizer files"),
        ({"model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"]}, "those of llada2_moe", "runs no code"),
    ],
)
def test_a_diffusion_language_model_is_called_so(
    changes: dict[str, object], canvases: str, problem: str, tmp_path: Path
) -> None:
    eager_model(target_config()).save_pretrained(tmp_path)
    found = with_config(tmp_path, **changes)
    assert found.facts["canvases"].startswith(canvases)
    assert problem in found.problems[0]


def test_a_pair_is_checked(folder: Path) -> None:
    eager_model(target_config()).save_pretrained(folder / "target")
    assert diagnose(folder, str(folder / "target")).problems == []
    eager_model(target_config(num_hidden_layers=2, hidden_size=40, vocab_size=60)).save_pretrained(folder / "other")
    assert diagnose(folder, str(folder / "other")).problems == [
        "the drafter was trained for a target whose hidden size is 32, this target's is 40",
        "the drafter was trained for a target whose vocabulary is 50, this target's is 60",
        "the drafter was trained for a target whose number of target layers is 4, this target's is 2",
        "the drafter taps layer 2, this target has 2 layers",
    ]
    assert "is no folder here" in diagnose(folder, str(folder / "none")).problems[0]
