"""The short form of ``benchmarks/serve_load.py``."""

import pytest

from benchmarks import serve_load
from tests.conftest import TinyPair
from tests.serve.running import Tiny


@pytest.mark.slow
def test_mixed_load_with_clients_that_leave_and_preemptions(tiny_pair: TinyPair) -> None:
    outcome, metrics = serve_load.run(Tiny(tiny_pair), requests=200, concurrency=32)
    assert outcome.problems == []
    assert outcome.counts["left"] > 5
    assert outcome.counts["greedy"] > 30
    assert outcome.counts["met again"] > 5
    assert metrics["volley:num_preemptions_total"] > 0
    assert metrics["volley:kv_pages_used"] == 0
    assert metrics["volley:spec_decode_num_accepted_tokens_total"] > 0
