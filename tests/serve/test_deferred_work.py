"""A server whose events go out within the next step, as on a GPU: clients see what they see otherwise."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.serve.running import Running, Tiny, running, wait_until
from tests.serve.test_lifecycle import LONG, begin
from volley import Engine
from volley.decode.on_device import Reading
from volley.engine import engine as engine_module
from volley.engine.deferred_work import DeferredWork
from volley.engine.step import Step
from volley.serve.metrics import Metrics


def streamed(server: Running, prompt: str, **body: object) -> str:
    with server.client.stream("POST", "/v1/completions", json={"prompt": prompt, "stream": True, **body}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


@pytest.mark.slow
def test_answers_are_whole_and_come_while_others_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, noted = tiny.engine(policy="fixed"), list[str]()
    engine.deferred_work = DeferredWork(torch.device("cuda"))
    accept, state = engine_module.accept, Metrics.state

    def noting(step: Step, readings: Sequence[Reading]) -> None:
        noted.append("accept")
        accept(step, readings)

    def telling(metrics: Metrics, own: Engine) -> None:  # with all that a step brought
        noted.append("told")
        state(metrics, own)

    monkeypatch.setattr(engine_module, "accept", noting)
    monkeypatch.setattr(Metrics, "state", telling)
    texts = [f"prompt {number}" for number in range(6)]
    expected = [tiny.answer(text, max_tokens=20) for text in texts]
    noted.clear()
    with running(engine) as server, ThreadPoolExecutor(8) as pool:
        other = begin(server)
        lines = other.iter_lines()
        next(lines)
        body = {"max_tokens": 20, "temperature": 0}
        answers = [pool.submit(streamed, server, text, **body) for text in texts[:3]]
        answers += [pool.submit(server.complete, text, **body) for text in texts[3:]]
        found = [answer.result() for answer in answers]
        assert server.engine.snapshot().running == 1, "the long one still runs"
        assert [own if isinstance(own, str) else own.json()["choices"][0]["text"] for own in found] == expected
        steps = list(noted)
        assert set(steps[::2]) == {"told"}, "before the results of each step are read"
        assert set(steps[1::2]) == {"accept"}, "and never after"
        other.close()
        server.settle()
        assert server.complete(texts[0], max_tokens=20, temperature=0).json()["choices"][0]["text"] == expected[0]
        assert len(streamed(server, texts[0], **{**LONG, "max_tokens": 30})) > 0
        wait_until(server.is_idle)
