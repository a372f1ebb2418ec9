"""A server in a thread of this process, on a tiny pair whose drafter is often right."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import torch
from openai import OpenAI

from tests.conftest import TinyPair
from tests.tiny import teach
from volley import Engine, SamplingParams
from volley.chat import Prompt
from volley.models.drafters.drafter import Drafter
from volley.models.targets.target import Target
from volley.serve.config import ServeConfig
from volley.serve.server import Server
from volley.serve.service import Service

MODEL = "tiny"


class Known(dict[tuple[int, ...], Sequence[int]]):
    """Answers that the drafter mostly knows; of other prompts it knows nothing."""

    def __missing__(self, prompt: tuple[int, ...]) -> Sequence[int]:
        return ()


class Tiny:
    """The tiny pair of the test session, engines on it, and what plain decoding writes."""

    def __init__(self, pair: TinyPair) -> None:
        self.target = Target.from_pretrained(pair.target, dtype=torch.float32)
        self.drafter = Drafter.from_pretrained(pair.drafter, torch.float32)
        self.plain = Engine(self.target, block_size=1)
        self.known = Known()

    def engine(self, **options: Any) -> Engine:
        engine = Engine(self.target, self.drafter, **options)
        teach(engine, self.known)
        return engine

    def answer(self, prompt: Prompt, **params: Any) -> str:
        """Plain decoding's text. A greedy answer is taught to the drafter as well."""
        own = SamplingParams(**params)
        ids = self.plain.encode(prompt)
        (result,) = self.plain.generate([ids], own)
        if own.temperature == 0:
            self.known[tuple(ids)] = result.token_ids
        return result.text


class Running:
    """A server under test."""

    def __init__(
        self,
        engine: Engine,
        prepare: Callable[[Service], None] = lambda service: None,
        **config: Any,
    ) -> None:
        self.engine = engine
        own = ServeConfig(**{"port": 0, "receive_timeout": 5.0, **config})
        self.service = Service(engine, own, MODEL)
        prepare(self.service)
        self.server = Server(self.service, own)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        wait_until(lambda: self.server.listening.is_set() or not self.thread.is_alive())
        self.url = "http://{}:{}".format(*self.server.address)
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(f"/v1/{path}", json=body, **options)

    def chat(self, text: str, **body: Any) -> httpx.Response:
        return self.post("chat/completions", {"messages": [{"role": "user", "content": text}], **body})

    def complete(self, prompt: str, **body: Any) -> httpx.Response:
        return self.post("completions", {"prompt": prompt, **body})

    def metrics(self) -> Mapping[str, float]:
        """Without the model's name among the labels."""
        text = re.sub(rf'(,?)model_name="{MODEL}"(,?)', lambda m: m[1] and m[2], self.client.get("/metrics").text)
        lines = [line.replace("{}", "") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def is_idle(self) -> bool:
        now = self.engine.snapshot()
        return self.service.worker.held == 0 and now.running == now.waiting == now.pages_used == 0

    def settle(self) -> None:
        """Wait until nothing is left of any request, and see that the books are right."""
        wait_until(self.is_idle)
        self.engine.check_integrity()

    def stop(self) -> None:
        self.client.close()
        self.server.drain()
        self.thread.join(120)
        assert not self.thread.is_alive()


def wait_until(condition: Any, seconds: float = 300) -> None:
    """So long at most: a busy machine takes its time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@contextmanager
def running(
    engine: Engine,
    prepare: Callable[[Service], None] = lambda service: None,
    **config: Any,
) -> Iterator[Running]:
    server = Running(engine, prepare, **config)
    try:
        yield server
    finally:
        server.stop()


def openai_client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120)
