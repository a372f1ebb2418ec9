"""The longer runs of the tests of canvases, short. What ``draws`` calls is in those tests."""

import pytest

from benchmarks import diffusion_checks


def test_requests_come_and_leave(capsys: pytest.CaptureFixture[str]) -> None:
    diffusion_checks.check_leaks(20, None)
    said = capsys.readouterr().out
    for name in ("SDAR", "Fast-dLLM v2", "DiffusionGemma"):
        assert f"{name}: 20 turns" in said
    assert said.count("nothing leaked") == 3
