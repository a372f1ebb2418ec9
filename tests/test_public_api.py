"""The public surface: what ``import volley`` offers and what it costs."""

import subprocess
import sys

import pytest

import volley


def test_every_public_name_is_importable_and_sorted() -> None:
    assert volley.__all__ == sorted(volley.__all__)
    for name in volley.__all__:
        assert getattr(volley, name).__name__ == name


def test_the_public_names_are_the_documented_ones() -> None:
    documented = "Drafter Engine GenerationResult GenerationStats SamplingParams Target TextChunk"
    assert volley.__all__ == documented.split()


def test_public_names_are_documented_where_they_live() -> None:
    for name in volley.__all__:
        assert getattr(volley, name).__doc__, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'volley' has no attribute 'Enigne'"):
        _ = volley.Enigne  # type: ignore[attr-defined]


def test_importing_volley_does_not_import_torch() -> None:
    script = "import sys, volley; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"
