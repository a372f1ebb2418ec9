"""Drafters for diffusion language models: trained for those that write causally, refused for others before any work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from tests.conftest import byte_tokenizer
from tests.tiny import greedy, random_prompts
from tests.train.runs import tiny_run
from tests.tune.test_run import SHAPE, make_target
from volley import DiffusionParams, Engine, SamplingParams
from volley.errors import UnsupportedModelError
from volley.models.drafters.export import export
from volley.models.gguf.file import GGUFFile
from volley.models.layers.fingerprint import target_fingerprint
from volley.models.targets.loading import load_causal_lm
from volley.models.targets.target import Target
from volley.train.loop import train
from volley.train.options import TrainConfig
from volley.train.presets import read_preset
from volley.tune.options import TuneConfig
from volley.tune.run import tune

PLAIN = DiffusionParams(mode="autoregressive")


@pytest.fixture(scope="module")
def fast_dllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is published: code of its own, and the weights of a Qwen2."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    folder = make_target(tmp_path_factory.mktemp("fast"), Qwen2Config(**shape))
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "Fast_dLLM_Qwen", "architectures": ["Fast_dLLM_QwenForCausalLM"], "mask_token_id": 3}
    own |= {"bd_size": 4, "auto_map": {"AutoConfig": "configuration.C", "AutoModelForCausalLM": "modeling.M"}}
    (folder / "config.json").write_text(json.dumps({**config, **own}))
    return folder


def trained(target: str, folder: Path) -> object:
    return train(TrainConfig(**tiny_run(Path(target), folder)))


def tuned(target: str, folder: Path) -> object:
    """With an endpoint that nobody serves: it would be asked before the target is loaded."""
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    own = {"prompts": (str(folder / "prompts.jsonl"),), "endpoint": "http://localhost:9/v1"}
    return tune(TuneConfig(target=target, out=folder / "out", **own))


ENTRIES: dict[str, Callable[[str, Path], object]] = {
    "train": trained,
    "tune": tuned,
    "presets": lambda target, _: read_preset(target),
    "Target.from_pretrained": lambda target, _: Target.from_pretrained(target),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("sdar", "no drafter serves: a row of its logits predicts its own token.*mode 'self'"),
        ("sdar_moe", "no drafter serves: a row of its logits predicts its own token.*mode 'self'"),
        ("diffusion_gemma", "no drafter serves: its layers' states.*mode 'self'"),
        ("llada2_moe", "transformers has no such architecture.*Register a class"),
        ("Dream", "every token sees every other.*Use a block-diffusion model"),
    ],
)
def test_who_writes_no_next_token_is_refused_by_its_config_alone(
    entry: str, model_type: str, reason: str, tmp_path: Path
) -> None:
    """The folder has neither weights nor tokenizer."""
    folder = tmp_path / "target"
    folder.mkdir()
    values: dict[str, Any] = {"model_type": model_type, "auto_map": {"AutoConfig": "configuration.C"}}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModelError, match=reason):
        ENTRIES[entry](str(folder), tmp_path)


@pytest.mark.slow
def test_fast_dllm_gets_a_drafter_for_its_causal_mode(
    fast_dllm: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """That mode is the causal LM whose weights it has: training reads what decoding computes."""
    assert read_preset(str(fast_dllm)).num_layers == 1
    folder = train(TrainConfig(**tiny_run(fast_dllm, tmp_path, eval_prompts=2, eval_max_tokens=8)))
    report = json.loads((tmp_path / "run" / "training_report.json").read_text())
    assert report["held_out"]["decoded"]["cycles"] > 0
    engine = Engine.from_pretrained(fast_dllm, drafter=folder, dtype=torch.float32, policy="fixed")
    prompts, params = random_prompts(4, vocab=260), SamplingParams(max_tokens=12, diffusion=PLAIN)
    results = list(engine.generate(prompts, params))
    model = load_causal_lm(fast_dllm, torch.float32, "eager")
    assert [result.token_ids for result in results] == [greedy(model, prompt, 12) for prompt in prompts]
    assert all(max(result.stats.block_sizes) > 1 for result in results), "the drafter drafts"
    assert engine.drafter is not None
    assert engine.drafter.config.target_fingerprint == target_fingerprint(engine.target.model)
    capfd.readouterr()
    export(folder, tmp_path / "drafter.gguf", "gguf", target=str(fast_dllm))
    assert "custom code" not in capfd.readouterr().out, (
        "transformers asks on the terminal whether to run a checkpoint's"
    )
    assert GGUFFile(tmp_path / "drafter.gguf").strings("tokenizer.ggml.tokens")[
        5
    ] == byte_tokenizer().convert_ids_to_tokens(5)
