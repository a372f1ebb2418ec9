"""A model's own sampling defaults, as its generation config has them."""

from typing import Any

import pytest
from transformers import GenerationConfig

from volley.errors import ConfigError
from volley.models.targets.sampling_defaults import sampling_defaults


@pytest.mark.parametrize(
    ("own", "want"),
    [
        ({}, {}),
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "min_p": 0.1,
                "repetition_penalty": 1.05,
            },
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05},
        ),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
        ({"temperature": 0.7, "max_new_tokens": 2048}, {"temperature": 0.7, "max_tokens": 2048}),
        ({"temperature": 1, "top_k": -1}, {"temperature": 1, "top_k": 0}),
        ({"max_length": 20, "num_beams": 4}, {}),
    ],
)
def test_what_a_generation_config_sets(own: dict[str, Any], want: dict[str, Any]) -> None:
    assert sampling_defaults(GenerationConfig(**own)) == want


@pytest.mark.parametrize(
    "own", [{"temperature": "hot"}, {"temperature": -1}, {"top_p": 1.5}, {"top_k": 2.5}, {"top_k": True}]
)
def test_what_cannot_be_used_is_an_error(own: dict[str, Any]) -> None:
    config = GenerationConfig()
    for name, value in own.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=rf"{next(iter(own))} is .*--generation-config none"):
        sampling_defaults(config)


def test_a_model_without_one_sets_nothing() -> None:
    assert sampling_defaults(None) == {}
