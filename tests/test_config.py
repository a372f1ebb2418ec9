"""Settings: what cannot be is refused with a remedy, what follows from them is worked out in one place."""

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from volley.config import CapacityConfig, DecodingConfig, split_options
from volley.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fixed", "block_size": 3}, "give one of them"),
        ({"block_size": 0}, "1 .plain decoding. or more"),
        ({"denoising_steps": 0}, "must be at least 1"),
        ({"denoising_schedule": "cosin"}, "did you mean 'cosine'"),
        ({"verification": "math"}, "use auto, rejection or coupled"),
        ({"draft_window": -1}, "0 for the whole context, or None for the drafter's own"),
        ({"verification": "rejection", "denoising_steps": 2}, "use verification='coupled' or denoising_steps=1"),
        ({"tree_nodes": 1}, "a tree has 2 or more"),
        ({"tree_nodes": 8, "denoising_steps": 2}, "use denoising_steps=1, or tree_nodes=None"),
        ({"tree_nodes": 8, "verification": "rejection"}, "use verification='coupled' or 'auto', or tree_nodes=None"),
        ({"max_running": 0}, "at least 1"),
        ({"max_batch_tokens": 0}, "at least 1"),
        ({"page_size": 0}, "at least 1 token"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_options(options)


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        DecodingConfig().denoising_steps = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, None),
        ({"tree_nodes": 8}, 7),
        ({"denoising_steps": 2}, 0),
        ({"verification": "rejection"}, 0),
        ({"verification": "coupled"}, None),
    ],
)
def test_trees_are_the_policys_wherever_they_can_be(options: dict[str, Any], most: int | None) -> None:
    assert DecodingConfig(**options).max_tree_nodes == most


@pytest.mark.parametrize(
    ("options", "without_seed", "with_seed"),
    [
        ({}, False, True),
        ({"verification": "coupled"}, True, True),
        ({"verification": "rejection"}, False, False),
        ({"denoising_steps": 2}, True, True),
        ({"tree_nodes": 8}, True, True),
    ],
)
def test_seeds_and_drafts_without_a_distribution_are_matched(
    options: dict[str, Any], without_seed: bool, with_seed: bool
) -> None:
    config = DecodingConfig(**options)
    assert (config.matches(None), config.matches(0)) == (without_seed, with_seed)


def test_options_find_their_config_and_unknown_ones_are_named() -> None:
    decoding, capacity = split_options({"block_size": 3, "page_size": 4, "kv_dtype": "int8"})
    assert decoding == DecodingConfig(block_size=3, kv_dtype="int8")
    assert capacity == CapacityConfig(page_size=4)
    assert split_options({}) == (DecodingConfig(), CapacityConfig())
    with pytest.raises(ConfigError, match="page_size"):
        split_options({"page_sise": 4})


def test_a_config_and_options_that_it_holds_do_not_go_together() -> None:
    config, capacity = DecodingConfig(policy="fixed"), CapacityConfig(page_size=4)
    assert split_options({"page_size": 8}, config) == (config, CapacityConfig(page_size=8))
    assert split_options({"exact": True}, capacity=capacity) == (DecodingConfig(exact=True), capacity)
    with pytest.raises(ConfigError, match="config is given, and exact, tree_nodes beside it"):
        split_options({"exact": True, "tree_nodes": 8}, config)
    with pytest.raises(ConfigError, match="capacity is given, and num_pages beside it"):
        split_options({"num_pages": 8}, config, capacity)


def test_no_name_is_declared_twice() -> None:
    assert not {field.name for field in fields(DecodingConfig)} & {field.name for field in fields(CapacityConfig)}
