"""The page about published models, and the README's table, are what the committed record says."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.published import MODELS, Row, page

ROOT = Path(__file__).parents[2]
RECORDS = [
    json.loads((ROOT / "benchmarks" / "results" / f"published-{name}.json").read_text(encoding="utf-8"))
    for name in ("zen5-smollm2", "zen5-qwen", "zen5-gemma", "amx", "amx-gemma", "amx-sampled")
]
PAGE = (ROOT / "docs" / "benchmarks" / "published.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_is_the_records() -> None:
    assert page(RECORDS) == PAGE


def test_the_readme_has_the_defaults_ratios_to_the_fastest_row_on_the_file() -> None:
    found = re.findall(r"^\| volley file \| [^|]+ \| ([\d.]+) \|", page(RECORDS[:3]), re.MULTILINE)
    assert re.findall(r"\*\*([\d.]+) ×\*\*", README) == found
    assert len(found) == 2 * len(MODELS)


def test_answers_that_differ_from_plain_decoding_would_be_seen() -> None:
    record = json.loads(json.dumps(RECORDS[0]))
    run = next(run for run in record["measured"][0]["runs"] if run["row"] == "volley file")
    run["answer"]["tokens"][0][3] += 1
    assert "| 4/5 |" not in page(RECORDS[:1])
    assert "| 4/5 |" in page([record])


def test_rows_are_written_as_they_are_read() -> None:
    for text in ("volley file", "llama.cpp q4_0+dspark:4", "openvino int4+lookup"):
        assert str(Row.parse(text)) == text
    with pytest.raises(SystemExit, match="is no row"):
        Row.parse("volley")
