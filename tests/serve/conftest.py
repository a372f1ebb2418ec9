from collections.abc import Iterator

import pytest

from tests.conftest import TinyPair
from tests.serve.running import Running, Tiny, running


@pytest.fixture(scope="session")
def tiny(tiny_pair: TinyPair) -> Tiny:
    return Tiny(tiny_pair)


@pytest.fixture(scope="module")
def server(tiny: Tiny) -> Iterator[Running]:
    """One server for a whole file of tests; each must leave it idle."""
    with running(tiny.engine()) as server:
        yield server
        server.settle()
