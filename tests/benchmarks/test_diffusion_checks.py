"""The longer runs of the tests of canvases, short."""

import pytest

from benchmarks import diffusion_checks


def test_requests_come_and_leave_and_draws_are_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    diffusion_checks.check_leaks(20, None)
    said = capsys.readouterr().out
    for name in ("SDAR", "Fast-dLLM v2", "DiffusionGemma"):
        assert f"{name}: 20 turns" in said
    assert said.count("nothing leaked") == 3
    monkeypatch.setattr(diffusion_checks, "AT_ONCE", 20)
    diffusion_checks.check_draws(20)
    assert capsys.readouterr().out.count("p = ") == 8
