"""Scoring of answers to mathematics and multiple choice by exact match."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from volley.prompts import gpqa_choices

Row = Mapping[str, Any]


def judge(dataset: str, row: Row, text: str) -> bool | None:
    """Return whether ``text`` answers a row of ``dataset`` correctly, or ``None`` if the row has no solution."""
    judged = _JUDGES.get(dataset)
    return None if judged is None or not row else judged(row, text.rpartition("</think>")[2])


def final_answer(text: str) -> str:
    """Return the content of the last ``\\boxed``, else the last number, normalised."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth, inside = 1, text[start + len("\\boxed{") :]
        for place, letter in enumerate(inside):
            depth += (letter == "{") - (letter == "}")
            if depth == 0:
                return normalised(inside[:place])
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return normalised(numbers[-1]) if numbers else ""


def normalised(answer: str) -> str:
    """Return an answer without spelling variants: spaces, units as text, forms of fractions and brackets."""
    answer = re.sub(r"\\(?:text|mbox)\{[^{}]*\}", "", answer) if re.search(r"\d", answer) else answer
    answer = (
        re.sub(r"\\(?:left|right|!|,|;|\$|%)|\^\{?\\circ\}?|[\s$%]", "", answer)
        .replace("dfrac", "frac")
        .replace("tfrac", "frac")
    )
    answer = re.sub(r"\\text\{([^{}]*)\}", r"\1", answer).rstrip(".")
    answer = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", answer)
    return re.sub(r"^(-?\d+)\.0+$", r"\1", answer)


def _judge_number(row: Row, text: str) -> bool:
    return final_answer(text) == normalised(str(row["answer"]).rpartition("####")[2])


def _judge_choice(row: Row, text: str) -> bool:
    letters = re.findall(r"answer\s*:\s*\$?\(?([A-D])\b", text, re.IGNORECASE)
    right = "ABCD"[gpqa_choices(row).index(str(row["Correct Answer"]).strip())]
    return bool(letters) and letters[-1].upper() == right


_JUDGES: Mapping[str, Callable[[Row, str], bool]] = {
    "gsm8k": _judge_number,
    "math500": _judge_number,
    "aime25": _judge_number,
    "gpqa": _judge_choice,
}
