"""Training rows: read them, turn them into the token ids the target would have produced, and lay them out in batches."""

import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from volley.errors import InputError
from volley.prompts import read_jsonl

Row = dict[str, Any]


@dataclass(frozen=True)
class Document:
    """``token_ids [n]`` (int32) of prompt and response; the response starts at ``response_start``."""

    token_ids: Tensor
    response_start: int

    def __len__(self) -> int:
        return len(self.token_ids)


def read_rows(paths: Sequence[str | Path]) -> list[Row]:
    """Rows of JSONL files; a bad line is an error that names file and line."""
    rows = [_check(row, f"{path} line {number}") for path in paths for number, row in read_jsonl(Path(path))]
    if not rows:
        raise InputError(f"{', '.join(map(str, paths))}: no rows; collect responses with `volley collect` first")
    return rows


def _check(row: Row, where: str) -> Row:
    if _has_ids(row):
        return row
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: no 'messages'; each row needs a list of chat messages ending with the response")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            raise InputError(f"{where}: a message is not {{'role': …, 'content': text}}; write each message so")
    if messages[-1]["role"] != "assistant":
        raise InputError(f"{where}: the last message is not the assistant's; it must be the target's own response")
    return row


def _has_ids(row: Row) -> bool:
    return all(
        isinstance(row.get(key), list) and all(isinstance(token, int) for token in row[key])
        for key in ("prompt_token_ids", "response_token_ids")
    )


def end_of_turn(tokenizer: PreTrainedTokenizerBase, stop_token_ids: set[int]) -> int | None:
    """The token the target ends its turn with: the first stop token the template writes after a response."""
    mark = "volleyvolley"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": mark}]
    rendered = str(tokenizer.apply_chat_template(chat, tokenize=False)) if tokenizer.chat_template else ""
    after = tokenizer(rendered.rpartition(mark)[2], add_special_tokens=False)["input_ids"] if mark in rendered else []
    own: int | None = tokenizer.eos_token_id
    return next((int(token) for token in after if token in stop_token_ids), own)


def encode_rows(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], max_length: int, stop_token_ids: set[int]
) -> list[Document]:
    """One document a row, cut to ``max_length``.

    A row's own token ids are taken as they are. Otherwise the prompt goes through the chat template with its generation
    prompt, and the response is tokenised by itself and ended, as the target wrote it.
    """
    end = end_of_turn(tokenizer, stop_token_ids)
    documents = []
    iterator = iter(rows)
    while chunk := list(islice(iterator, 1024)):
        documents += [_cut(*pair, max_length) for pair in _encode_chunk(tokenizer, chunk, end)]
    return documents


def count_response_tokens(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], stop_token_ids: set[int], vocab_size: int
) -> list[int]:
    """How often each of ``vocab_size`` tokens stands in the rows' responses."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for document in encode_rows(tokenizer, rows, sys.maxsize, stop_token_ids):
        token_ids = document.token_ids[document.response_start :]
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
            raise InputError(
                f"a row has a token id outside the target's vocabulary of {vocab_size}; it is another target's"
            )
        counts += torch.bincount(token_ids, minlength=vocab_size)
    return counts.tolist()


def _cut(prompt: list[int], response: list[int], max_length: int) -> Document:
    return Document(torch.tensor((prompt + response)[:max_length], dtype=torch.int32), len(prompt))


def _encode_chunk(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row], end: int | None
) -> Iterator[tuple[list[int], list[int]]]:
    texts = [row for row in rows if not _has_ids(row)]
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    if texts:
        rendered = [render_prompt(tokenizer, row) for row in texts]
        prompts = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        contents = [row["messages"][-1]["content"] for row in texts]
        responses = tokenizer(contents, add_special_tokens=False)["input_ids"]
    encoded = zip(texts, prompts, responses, strict=True)
    for row in rows:
        if _has_ids(row):
            yield list(row["prompt_token_ids"]), list(row["response_token_ids"])
            continue
        _, prompt, response = next(encoded)
        ended = end is not None and row.get("finish_reason", "stop") == "stop"
        yield list(prompt), [*response, end] if ended and end is not None else list(response)


def render_prompt(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    """The text the target saw: all messages but the last, through its chat template."""
    if tokenizer.chat_template is None:
        raise InputError(
            "the target's tokenizer has no chat template; give one to the tokenizer, or rows with "
            "'prompt_token_ids' and 'response_token_ids'"
        )
    thinking = {"on": True, "off": False}.get(str(row.get("thinking")))
    options = {} if thinking is None else {"enable_thinking": thinking}
    chat = row["messages"][:-1]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[int]:
    if _has_ids(row):
        return list(row["prompt_token_ids"])
    return list(tokenizer(render_prompt(tokenizer, row), add_special_tokens=False)["input_ids"])


def fingerprint(documents: Sequence[Document]) -> str:
    """A digest of every token and every response start."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.token_ids.numpy().tobytes())
        digest.update(f"/{document.response_start};".encode())
    return digest.hexdigest()[:32]


def plan_epoch(lengths: Sequence[int], tokens_per_batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of document indices for one epoch: alike in length, in random order, ``rows × longest ≤ tokens_per_batch``.

    Documents are shuffled, then sorted by length inside pools of some fifty batches: padding stays small and neighbours
    differ from epoch to epoch. A document longer than the budget makes a batch of its own. Depends on its arguments alone.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    while order:
        pool, tokens = [], 0
        while order and tokens < 50 * tokens_per_batch:
            pool.append(order.pop())
            tokens += lengths[pool[-1]]
        pool.sort(key=lambda index: lengths[index])
        batches += split_batches(pool, lengths, tokens_per_batch)
    rng.shuffle(batches)
    return batches


def split_batches(indices: Sequence[int], lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Cut ``indices``, ascending in length, where the padded batch would exceed the budget."""
    batches: list[list[int]] = []
    for index in indices:
        if not batches or (len(batches[-1]) + 1) * lengths[index] > tokens_per_batch:
            batches.append([])
        batches[-1].append(index)
    return batches


def pad(documents: Sequence[Document]) -> Tensor:
    """``[D, S]`` int64, right-padded with 0: the models are causal and no anchor reaches the padding."""
    rows = [document.token_ids.long() for document in documents]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
