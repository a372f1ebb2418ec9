"""Unknown settings by keyword: volley's error, with the nearest name."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from volley import CapacityConfig, DecodingConfig, DiffusionParams, SamplingParams
from volley.errors import ConfigError
from volley.recalibrate.options import RecalibrateConfig
from volley.tensors import dtype_of
from volley.train.options import PilotOptions, TrainConfig

KINDS = [
    (DiffusionParams, "treshold", "threshold"),
    (SamplingParams, "max_token", "max_tokens"),
    (DecodingConfig, "denoising_step", "denoising_steps"),
    (CapacityConfig, "num_page", "num_pages"),
    (TrainConfig, "learning_rat", "learning_rate"),
    (PilotOptions, "see", "seed"),
    (RecalibrateConfig, "recalibrate_request", "recalibrate_requests"),
]


@pytest.mark.parametrize(("kind", "wrong", "right"), KINDS)
def test_an_unknown_field_names_the_nearest_known_one(kind: Any, wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown field of {kind.__name__} '{wrong}'; did you mean '{right}'"):
        kind(**{wrong: 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": "5"}, "max_tokens is '5'; it must be a whole number"),
        ({"max_tokens": None}, "max_tokens is None; it must be a whole number"),
        ({"max_tokens": True}, "max_tokens is True; it must be a whole number"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        ({"priority": None}, "priority is None; it must be a whole number"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs is 1.5; it must be a whole number or None"),
        ({"stop": [5]}, r"stop is \(5,\); it must be non-empty strings"),
        ({"stop_token_ids": [2.5]}, "stop_token_ids and the tokens of logit_bias must be whole numbers"),
        ({"top_logprobs": 3}, "top_logprobs is 3; it must be 0 without logprobs=True"),
        ({"temperature": "0.5"}, "temperature is '0.5'; it must be a number"),
        ({"logprobs": 3}, "logprobs is 3; it must be True or False; top_logprobs asks for alternatives"),
    ],
)
def test_values_of_another_type_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**given)


def test_stop_tokens_may_be_one_or_none() -> None:
    assert SamplingParams(stop_token_ids=2).stop_token_ids == (2,)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]


def test_a_dtype_may_be_a_name() -> None:
    assert dtype_of("bfloat16") == dtype_of("torch.bfloat16") == dtype_of(torch.bfloat16) == torch.bfloat16
    for wrong in ("auto", "bf16", "int8", "Tensor", None):
        with pytest.raises(ConfigError, match="it must be a floating-point type"):
            dtype_of(wrong)  # type: ignore[arg-type]


def test_copies_are_checked_too_and_known_fields_pass() -> None:
    params = replace(SamplingParams(max_tokens=3), top_k=5)
    assert (params.max_tokens, params.top_k) == (3, 5)
    with pytest.raises(ConfigError, match="did you mean 'top_p'"):
        replace(params, topp=1)  # type: ignore[call-arg]
