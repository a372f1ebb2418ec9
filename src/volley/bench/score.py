"""Scoring of answers: mathematics and multiple choice by exact match, code by its tests in a subprocess with limits.

The limits protect the machine's time and memory. They are no sandbox: run answers of untrusted models on a separate machine.
"""

import base64
import io
import json
import pickle
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from volley.prompts import gpqa_choices

SECONDS = 10
"""CPU time limit of one program in seconds; the wall-clock limit is twice that."""
MEMORY = 2**30
_LIMITS = f"""
import resource
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
"""
_RUN = _LIMITS + "import sys\nexec(compile(sys.argv[1], 'answer', 'exec'), {'__name__': '__main__'})\n"
Row = Mapping[str, Any]


def judge(dataset: str, row: Row, text: str) -> bool | None:
    """Return whether ``text`` answers a row of ``dataset`` correctly, or ``None`` if the row has no solution."""
    judged = _JUDGES.get(dataset)
    return None if judged is None or not row else judged(row, text.rpartition("</think>")[2])


# -- exact match --------------------------------------------------------------------------------------------------------


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


# -- code ---------------------------------------------------------------------------------------------------------------


def code_of(text: str) -> str:
    """Return the last fenced block of Python, else the whole text."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, re.DOTALL)
    return str(blocks[-1]) if blocks else text


@lru_cache(maxsize=1024)
def run_program(program: str, given: str = "") -> str | None:
    """Return what a Python program prints; ``None`` if it fails or exceeds the time or memory limit."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _RUN, program],
                input=given,
                capture_output=True,
                text=True,
                timeout=2 * SECONDS,
                cwd=folder,
                env={},
                check=False,
            )
        except (subprocess.TimeoutExpired, UnicodeDecodeError, OSError, ValueError):
            return None
    return done.stdout if done.returncode == 0 else None


def _passes(program: str) -> bool:
    """Return whether a program reaches its end; one that exits early does not pass."""
    end = "volley: the end was reached"
    return (run_program(f"{program}\nprint({end!r})\n") or "").rstrip().endswith(end)


def _judge_humaneval(row: Row, text: str) -> bool:
    code = code_of(text)
    if f"def {row['entry_point']}" not in code:
        code = row["prompt"] + code
    else:
        code = row["prompt"].partition(f"def {row['entry_point']}")[0] + "\n" + code
    return _passes(f"{code}\n{row['test']}\ncheck({row['entry_point']})")


def _judge_mbpp(row: Row, text: str) -> bool:
    return _passes("\n".join([code_of(text), row.get("test_setup_code") or "", *row["test_list"]]))


class _OnlyText(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}: the tests of a problem are text")


def _tests(row: Row) -> list[Mapping[str, str]]:
    """Return a problem's public and private tests. Private ones come as JSON or as packed text."""
    found: list[Mapping[str, str]] = []
    for key in ("public_test_cases", "private_test_cases"):
        cases = row.get(key) or []
        if isinstance(cases, str):
            if not cases.lstrip().startswith("["):
                cases = _OnlyText(io.BytesIO(zlib.decompress(base64.b64decode(cases)))).load()
            cases = json.loads(cases)
        found += cases
    return found


def _judge_livecodebench(row: Row, text: str) -> bool:
    code, metadata = code_of(text), row.get("metadata") or {}
    name = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name")
    return all(_case_passes(code, name, case) for case in _tests(row))


def _case_passes(code: str, name: str | None, case: Mapping[str, str]) -> bool:
    if case["testtype"] == "stdin":
        printed = run_program(code, case["input"])
        return printed is not None and _lines(printed) == _lines(case["output"])
    arguments = [json.loads(line) for line in case["input"].split("\n") if line.strip()]
    call = f"Solution().{name}" if "class Solution" in code else name
    usual = "from typing import *\nimport collections, heapq, itertools, math, functools, bisect\n"
    return _passes(f"{usual}{code}\nassert {call}(*{arguments!r}) == {json.loads(case['output'])!r}")


def _lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


_JUDGES: Mapping[str, Callable[[Row, str], bool]] = {
    "gsm8k": _judge_number,
    "math500": _judge_number,
    "aime25": _judge_number,
    "gpqa": _judge_choice,
    "humaneval": _judge_humaneval,
    "mbpp": _judge_mbpp,
    "livecodebench": _judge_livecodebench,
}
