"""A prompt that reaches the server while another answer is drafted is read before that draft is verified."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.running import Tiny, running
from volley.engine.pacing import Pacing
from volley.engine.step import Step
from volley.proposers.block import BlockProposer


@pytest.mark.slow
def test_drafts_give_way_to_prompts_that_come(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine(policy="fixed")
    propose, gives_way, gave = BlockProposer.propose, Pacing.gives_way, list[bool]()

    def slow(proposer: BlockProposer, works: Any, **options: Any) -> float:
        end = time.monotonic() + 0.1
        newcomers = engine.arrivals.newcomers
        assert newcomers is not None
        while time.monotonic() < end and not newcomers():
            time.sleep(0.002)
        return propose(proposer, works, **options)

    def noted(pacing: Pacing, step: Step) -> bool:
        gave.append(gives_way(pacing, step))
        return gave[-1]

    monkeypatch.setattr(BlockProposer, "propose", slow)
    monkeypatch.setattr(Pacing, "gives_way", noted)
    texts = [f"prompt {number}" for number in range(8)]
    expected = [tiny.answer(text, max_tokens=12) for text in texts]
    with running(engine) as server, ThreadPoolExecutor(8) as pool:
        answers = []
        for text in texts:
            answers.append(pool.submit(server.complete, text, max_tokens=12, temperature=0))
            time.sleep(0.03)
        assert [answer.result().json()["choices"][0]["text"] for answer in answers] == expected
        assert any(gave), "drafts took until a prompt came"
        assert not all(gave)
        server.settle()
