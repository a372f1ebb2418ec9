"""The short form of ``benchmarks/serve_load.py``."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import TinyPair
from tests.serve.running import Tiny

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_load.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve_load", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_load"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("policy", [None, "fixed"])
def test_mixed_load_with_clients_that_leave_and_preemptions(tiny_pair: TinyPair, policy: str | None) -> None:
    outcome, metrics = script().run(Tiny(tiny_pair), requests=200, concurrency=32, policy=policy)
    assert outcome.problems == []
    assert outcome.counts["left"] > 5
    assert outcome.counts["greedy"] > 30
    assert outcome.counts["met again"] > 5
    assert metrics["volley:num_preemptions_total"] > 0
    assert metrics["volley:kv_pages_used"] == 0
    if policy == "fixed":
        assert metrics["volley:spec_decode_num_accepted_tokens_total"] > 500
