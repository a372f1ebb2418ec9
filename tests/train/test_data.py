"""Rows become exactly the target's tokens; bad rows are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from volley.chat import template_digest
from volley.errors import InputError
from volley.train.data import TrainingData, asked, encode_rows, prompt_ids, read_rows
from volley.train.documents import Document, fingerprint, plan_epoch
from volley.train.features import FrozenTarget
from volley.train.options import TrainConfig

from ..conftest import TinyPair, byte_tokenizer
from .runs import tiny_run, write_rows

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def encode(rows: list[dict[str, Any]], max_length: int = 99) -> list[Document]:
    return encode_rows(byte_tokenizer(), rows, max_length, {2})


def test_a_response_is_what_follows_the_generation_prompt_and_ends_its_turn(tiny_pair: TinyPair) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair.target)
    (document,) = encode_rows(tokenizer, [{"messages": CHAT}], 99, {2})
    prompt, response = document.token_ids[: document.response_start], document.token_ids[document.response_start :]
    assert tokenizer.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(response) == "yes<|im_end|>"


def test_what_is_held_out_answers_other_prompts(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """Each prompt has four answers, and the turns of conversations hold each other."""
    rows = [
        {"prompt_token_ids": [5, prompt], "response_token_ids": [7, 8, sample]}
        for prompt in range(10, 20)
        for sample in range(4)
    ]
    for number in range(20, 26):
        both = {"id": str(number), "turns": 2, "response_token_ids": [7, 8]}
        rows += [{**both, "prompt_token_ids": [5, number, *range(6, 6 + turn)]} for turn in (0, 1)]
    file = write_rows(tmp_path / "answers.jsonl", rows)
    options = tiny_run(tiny_pair.target, tmp_path, data=[str(file)], eval_share=0.5, eval_prompts=3, eval_max_tokens=4)
    data = TrainingData(TrainConfig(**options), FrozenTarget(str(tiny_pair.target), torch.float32, torch.device("cpu")))
    held, learnt = ({tuple(d.token_ids[:2].tolist()) for d in each} for each in (data.held_out, data.documents))
    assert held
    assert len(data.held_out) <= 0.5 * len(rows)
    assert len(data.prompts) == len({tuple(prompt) for prompt in data.prompts}) == 3
    assert len({asked(row) for row in rows}) == 16
    assert not held & learnt


def test_a_response_cut_for_length_has_no_end() -> None:
    (document,) = encode([{"messages": CHAT, "finish_reason": "length"}])
    assert byte_tokenizer().decode(document.token_ids[document.response_start :]) == "yes"


def test_token_ids_of_a_row_are_taken_as_they_are_and_order_is_kept() -> None:
    ids = {"prompt_token_ids": [5, 6], "response_token_ids": [7, 8, 9]}
    rows = [{"messages": CHAT}, {"messages": CHAT, **ids}, {"messages": CHAT}]
    first, second, third = encode(rows)
    assert second.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert second.response_start == 2
    assert torch.equal(first.token_ids, third.token_ids)


def test_long_rows_are_cut() -> None:
    assert len(encode([{"messages": CHAT}], max_length=20)[0]) == 20


def test_thinking_recorded_with_a_row_reaches_the_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ 'T' if enable_thinking else 'F' }}"
    documents = encode_rows(tokenizer, [{"messages": CHAT, "thinking": switch} for switch in ("on", "off")], 99, {2})
    assert [tokenizer.decode(d.token_ids[: d.response_start]) for d in documents] == ["T", "F"]


def test_a_prompt_that_was_sent_as_it_is_is_read_so() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "T{{ messages[0].content }}"
    bare = {"messages": CHAT, "chat_template": False}
    rows = [{"messages": CHAT}, bare, {"messages": CHAT, "chat_template": True}]
    documents = encode_rows(tokenizer, rows, 99, {2})
    assert [tokenizer.decode(d.token_ids[: d.response_start]) for d in documents] == ["Thi", "hi", "Thi"]
    assert documents[1].token_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(prompt_ids(tokenizer, bare)) == "hi"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"text": "hi"}', "line 2: no 'messages'"),
        ('{"messages": [], "tools": [{}]}', "line 2: it has tools"),
        ('{"messages": []}', "line 2: no 'messages'"),
        ('{"messages": [{"role": "user"}]}', "line 2: a message is not"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "line 2: the last message is not the assistant's"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + line + "\n")
    with pytest.raises(InputError, match=message):
        read_rows([path])


def test_no_rows_no_file_and_no_text_are_errors(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(InputError, match="no rows"):
        read_rows([empty])
    with pytest.raises(InputError, match="does not exist"):
        read_rows([tmp_path / "absent.jsonl"])
    empty.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        read_rows([empty])


def test_the_templates_of_prompts_are_kept_where_they_are_known(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """Texts are rendered here, whatever answered them."""
    ids = {"prompt_token_ids": [5, 6], "response_token_ids": [7, 8, 9]}
    rows = [{**ids, "chat_template": "abc"}, {**ids, "chat_template": False}, ids, {"messages": CHAT}]
    rows.append({"messages": CHAT, "chat_template": True})
    config = TrainConfig(**{**tiny_run(tiny_pair.target, tmp_path), "eval_share": 0})
    write_rows(tmp_path / "rows.jsonl", rows)
    target = FrozenTarget(str(tiny_pair.target), torch.float32, torch.device("cpu"))
    own = template_digest(target.tokenizer)
    assert TrainingData(config, target).summary()["chat_templates"] == sorted(["False", "None", "abc", str(own)])


def test_an_epoch_holds_every_document_once_within_the_budget() -> None:
    lengths = [5 + 7 * index % 40 for index in range(100)] + [500]
    batches = plan_epoch(lengths, 120, seed=0, epoch=0)
    assert sorted(index for batch in batches for index in batch) == list(range(101))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= 120
    assert batches == plan_epoch(lengths, 120, seed=0, epoch=0)
    assert batches != plan_epoch(lengths, 120, seed=0, epoch=1)


def test_the_fingerprint_sees_tokens_and_response_starts() -> None:
    tokens = torch.arange(5, dtype=torch.int32)
    assert fingerprint([Document(tokens, 2)]) != fingerprint([Document(tokens, 3)])
    assert fingerprint([Document(tokens, 2)]) != fingerprint([Document(tokens + 1, 2)])
