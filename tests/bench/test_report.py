import json
from pathlib import Path

import pytest

from volley.bench.measure import Measurements, Record
from volley.bench.report import Report, Spread, machine, summarise, to_markdown, to_tables
from volley.bench.run import save
from volley.bench.tasks import PLAIN, BenchConfig, Case
from volley.config import DecodingConfig

DRAFTED = Case("volley", DecodingConfig(block_size=4))


def record(case: Case, dataset: str = "d", prompt: str = "p", repeat: int = 0, seconds: float = 2.0) -> Record:
    drafted = case == DRAFTED
    return Record(
        dataset=dataset,
        prompt=prompt,
        repeat=repeat,
        temperature=0.0,
        case=case,
        prompts=1,
        prompt_tokens=5,
        output_tokens=11,
        seconds=seconds + 0.5,
        first_token_seconds=0.5,
        draft_seconds=0.1 if drafted else 0.0,
        walk_seconds=0.02 if drafted else 0.0,
        verify_seconds=0.7 if drafted else 1.9,
        accepted_lengths=[4, 1, 3, 2] if drafted else [1] * 10,
        block_sizes=[4, 4, 4, 2] if drafted else [1] * 10,
        cycles=4 if drafted else 10,
        identical=1.0,
    )


def test_a_summary_is_worked_out_from_its_runs() -> None:
    records = [
        record(PLAIN),
        record(DRAFTED, seconds=1.0),
        record(PLAIN, prompt="q"),
        record(DRAFTED, prompt="q", seconds=0.5),
    ]
    plain, drafted = summarise(records)
    assert (plain.speedup, plain.acceptance_length, plain.cycle_ms) == (1.0, 1.0, 200.0)
    assert drafted.tokens_per_second.median == pytest.approx(20 / 1.5)
    assert drafted.speedup == pytest.approx(4.0 / 1.5)
    assert drafted.speedup_per_prompt.median == pytest.approx(3.0)
    assert drafted.acceptance_length == 2.5
    assert drafted.efficiency == pytest.approx(4.0 / 1.5 / 2.5)
    assert (drafted.draft_ms, drafted.verify_ms) == (pytest.approx(25.0), pytest.approx(175.0))
    assert "| 25.00 (head 5.00) | 175.00 |" in to_markdown([drafted])
    assert drafted.cycle_ms == pytest.approx(1000 * 1.5 / 8)
    assert drafted.acceptance_by_position == [pytest.approx(2 / 3), pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert (plain.accepted_share, drafted.accepted_share) == (None, pytest.approx(12 / 20))
    assert drafted.histogram == {1: 2, 2: 2, 3: 2, 4: 2}
    assert drafted.first_token_ms.median == 500


def test_several_datasets_are_also_summed_up_together() -> None:
    records = [record(case, dataset) for dataset in ("a", "b") for case in (PLAIN, DRAFTED)]
    assert [(s.dataset, s.case.label, s.runs) for s in summarise(records)] == [
        ("a", "plain", 1), ("a", "B=4", 1), ("b", "plain", 1), ("b", "B=4", 1), ("all", "plain", 2), ("all", "B=4", 2),
    ]  # fmt: skip


def test_speed_is_a_median_over_repeats() -> None:
    records = [record(case, repeat=r, seconds=s) for r, s in enumerate((1.0, 2.0, 10.0)) for case in (PLAIN, DRAFTED)]
    spread = summarise(records)[1].tokens_per_second
    assert (spread.low, spread.median, spread.high) == (3.0, 5.0, 7.5)
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0)
    assert str(Spread.of([1.0, 2.0, 3.0])) == "2.00 (1.50–2.50)"


def report(partial: bool = False) -> Report:
    records = [record(case, d, repeat=r) for d in ("a", "b") for r in (0, 1) for case in (PLAIN, DRAFTED)]
    measured = Measurements(records, ["transformers-dflash: <no>"], partial, 2**30)
    return Report(BenchConfig(), measured, machine(2), {"target": "T<1>"})


@pytest.mark.slow
def test_json_holds_summaries_and_every_run(tmp_path: Path) -> None:
    save(report(), tmp_path)
    saved = json.loads((tmp_path / "report.json").read_text())
    assert len(saved["records"]) == 8
    assert saved["summaries"][1]["efficiency"] == pytest.approx(1 / 2.5)
    assert saved["summaries"][1]["case"] == saved["records"][1]["case"] == DRAFTED.to_json()
    assert saved["partial"] is False
    assert saved["machine"]["cpu"]
    assert saved["config"]["repeats"] == 3
    assert (tmp_path / "report.md").read_text() == to_markdown(report().summaries)


def test_an_interrupt_before_the_first_record_still_reports(tmp_path: Path) -> None:
    save(Report(BenchConfig(), Measurements(partial=True), machine(1), {}), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["partial"] is True


def test_tables_have_a_row_for_every_summary() -> None:
    summaries = report().summaries
    assert [table.row_count for table in to_tables(summaries)] == [6, 6] == [len(summaries)] * 2
    assert len(to_markdown(summaries).splitlines()) == 8
