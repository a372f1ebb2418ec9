"""docs/documents.md names commands, scripts and tests that exist."""

import ast
import re
from pathlib import Path

import pytest
from typer.main import get_command

from volley.cli import app

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "documents.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
CLAIMS = [(claim, shown) for claim, shown in ROWS if shown != "shown by"]


@pytest.mark.parametrize(("claim", "shown"), CLAIMS)
def test_a_claim_names_what_shows_it(claim: str, shown: str) -> None:
    named = re.findall(r"`([^`]+)`", shown)
    assert named or "*open*" in shown, f"{claim}: nothing shows it, and it is not said to be open"
    for name in named:
        path, _, function = name.partition("::")
        if path.startswith(("tests/", "benchmarks/")):
            assert (ROOT / path).exists(), name
        if function:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name
        if name.startswith("volley "):
            assert name.split()[1] in get_command(app).commands, name  # type: ignore[attr-defined]


def test_all_five_documents_have_rows() -> None:
    assert len(re.findall(r"^## ", PAGE, re.MULTILINE)) == 5
    assert len(CLAIMS) > 60


def test_a_name_that_does_not_exist_is_seen() -> None:
    for shown in ("`tests/test_documents.py::test_nothing`", "`volley fly`", "nothing"):
        with pytest.raises(AssertionError):
            test_a_claim_names_what_shows_it("a claim", shown)
