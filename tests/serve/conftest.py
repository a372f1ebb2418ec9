import time
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.conftest import TinyPair
from tests.serve.running import Running, Tiny, openai_client, running
from volley.engine.runner import Runner
from volley.engine.step import Step

PASS_SECONDS = 0.004


@pytest.fixture(scope="session", autouse=True)
def _passes_take_a_while() -> Iterator[None]:
    """A target this small is otherwise done before a client can go, a queue can fill or time can run out."""
    forward = Runner.forward

    def slow(runner: Runner, step: Step) -> None:
        time.sleep(PASS_SECONDS)
        forward(runner, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "forward", slow)
        yield


@pytest.fixture(scope="session")
def tiny(tiny_pair: TinyPair) -> Tiny:
    return Tiny(tiny_pair)


@pytest.fixture(scope="module")
def server(tiny: Tiny) -> Iterator[Running]:
    """One server for a whole file of tests; each must leave it idle."""
    with running(tiny.engine()) as server:
        yield server
        server.settle()


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    """OpenAI's, of the file's server."""
    with openai_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def drafting(tiny: Tiny) -> Iterator[Running]:
    """A server with a policy that drafts every cycle, whether or not that pays for a target this small."""
    with running(tiny.engine(policy="fixed")) as server:
        yield server
        server.settle()
