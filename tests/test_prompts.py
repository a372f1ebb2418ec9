import json
import sys
import types
from pathlib import Path

import pytest

from volley.errors import ConfigError, InputError
from volley.prompts import DATASETS, load_prompts


def write(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def test_each_kind_of_row_becomes_a_conversation(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(tmp_path / "p.jsonl", {"prompt": "2+2?"}, {"messages": chat, "id": 7}, "", {"turns": ["a", "b", "c"]})
    one, two, three = load_prompts(path)
    assert (one.id, one.raw, one.messages) == ("p/1", "2+2?", ({"role": "user", "content": "2+2?"},))
    assert (two.id, list(two.messages), two.num_answers) == ("7", chat, 1)
    assert (three.id, three.turns, three.num_answers) == ("p/4", ("b", "c"), 3)
    with pytest.raises(InputError, match="prompt 7 is a chat"):
        _ = two.raw
    assert load_prompts(path, limit=2) == [one, two]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "line 2 has only question; a prompt row has exactly one of prompt, messages, turns"),
        ({"prompt": "a", "turns": ["b"]}, "line 2 has prompt and turns"),
        ({"prompt": ""}, "'prompt' must be a non-empty string"),
        ({"turns": []}, "'turns' must be a non-empty list"),
        ({"messages": ["hi"]}, "'messages' must be a list of objects"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last message is the assistant's"),
        ("[1]", "line 2 is not a JSON object"),
        ({"prompt": "hi", "tools": [{}]}, "line 2 has tools"),
        ('{"prompt": ', "line 2 is not JSON"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(InputError, match=message):
        load_prompts(path)


def test_files_of_windows_are_read(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two"}\r\n')
    assert [c.messages[0]["content"] for c in load_prompts(tmp_path / "w.jsonl")] == ["one", "two"]


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="has no prompts"):
        load_prompts(write(tmp_path / "empty.jsonl"))
    with pytest.raises(InputError, match="Is a directory"):
        load_prompts(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(InputError, match="not UTF-8"):
        load_prompts(tmp_path / "latin.jsonl")
    with pytest.raises(ConfigError, match=r"'gsm8'; did you mean 'gsm8k'\?"):
        load_prompts("gsm8")


def test_named_datasets_come_from_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "mbpp.jsonl", *({"text": f"task {i}", "task_id": i} for i in (10, 11, 510, 511)))
    write(tmp_path / "mt_bench.jsonl", {"turns": ["first", "second"]})
    assert [c.messages[0]["content"] for c in load_prompts("mbpp", tmp_path)] == ["task 11", "task 510"]
    write(tmp_path / "mbpp.jsonl", {"text": "Double it.", "task_id": 11, "test_list": ["assert twice(2) == 4"]})
    (told,) = load_prompts("mbpp", tmp_path)
    assert told.messages[0]["content"] == "Double it. Your code should pass these tests:\n\nassert twice(2) == 4"
    write(tmp_path / "mbpp.jsonl", *({"text": f"task {i}", "task_id": i} for i in (10, 11, 510, 511)))
    assert [c.messages[0]["content"] for c in load_prompts("mbpp-train", tmp_path)] == ["task 10", "task 511"]
    (bench,) = load_prompts("mt-bench", tmp_path)
    assert (bench.id, bench.messages[0]["content"], bench.turns) == ("mt-bench/0", "first", ("second",))
    with pytest.raises(InputError, match=r"gsm8k_test\.jsonl does not exist"):
        load_prompts("gsm8k", tmp_path)
    write(tmp_path / "gsm8k_test.jsonl", {"text": "?"})
    with pytest.raises(InputError, match="row 0 of gsm8k has no 'question'"):
        load_prompts("gsm8k", tmp_path)


def test_no_training_dataset_reads_an_evaluation_file() -> None:
    evaluation = {d.file for d in DATASETS.values() if d.evaluation}
    training = {d.file for d in DATASETS.values() if not d.evaluation}
    assert training & evaluation == {"mbpp.jsonl"}  # one file, split by task_id


class FakeHub(types.ModuleType):
    """The ``datasets`` package, as far as prompts need it."""

    def __init__(self, rows: list[dict[str, object]] | None) -> None:
        super().__init__("datasets")
        self.rows, self.asked = rows, list[tuple[object, ...]]()

    def load_dataset(self, repository: str, configuration: str | None, split: str) -> list[dict[str, object]]:
        self.asked.append((repository, configuration, split))
        if self.rows is None:
            raise ConnectionError("no route")
        return self.rows


def test_named_datasets_come_from_the_hub_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub([{"question": "2+2?"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert [c.messages[0]["content"] for c in load_prompts("gsm8k-train")] == ["2+2?"]
    assert hub.asked == [("openai/gsm8k", "main", "train")]
    hub.rows = [{"instruction": "Say it", "input": "hello"}, {"instruction": "Stop", "input": ""}]
    assert [c.messages[0]["content"] for c in load_prompts("alpaca")] == ["Say it\n\nhello", "Stop"]
    hub.rows = [{"prompt": ["first", "second"]}]
    assert load_prompts("mt-bench")[0].turns == ("second",)
    hub.rows = None
    with pytest.raises(InputError, match=r"could not be read from the hub \(no route\); check the network, or give"):
        load_prompts("gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        InputError, match=r"install it \(pip install datasets\), or give the folder that holds gsm8k_test\.jsonl"
    ):
        load_prompts("gsm8k")


def test_built_in_prompts_are_a_mixture_of_six_kinds() -> None:
    found = load_prompts("builtin")
    kinds = [conversation.id.split("/")[1] for conversation in found]
    assert len({conversation.raw for conversation in found}) == 200
    assert min(kinds.count(kind) for kind in kinds) >= 33
    assert len(set(kinds)) == len(set(kinds[:6])) == 6, "also of the first few"
    with pytest.raises(ConfigError, match="did you mean 'builtin'"):
        load_prompts("bultin")
