"""The kernels in C on each kind of instructions that the CPU has."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from volley import library, native

needs_kernels = pytest.mark.skipif(not native.available, reason="the kernels in C were not built, or not for this CPU")
LEVELS = range(1, library._usable + 1)
"""AVX2 alone, AVX512's dot products, AMX tiles."""


@contextmanager
def kernels_of(level: int) -> Iterator[None]:
    """Inside, products and attention run on the instructions of ``level``; outside, on the most that the CPU has."""
    assert library._library is not None
    assert library._library.usable(level) == level
    try:
        yield
    finally:
        library._library.usable(library._usable)
