"""The examples of docs/extending.md run as they stand there."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^## (A [a-z ]+)\n.*?^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def test_every_seam_has_an_example() -> None:
    assert set(EXAMPLES) == {"A family of diffusion models", "A proposer", "A policy", "A procedure", "A token rule"}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    code = EXAMPLES[name]
    exec(compile(code, f"docs/extending.md, {name}", "exec"), {"__name__": "example"})
