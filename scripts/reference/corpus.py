"""The training text of the reference target: every data file turned into chats, split into training and held-out rows.

A row is ``(domain, [user message, assistant message])``. Files that are evaluation sets are never opened here.
"""

import ast
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

# How often a row of the file is seen per epoch: the small, clean sets more often than the long tail of prose.
WEIGHTS = {
    "gsm8k_train": 2.0,
    "mbpp": 3.0,
    "python_functions": 1.0,
    "python_algorithms": 0.5,
    "tldr_pages": 1.25,
    "peps": 0.5,
    "rust_book": 1.0,
}
DOMAINS = {
    "gsm8k_train": "math",
    "mbpp": "code",
    "python_functions": "code",
    "python_algorithms": "code",
    "tldr_pages": "prose",
    "peps": "prose",
    "rust_book": "prose",
}
HELD_OUT_SHARE = 0.01
MBPP_EVALUATION = range(11, 511)


def read_rows(data: Path, name: str) -> Iterator[dict]:
    with (data / f"{name}.jsonl").open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def split_docstring(source: str) -> str | None:
    """The part of a function up to the end of its docstring: what HumanEval calls the prompt."""
    try:
        function = ast.parse(source).body[0]
    except (SyntaxError, IndexError, ValueError):
        return None
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or ast.get_docstring(function) is None:
        return None
    return "\n".join(source.splitlines()[: function.body[0].end_lineno])


def fence(code: str) -> str:
    return f"```python\n{code.strip()}\n```"


def to_chat(name: str, row: dict, rng: random.Random) -> tuple[str, str] | None:
    """One row of a data file as a question and its answer; ``None`` where nothing can be asked of it."""
    if name == "gsm8k_train":
        return row["question"], row["answer"]
    if name == "mbpp":
        code = row["code"].replace("\r\n", "\n").replace("\t", "    ")
        return row["text"], fence(code)
    if name == "python_functions":
        prompt = split_docstring(row["source"])
        if prompt is not None and rng.random() < 0.6:
            return prompt, fence(row["source"])
        first = row["doc"].strip().split("\n\n")[0].replace("\n", " ")
        return f"Write a Python function `{row['name']}`. {first}", fence(row["source"])
    if name == "python_algorithms":
        topic = Path(row["path"]).with_suffix("").as_posix().replace("/", ": ").replace("_", " ")
        return f"Write a Python program. Topic: {topic}", fence(row["text"])
    if name == "tldr_pages":
        ask = rng.choice(["How do I use `{}`?", "Explain the command `{}` with examples.", "What does `{}` do?"])
        return ask.format(row["command"]), row["text"].strip()
    if name == "peps":
        ask = rng.choice(["{1}: explain “{0}”.", "Write about “{0}” ({1}).", "What should I know about “{0}” in {1}?"])
        return ask.format(row["section"], row["title"]), row["text"].strip()
    ask = rng.choice(["Explain “{}” in Rust.", "What is “{}” in Rust?", "Teach me about “{}” in Rust."])
    return ask.format(row["section"]), row["text"].strip()


def is_held_out(name: str, index: int) -> bool:
    digest = hashlib.sha256(f"{name}:{index}".encode()).digest()
    return int.from_bytes(digest[:4]) / 2**32 < HELD_OUT_SHARE


def load_chats(data: Path, *, held_out: bool) -> list[tuple[str, str, str]]:
    """All ``(file, question, answer)`` of one side of the split, in the order of the files."""
    rng = random.Random(0)
    chats = []
    for name in WEIGHTS:
        for index, row in enumerate(read_rows(data, name)):
            if name == "mbpp" and row["task_id"] in MBPP_EVALUATION:
                continue
            chat = to_chat(name, row, rng)
            if chat is not None and chat[1] and is_held_out(name, index) == held_out:
                chats.append((name, *chat))
    return chats
