"""Write prompts for a drafter of a coder: code_prompts.py DATA OUT.jsonl [--seed 11].

DATA is a folder with the data sets of the drafter's card (JSONL), of which only rows that may train are read. Three prompts in
four ask for code, for changes of code or what code does; the others are arithmetic, commands and documents.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from volley.files import write_atomically
from volley.prompts import read_jsonl

SIGNATURE = re.compile(r"(\s*def .*?\)\s*(?:->.*?)?:)\n", re.S)
COMPLETE = (
    "{}",
    "{}",
    "Complete this function:\n{block}",
    "Write a solution to the following problem and make sure that it passes the tests:\n{block}",
    "Finish the function below.\n{block}",
    "Implement this:\n{block}",
)
WRITE = ("Write a Python function `{name}`: {doc}", "{doc} Write it in Python.", "Implement `{name}` in Python. {doc}")
CHANGE = (
    "Explain what this function does:",
    "Write a docstring for this function:",
    "Write three unit tests for this function:",
    "Can this code be simplified?",
    "Rewrite this function with type hints:",
    "Find a bug in this function:",
)
PROGRAM = (
    "Write a Python program for: {}.",
    "Implement {} in Python with a short explanation.",
    "Show me {} in Python.",
    "Write {} in Python with tests.",
    "Write {} in JavaScript.",
    "Write {} in C++.",
    "How would you implement {} in Rust?",
    "Write a function for {} and explain its complexity.",
)
COMMAND = (
    "How do I use `{}`?",
    "Give me examples of the command `{}`.",
    "Explain the command `{}` to a beginner.",
    "Write a shell script that uses `{}`.",
)


def rows(data: Path, name: str) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(data / f"{name}.jsonl")]


def about_function(row: dict[str, Any], chance: random.Random) -> str | None:
    """Ask to complete, write or change a function; ``None`` where its text is too long."""
    source, doc, way = row["source"], row["doc"].strip(), chance.random()
    signature = SIGNATURE.match(source)
    if way < 0.4 and signature and len(doc) < 700:
        code = f'{signature.group(1).strip()}\n    """{doc}"""\n'
        return chance.choice(COMPLETE).replace("{block}", f"```python\n{code}```").replace("{}", code)
    first = doc.split("\n\n")[0].replace("\n", " ")
    if way < 0.7 and 20 < len(first) < 400:
        return chance.choice(WRITE).format(name=row["name"], doc=first)
    return f"{chance.choice(CHANGE)}\n```python\n{source}\n```" if len(source) < 900 else None


def of_code(data: Path, chance: random.Random) -> Iterator[str | None]:
    basics = rows(data, "mbpp")
    for row in basics[:10] + basics[510:]:
        yield row["text"]
        yield f"{row['text']} Your code should pass these tests:\n" + "\n".join(row["test_list"])
    for row in rows(data, "python_functions"):
        yield about_function(row, chance)
    for row in rows(data, "python_algorithms"):
        yield chance.choice(PROGRAM).format(PurePosixPath(row["path"]).stem.replace("_", " "))
        if len(row["text"]) < 1500:
            yield f"{chance.choice(('Add comments to this code:', 'Explain this program:'))}\n```python\n{row['text']}\n```"


def of_others(data: Path, chance: random.Random) -> Iterator[str]:
    yield from (row["question"] for row in chance.sample(rows(data, "gsm8k_train"), 900))
    for row in chance.sample(rows(data, "tldr_pages"), 700):
        yield chance.choice(COMMAND).format(row["command"])
    for row in chance.sample(rows(data, "peps"), 250):
        yield f"List the key points of this text:\n\n{row['section']}\n\n{row['text'][:900]}"
    yield from (f"Explain in Rust: {row['section']}" for row in rows(data, "rust_book")[:300])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=11)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    code, others = (list(dict.fromkeys(filter(None, own(given.data, chance)))) for own in (of_code, of_others))
    chance.shuffle(code)
    chance.shuffle(others)
    prompts, rest = list[str](), iter(others)
    for number, prompt in enumerate(code, start=1):
        prompts.append(prompt)
        if number % 3 == 0 and (other := next(rest, None)):
            prompts.append(other)
    write_atomically(given.out, "".join(json.dumps({"prompt": own}, ensure_ascii=False) + "\n" for own in prompts))
    print(f"{len(prompts)} prompts in {given.out}")


if __name__ == "__main__":
    main()
