"""Unknown settings by keyword: volley's error, with the nearest name."""

from dataclasses import replace
from typing import Any

import pytest

from volley import CapacityConfig, DecodingConfig, DiffusionParams, SamplingParams
from volley.errors import ConfigError
from volley.recalibrate.options import RecalibrateConfig
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
        ({"max_tokens": "5"}, "max_tokens is '5'; it must be a number"),
        ({"temperature": "0.5"}, "temperature is '0.5'; it must be a number"),
        ({"logprobs": 3}, "logprobs is 3; it must be True or False; top_logprobs asks for alternatives"),
    ],
)
def test_values_of_another_type_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**given)


def test_copies_are_checked_too_and_known_fields_pass() -> None:
    params = replace(SamplingParams(max_tokens=3), top_k=5)
    assert (params.max_tokens, params.top_k) == (3, 5)
    with pytest.raises(ConfigError, match="did you mean 'top_p'"):
        replace(params, topp=1)  # type: ignore[call-arg]
