"""Expected acceptance is that of decoding: of the cycles themselves, and of both bundled pairs at a temperature."""

from pathlib import Path

import pytest
import torch

from tests.doctor.answers import TARGET, write_answers
from volley import Engine, SamplingParams
from volley.doctor.acceptance import kept_at_least, walk
from volley.doctor.diagnosis import Doctor
from volley.files import REFERENCE


def test_cycles_of_certain_and_of_hopeless_drafts() -> None:
    assert kept_at_least(torch.zeros(10, 5)) == [10, 0, 0, 0, 0, 0]
    assert kept_at_least(torch.ones(12, 5)) == [2] * 6
    assert kept_at_least(torch.zeros(0, 5)) == [0] * 6


@pytest.mark.slow
def test_expected_cycles_are_those_of_a_simulation() -> None:
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(20, 3, generator=generator)
    totals, runs = [0] * 4, 4000
    for _ in range(runs):
        at = 0
        while at < 20:
            kept = 0
            while kept < 3 and torch.rand((), generator=generator) < chances[at, kept]:
                kept += 1
            at += kept + 1
            for reached in range(kept + 1):
                totals[reached] += 1
    assert kept_at_least(chances) == pytest.approx([total / runs for total in totals], rel=0.03)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of the bundled target at T = 1."""
    return write_answers(tmp_path_factory.mktemp("rows") / "rows.jsonl", temperature=1.0, times=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drafter", "drafter-dflash"])
def test_what_is_expected_at_a_temperature_is_what_is_measured_there(rows: Path, name: str) -> None:
    """Both at T = 1: a greedy walk over the same answers expects something else."""
    physician = Doctor(TARGET, REFERENCE / name, [rows], temperature=1.0)
    engine = Engine.from_pretrained(drafter=REFERENCE / name, dtype=torch.float32, policy="fixed")
    prompts = [row["prompt_token_ids"] for row in physician.rows]
    results = engine.generate(prompts, SamplingParams(temperature=1.0, max_tokens=64, seed=0))
    lengths = [length for result in results for length in result.stats.accepted_lengths]
    measured, expected = sum(lengths) / len(lengths), physician.as_it_is.tau
    assert expected == pytest.approx(measured, rel=0.1)
    greedy = walk(physician.drafter, physician.target, physician.documents).tau
    assert abs(greedy - measured) > abs(expected - measured)
