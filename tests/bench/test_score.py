"""Right answers are judged right, and wrong ones wrong."""

import json
from pathlib import Path

import pytest

from volley.bench.score import final_answer, judge
from volley.prompts import gpqa_choices, load_prompts


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
