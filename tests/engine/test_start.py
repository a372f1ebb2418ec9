"""Work before an engine serves; tests/gpu/test_graphs.py captures graphs in advance on a pretended GPU."""

import pytest

from tests.tiny import make_pair, random_prompts
from volley import Engine, SamplingParams
from volley.engine.reload import replace_drafter
from volley.engine.runner import Runner
from volley.engine.start import warm_up


def test_no_step_waits_for_the_timing_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = list[int]()

    def seconds(runner: Runner, tokens: int, requests: int) -> float:
        timed.append(tokens)
        return 1e-4 * tokens

    monkeypatch.setattr(Runner, "seconds", seconds)
    pair = make_pair()
    engine = Engine(pair.target, pair.drafter, num_pages=80, max_batch_tokens=128, max_running=8)
    assert warm_up(engine)[0] == 0, "a CPU has no graphs"
    assert max(timed) == 128
    timed.clear()
    params = SamplingParams(max_tokens=12)
    assert len(list(engine.generate(random_prompts(8), params))) == 8
    assert not timed
    replace_drafter(engine, make_pair().drafter)
    assert len(list(engine.generate(random_prompts(8), params))) == 8
    assert max(timed) < 64, "those of one request, before the new drafter drafts"
