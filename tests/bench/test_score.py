"""What is right is judged right and what is wrong wrong; programs that take too much are ended."""

import base64
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from volley.bench.score import MEMORY, code_of, final_answer, judge, run_program
from volley.prompts import gpqa_choices, load_prompts

SQUARES = "```python\nn = int(input())\nprint(n * n)\n```"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{\\dfrac{1}{2}} then \\boxed{\\frac{3}{4}}.", "\\frac{3}{4}"),
        ("That makes $1,234.00 in all.", "1234"),
        ("It is 12.", "12"),
        ("\\boxed{5 \\text{ cm}}", "5"),
        ("\\boxed{\\left(3, \\frac{\\pi}{2} \\right)}", "(3,\\frac{\\pi}{2})"),
        ("none", ""),
    ],
)
def test_final_answers(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_mathematics() -> None:
    row = {"answer": "He has 3 + 4 = 7.\n#### 7"}
    assert judge("gsm8k", row, "3 of 9 and so 7")
    assert not judge("gsm8k", row, "7 of 9")
    assert judge("gsm8k", row, "<think>\\boxed{9}</think>It is 7.")
    assert judge("mt-bench", {"turns": []}, "7") is None


def test_choices_have_one_order() -> None:
    row = {"Question": "Which?", "Correct Answer": "yes", **{f"Incorrect Answer {i}": f"no {i}" for i in (1, 2, 3)}}
    right = "ABCD"[gpqa_choices(row).index("yes")]
    wrong = "ABCD"[gpqa_choices(row).index("no 2")]
    assert judge("gpqa", row, f"Answer: {wrong}? No.\nAnswer: ({right})")
    assert not judge("gpqa", row, f"Answer: {wrong}")
    assert not judge("gpqa", row, f"It is {right}")


def test_humaneval_and_mbpp() -> None:
    row = {
        "prompt": 'from math import pi\n\n\ndef area(r):\n    """Of a circle."""\n',
        "entry_point": "area",
        "test": "def check(candidate):\n    assert abs(candidate(3) - 28.274) < 0.01\n",
    }
    assert judge("humaneval", row, "    return pi * r * r\n")
    assert judge("humaneval", row, "Here:\n```python\ndef area(r):\n    return pi * r ** 2\n```")
    assert not judge("humaneval", row, "    return 2 * pi * r\n")
    assert not judge("humaneval", row, "    raise SystemExit(0)\n")
    tests = {"test_list": ["assert double(2) == 4"], "test_setup_code": ""}
    assert judge("mbpp", tests, "```python\ndef double(x):\n    return 2 * x\n```")
    assert not judge("mbpp", tests, "```python\ndef double(x):\n    return x\n```")


def _packed(tests: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def test_livecodebench() -> None:
    tests = [{"input": "3\n", "output": "9\n", "testtype": "stdin"}]
    row: dict[str, Any] = {"public_test_cases": json.dumps(tests), "metadata": "{}"}
    assert judge("livecodebench", row, SQUARES)
    assert not judge("livecodebench", {**row, "private_test_cases": _packed([{**tests[0], "output": "8"}])}, SQUARES)
    assert judge("livecodebench", {**row, "private_test_cases": _packed(tests)}, SQUARES)
    called = {
        "public_test_cases": [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}],
        "metadata": '{"func_name": "add"}',
    }
    code = "```python\nclass Solution:\n    def add(self, xs: List[int], y):\n        return sum(xs) + y\n```"
    assert judge("livecodebench", called, code)
    assert not judge("livecodebench", called, code.replace("+ y", "- y"))


class Planted:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return print, ("run",)


def test_packed_tests_run_nothing() -> None:
    packed = base64.b64encode(zlib.compress(pickle.dumps(Planted()))).decode()
    with pytest.raises(pickle.UnpicklingError, match="tests of a problem are text"):
        judge("livecodebench", {"private_test_cases": packed}, SQUARES)


def test_programs_have_limits(tmp_path: Path) -> None:
    assert run_program("print(input())", "hello") == "hello\n"
    assert run_program(f"x = bytearray({2 * MEMORY})") is None
    assert run_program("open('a', 'w').write('x' * 2**21)") is None
    assert run_program("import os\nprint(os.environ.get('HOME'))") == "None\n"
    assert code_of("a\n```\nb\n```") == "b\n"


def test_prompts_of_gpqa_and_livecodebench(tmp_path: Path) -> None:
    row = {"Question": "Which?", "Correct Answer": "yes", **{f"Incorrect Answer {i}": f"no {i}" for i in (1, 2, 3)}}
    (tmp_path / "gpqa_diamond.jsonl").write_text(json.dumps(row))
    (gpqa,) = load_prompts("gpqa", tmp_path)
    assert "Which?\n\nA) " in gpqa.raw
    assert all(f") {choice}" in gpqa.raw for choice in gpqa_choices(row))
    assert gpqa.row == row
    lines = [{"question_content": "Square it.", "starter_code": code} for code in ("", "class Solution:")]
    (tmp_path / "livecodebench.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read, given = load_prompts("livecodebench", tmp_path)
    assert "inputs from stdin" in read.raw
    assert "starter code" in given.raw
    assert "class Solution:" in given.raw
