"""Prompts from JSONL files and named datasets, as conversations to send to a model.

A row of a prompt file has ``prompt`` (one user message), ``messages`` (a chat that ends with a user message) or ``turns`` (user
messages, each answered before the next is sent). Datasets come from a folder of JSONL files or from the hub.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from volley.errors import ConfigError, InputError, unknown_key

Message = dict[str, str]

BUILTIN = "builtin"
"""Source of 200 prompts of six types, written for volley; any part of them is a mixture."""
_BUILTIN_FILE = Path(__file__).parent / "builtin_prompts.jsonl"
_TEST_ROWS_OF_MBPP = range(11, 511)
ROW_KEYS = ("prompt", "messages", "turns")


@dataclass(frozen=True)
class Conversation:
    """Conversation to continue: ``messages`` end with the user's; each of ``turns`` follows once the previous one was
    answered."""

    id: str
    messages: tuple[Message, ...]
    turns: tuple[str, ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Whole row of a dataset, which holds what an answer is scored by."""

    @property
    def num_answers(self) -> int:
        return 1 + len(self.turns)

    @property
    def raw(self) -> str:
        """Return the text of a single prompt for a model without a chat template."""
        if len(self.messages) != 1 or self.turns:
            raise InputError(f"prompt {self.id} is a chat; without a chat template only single prompts can be sent")
        return self.messages[0]["content"]


@dataclass(frozen=True)
class Dataset:
    """Location of a named dataset, and the conversion of its rows to conversations."""

    file: str
    column: str
    hub: tuple[str, str | None, str]
    """Repository, configuration and split on the hub."""
    evaluation: bool = True
    """True if it is for evaluation only and must not be trained on."""
    test_rows: bool | None = None
    """Part of MBPP to use: its file holds both sides of the split, told apart by ``task_id``."""
    prompt: Callable[[Mapping[str, Any]], str] | None = None
    """Function that writes the prompt if no column holds it."""

    def has(self, row: Mapping[str, Any]) -> bool:
        return self.test_rows is None or (int(row["task_id"]) in _TEST_ROWS_OF_MBPP) == self.test_rows


GPQA_WRONG = tuple(f"Incorrect Answer {number}" for number in (1, 2, 3))


def gpqa_choices(row: Mapping[str, Any]) -> list[str]:
    """Return the four answers to a GPQA question in an order that depends only on the question."""
    choices = [str(row[key]).strip() for key in ("Correct Answer", *GPQA_WRONG)]
    return sorted(choices, key=lambda choice: hashlib.sha256(f"{row['Question']}\n{choice}".encode()).digest())


def _gpqa_prompt(row: Mapping[str, Any]) -> str:
    """Return the prompt of OpenAI's simple-evals, which the papers use."""
    choices = "\n".join(f"{letter}) {choice}" for letter, choice in zip("ABCD", gpqa_choices(row), strict=True))
    return (
        "Answer the following multiple choice question. The last line of your response should be of the following format: "
        "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n"
        f"{row['Question']}\n\n{choices}"
    )


def _mbpp_prompt(row: Mapping[str, Any]) -> str:
    """Return the prompt with the tests, which alone name the function, as the dataset's authors ask."""
    tests = "\n".join(row.get("test_list") or ())
    return f"{row['text']} Your code should pass these tests:\n\n{tests}" if tests else str(row["text"])


def _livecodebench_prompt(row: Mapping[str, Any]) -> str:
    """Return the prompt of LiveCodeBench's own runner (generic chat models)."""
    starter = row.get("starter_code") or ""
    how = (
        "You will use the following starter code to write the solution to the problem and enclose your code within delimiters."
        if starter
        else "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample "
        "inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the "
        "inputs, runs the algorithm and writes output to STDOUT."
    )
    return (
        "You will be given a question (problem specification) and will generate a correct Python program that matches the "
        f"specification and passes all tests.\n\n### Question:\n{row['question_content']}\n\n### Format: {how}\n"
        f"```python\n{starter or '# YOUR CODE HERE'}\n```\n\n### Answer: (use the provided format with backticks)\n\n"
    )


DATASETS = {
    "gsm8k": Dataset("gsm8k_test.jsonl", "question", ("openai/gsm8k", "main", "test")),
    "gsm8k-train": Dataset("gsm8k_train.jsonl", "question", ("openai/gsm8k", "main", "train"), evaluation=False),
    "math500": Dataset("math500.jsonl", "problem", ("HuggingFaceH4/MATH-500", None, "test")),
    "aime25": Dataset("aime25.jsonl", "question", ("math-ai/aime25", None, "test")),
    "humaneval": Dataset("humaneval.jsonl", "prompt", ("openai/openai_humaneval", None, "test")),
    "mbpp": Dataset(
        "mbpp.jsonl", "text", ("google-research-datasets/mbpp", "full", "test"), test_rows=True, prompt=_mbpp_prompt
    ),
    "mbpp-train": Dataset(
        "mbpp.jsonl", "text", ("google-research-datasets/mbpp", "full", "train"), evaluation=False, test_rows=False
    ),
    "gpqa": Dataset(
        "gpqa_diamond.jsonl", "Question", ("Idavidrein/gpqa", "gpqa_diamond", "train"), prompt=_gpqa_prompt
    ),
    "livecodebench": Dataset(
        "livecodebench.jsonl",
        "question_content",
        ("livecodebench/code_generation_lite", None, "test"),
        prompt=_livecodebench_prompt,
    ),
    "mt-bench": Dataset("mt_bench.jsonl", "turns", ("philschmid/mt-bench", None, "train")),
    "alpaca": Dataset("alpaca_80.jsonl", "turns", ("tatsu-lab/alpaca", None, "train")),
}


def load_prompts(source: str | Path, data_dir: Path | None = None, limit: int | None = None) -> list[Conversation]:
    """Return the conversations of a JSONL file, of a dataset by name (from ``data_dir``, else from the hub), or ``builtin``."""
    path = Path(source)
    if str(source) == BUILTIN and not path.exists():
        path = _BUILTIN_FILE
    if str(source) in DATASETS:
        rows = _dataset_rows(str(source), data_dir)
    elif path.suffix == ".jsonl" or path.exists():
        rows = _file_rows(path)
    else:
        raise unknown_key("dataset (or missing prompt file)", str(source), (BUILTIN, *DATASETS))
    conversations = list(islice(rows, limit))
    if not conversations:
        raise InputError(f"{source} has no prompts; give a file with at least one row of {', '.join(ROW_KEYS)}")
    return conversations


def check_training(names: Iterable[str]) -> None:
    """Refuse datasets that are for evaluation only."""
    for name in names:
        if name in DATASETS and DATASETS[name].evaluation:
            training = ", ".join(key for key, dataset in DATASETS.items() if not dataset.evaluation)
            raise ConfigError(f"{name} is kept for evaluation; training datasets are {training}")


def parse_row(row: Mapping[str, Any], where: str, row_id: str) -> Conversation:
    """Return one row of a prompt file as a conversation; ``where`` names it in errors."""
    given = [key for key in ROW_KEYS if key in row]
    if len(given) != 1:
        problem = f"has {' and '.join(given)}" if given else f"has only {', '.join(sorted(row)) or 'nothing'}"
        raise InputError(f"{where} {problem}; a prompt row has exactly one of {', '.join(ROW_KEYS)}")
    if row.get("tools"):
        raise InputError(f"{where} has tools, which prompts here cannot contain; leave the row out")
    row_id = str(row.get("id", row.get("task_id", row.get("question_id", row_id))))
    value = row[given[0]]
    if given[0] == "prompt":
        if not isinstance(value, str) or not value:
            raise InputError(f"{where}: 'prompt' must be a non-empty string")
        return Conversation(row_id, ({"role": "user", "content": value},))
    if given[0] == "turns":
        if not isinstance(value, list) or not value or not all(isinstance(turn, str) and turn for turn in value):
            raise InputError(f"{where}: 'turns' must be a non-empty list of non-empty strings")
        return Conversation(row_id, ({"role": "user", "content": value[0]},), tuple(value[1:]))
    return Conversation(row_id, _check_messages(value, where))


def _check_messages(value: Any, where: str) -> tuple[Message, ...]:
    good = isinstance(value, list) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )
    if not good or not value:
        raise InputError(f"{where}: 'messages' must be a list of objects with string 'role' and 'content'")
    if value[-1]["role"] != "user":
        raise InputError(
            f"{where}: the last message is the {value[-1]['role']}'s; it must be the user's to be answered"
        )
    return tuple(dict(message) for message in value)


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number, row)`` of each non-empty line."""
    try:
        with path.open(encoding="utf-8-sig") as lines:  # editors on Windows write a byte order mark
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise InputError(f"{path} line {number} is not a JSON object; give one object a line")
                    yield number, row
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; check the path") from None
    except (IsADirectoryError, PermissionError) as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give a readable JSONL file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason}); convert it first") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} line {number} is not JSON ({error}); give one JSON object a line") from None


def _file_rows(path: Path) -> Iterator[Conversation]:
    for number, row in read_jsonl(path):
        yield parse_row(row, f"{path} line {number}", f"{path.stem}/{number}")


def _dataset_rows(name: str, data_dir: Path | None) -> Iterator[Conversation]:
    dataset = DATASETS[name]
    rows = _hub_rows(name, dataset) if data_dir is None else _folder_rows(data_dir, dataset)
    for index, row in enumerate(row for row in rows if dataset.has(row)):
        column = dataset.column
        if name == "alpaca" and column not in row:  # the hub's rows, not the 80 that drafters are measured on
            text = "\n\n".join(part for part in (row["instruction"], row["input"]) if part)
            yield Conversation(f"{name}/{index}", ({"role": "user", "content": text},))
            continue
        if column not in row and "prompt" in row:  # mt-bench on the hub calls its turns `prompt`
            column = "prompt"
        if column not in row:
            raise InputError(f"row {index} of {name} has no {dataset.column!r}; is {dataset.file} another dataset?")
        value = row[column] if dataset.prompt is None else dataset.prompt(row)
        turns: Sequence[str] = [value] if isinstance(value, str) else list(value)
        messages = ({"role": "user", "content": turns[0]},)
        yield Conversation(f"{name}/{index}", messages, tuple(turns[1:]), row)


def _folder_rows(folder: Path, dataset: Dataset) -> Iterator[Mapping[str, Any]]:
    return (row for _, row in read_jsonl(Path(folder) / dataset.file))


def _hub_rows(name: str, dataset: Dataset) -> Iterator[Mapping[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError(
            f"dataset {name!r} would come from the hub, which needs the `datasets` package; "
            f"install it (pip install datasets), or give the folder that holds {dataset.file}"
        ) from None
    repository, configuration, split = dataset.hub
    try:
        yield from load_dataset(repository, configuration, split=split)
    except (OSError, ValueError) as error:
        raise InputError(
            f"dataset {name!r} ({repository}) could not be read from the hub ({error}); "
            f"check the network, or give the folder that holds {dataset.file}"
        ) from None
