"""The kernels in C with AMX tiles and without."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from volley import native

needs_kernels = pytest.mark.skipif(not native.available, reason="the kernels in C were not built, or not for this CPU")


@contextmanager
def tiles(*, wanted: bool) -> Iterator[None]:
    """Inside, the kernels use tiles only if ``wanted``, and if the CPU has them; outside, whenever it has them."""
    assert native._library is not None
    native._library.usable(int(wanted))
    try:
        yield
    finally:
        native._library.usable(1)
