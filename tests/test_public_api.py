"""The public surface: what ``import volley`` offers and what it costs."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

import volley
from tests.tiny import Pair


def test_every_public_name_is_importable_and_sorted() -> None:
    assert volley.__all__ == sorted(volley.__all__)
    for name in volley.__all__:
        assert getattr(volley, name).__name__ == name


def test_the_public_names_are_the_documented_ones() -> None:
    settings, extension_points = (
        ["CapacityConfig", "DecodingConfig", "DiffusionParams"],
        ["Policy", "Proposer", "register_family"],
    )
    engine = ["Drafter", "Engine", "GenerationResult", "GenerationStats", "SamplingParams", "Target", "TextChunk"]
    assert volley.__all__ == sorted([*engine, "Grammar", *settings, *extension_points])


def test_public_names_are_documented_where_they_live() -> None:
    for name in volley.__all__:
        assert getattr(volley, name).__doc__, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'volley' has no attribute 'Enigne'"):
        _ = volley.Enigne  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["", ".DecodingConfig", ".CapacityConfig"])
def test_importing_volley_and_its_settings_does_not_import_torch(name: str) -> None:
    script = (
        f"import sys, volley; volley{name}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"


class Repeats(volley.Proposer):
    """Drafts a token over and over."""

    block_size = 4

    def propose(self, works: Sequence[Any], *, with_confidence: bool) -> float:
        for work in works:
            work.proposal.token_ids += [work.request.anchor] * work.spec.positions
        return 0.0


class Halves(volley.Policy):
    """Verifies half of what was drafted."""

    def decide(self, views: Sequence[Any], under_way: int) -> list[Any]:
        return [view.draft(self.block_size - 1) for view in views]

    def trim(self, cycles: Sequence[Any]) -> list[int]:
        return [cycle.spec.size // 2 for cycle in cycles]


def test_an_engine_takes_a_policy_and_a_proposer_from_outside(pair: Pair) -> None:
    prompt = [5, 6, 7, 8]
    params = volley.SamplingParams(max_tokens=12)
    (plain,) = volley.Engine(pair.target, block_size=1).generate(prompt, params)
    config = volley.DecodingConfig(policy=Halves())
    engine = volley.Engine(pair.target, config=config, capacity=volley.CapacityConfig(page_size=4), proposer=Repeats())
    (result,) = engine.generate(prompt, params)
    assert result.token_ids == plain.token_ids
    assert max(result.stats.block_sizes) == 1 + 3 // 2
