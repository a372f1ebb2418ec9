"""How vLLM is told to draft with volley, and which vLLM is refused; nothing here needs vLLM."""

import logging
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import TinyPair
from tests.tiny import random_drafter
from volley.config import DecodingConfig
from volley.errors import ConfigError, MismatchError, UnsupportedModelError
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.vllm import PluginOptions, engine_args
from volley.vllm.options import NOT_IN_VLLM, check_engine, spread_over_drafts
from volley.vllm.passes import PassTaps


@pytest.mark.skipif(find_spec("vllm") is None, reason="there is no vLLM to import")
def test_importing_volley_imports_no_vllm() -> None:
    code = "import sys, volley, volley.vllm, volley.vllm.proposer; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options_travel_through_vllms_configuration(tiny_pair: TinyPair) -> None:
    options = PluginOptions(drafter=str(tiny_pair.drafter), policy="feedback", denoising_steps=2, draft_window=64)
    args = engine_args(options)
    assert args["speculative_config"] == {
        "method": "custom_class",
        "model": "volley.vllm.Proposer",
        "num_speculative_tokens": 5,
    }
    assert args["enforce_eager"] is True
    keys = {
        "drafter",
        "policy",
        "denoising_steps",
        "denoising_schedule",
        "denoising_threshold",
        "draft_temperature",
        "draft_window",
    }
    assert args["additional_config"]["volley"].keys() == keys
    assert PluginOptions.from_config(args["additional_config"]) == options


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "was not told its drafter"),
        ({"volley": {"policy": "fixed"}}, "was not told its drafter"),
        ({"volley": {"drafter": "x", "polcy": "fixed"}}, "did you mean 'policy'"),
        ({"volley": {"drafter": "x", "denoising_steps": 0}}, "at least 1"),
        ({"volley": {"drafter": "x", "denoising_schedule": "cosin"}}, "did you mean 'cosine'"),
        ({"volley": {"drafter": "x", "denoising_threshold": 1.5}}, r"a probability in \(0, 1\]"),
        ({"volley": {"drafter": "x", "draft_window": -1}}, "draft_window is -1"),
        ({"volley": {"drafter": "x", "draft_temperature": 0.5}}, "vLLM tells a proposer no temperatures"),
        ({"volley": {"drafter": "x", "policy": 8}}, "policy is 8; .* give its name"),
        ({"volley": {"drafter": "x", "block_size": 8}}, "block_size is a setting of volley's own engine: .*fixed:8"),
        ({"volley": {"drafter": "x", "tree_nodes": 8}}, "verifies chains only; leave it out"),
        ({"volley": {"drafter": "x", "kv_dtype": "int8"}}, "give vLLM --kv-cache-dtype"),
    ],
)
def test_options_that_cannot_be_used(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PluginOptions.from_config(config)


def test_every_setting_of_the_engine_is_one_of_the_plugin_or_refused() -> None:
    decoding, plugin = ({field.name for field in fields(config)} for config in (DecodingConfig, PluginOptions))
    assert decoding - plugin == NOT_IN_VLLM.keys()


def test_where_a_proposer_cannot_work_vllms_own_method_does(
    tiny_pair: TinyPair, caplog: pytest.LogCaptureFixture
) -> None:
    options = PluginOptions(drafter=str(tiny_pair.drafter))
    with caplog.at_level(logging.WARNING, "vllm.volley"):
        args = engine_args(options, tensor_parallel_size=2)
    assert args == {
        "speculative_config": {"method": "dflash", "model": str(tiny_pair.drafter), "num_speculative_tokens": 5}
    }
    assert "split over processes" in caplog.text


def test_vllms_own_method_knows_no_heads(tmp_path: Path) -> None:
    random_drafter(head=HeadConfig(type="residual", rank=4)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"sequential head.*split over processes"):
        engine_args(PluginOptions(drafter=str(tmp_path)), tensor_parallel_size=2)


def engine_config(eager: bool = True, tensor: int = 1, pipeline: int = 1) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=eager),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline),
    )


@pytest.mark.parametrize(
    ("config", "version", "message"),
    [
        (engine_config(), "0.33.1", r"this is vLLM 0.33.1; .* tested with 0.32"),
        (engine_config(eager=False), "0.32.0", "enforce_eager=True"),
        (engine_config(tensor=2), "0.32.0", "tensor or pipeline parallelism"),
        (engine_config(pipeline=2), "0.32.0", "tensor or pipeline parallelism"),
    ],
)
def test_a_vllm_that_is_refused(config: Any, version: str, message: str) -> None:
    check_engine(engine_config(), "0.32.1")
    with pytest.raises(UnsupportedModelError, match=message):
        check_engine(config, version)


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Identity() for _ in range(count))


def test_layers_that_are_not_there(tiny_pair: TinyPair) -> None:
    with pytest.raises(MismatchError, match=r"taps target layers \[1, 5\] and layers \[5\] are not here"):
        PassTaps(Layers(4), [1, 5], 16, lambda _: None)
    with pytest.raises(UnsupportedModelError, match=r"has no `model\.layers` to tap"):
        PassTaps(nn.Linear(2, 2), [1], 16, lambda _: None)


def test_a_pass_whose_hooks_did_not_fire_is_not_taken() -> None:
    taps = PassTaps(Layers(4), [1], 16, lambda _: None)
    assert taps.take() is None
    assert torch.is_inference_mode_enabled() is False


@pytest.mark.parametrize(
    ("values", "ends", "expected"),
    [
        (torch.tensor([0.5, 0.0, 2.0]), [1, 3, 3], [0.5, 1.0, 1.0]),
        (torch.tensor([4, 0], dtype=torch.int32), [0, 2], [1, 1]),
        (torch.tensor([0.7]), [0], []),
    ],
)
def test_values_of_requests_are_spread_over_their_drafts(
    values: torch.Tensor, ends: list[int], expected: list[float]
) -> None:
    output = torch.full((len(expected),), 99, dtype=values.dtype)
    spread_over_drafts(output, values, torch.tensor(ends, dtype=torch.int32), 0, 1)
    assert output.tolist() == expected
