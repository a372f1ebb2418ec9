"""Read training rows, and turn them into the token ids that the target would have produced."""

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from volley.chat import encode_chat, encode_prompt, end_of_turn, render_chat, template_digest, tokenize_rendered
from volley.errors import InputError
from volley.prompts import read_jsonl
from volley.train.documents import Document, fingerprint, response_counts
from volley.train.features import FrozenTarget
from volley.train.options import TrainConfig, filled

Row = dict[str, Any]
EVAL_DOCUMENTS = 128  # most rows for the held-out loss


def read_rows(paths: Sequence[str | Path]) -> list[Row]:
    """Read the rows of JSONL files. The error for a bad line names file and line."""
    rows = [_check(row, f"{path} line {number}") for path in paths for number, row in read_jsonl(Path(path))]
    if not rows:
        raise InputError(f"{', '.join(map(str, paths))}: no rows; collect responses with `volley collect` first")
    return rows


def _check(row: Row, where: str) -> Row:
    if _has_ids(row):
        return row
    messages = row.get("messages")
    if row.get("tools"):
        raise InputError(
            f"{where}: it has tools, which are not put into prompts here; give the token ids that the target read and wrote, "
            "as prompt_token_ids and response_token_ids"
        )
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: no 'messages'; each row needs a list of chat messages ending with the response")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            raise InputError(f"{where}: a message is not {{'role': …, 'content': text}}; write each message so")
    if messages[-1]["role"] != "assistant":
        raise InputError(f"{where}: the last message is not the assistant's; it must be the target's own response")
    if messages[-1].get("reasoning_content"):
        raise InputError(
            f"{where}: the response has its reasoning apart, and a drafter learns the text as the target writes it; "
            "collect it again with token ids, or without reasoning"
        )
    return row


def _has_ids(row: Row) -> bool:
    return all(
        isinstance(row.get(key), list) and all(isinstance(token, int) for token in row[key])
        for key in ("prompt_token_ids", "response_token_ids")
    )


def encode_rows(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], max_length: int, stop_token_ids: set[int]
) -> list[Document]:
    """Make one document of each row, cut to ``max_length``.

    A row's own token ids are used if it has them. Otherwise the prompt goes through the chat template with its generation
    prompt. The response is tokenised separately, and ends with the end of turn, as the target wrote it.
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
    """Count each of ``vocab_size`` tokens in the responses of the rows."""
    documents = encode_rows(tokenizer, rows, sys.maxsize, stop_token_ids)
    _check_vocabulary(documents, vocab_size)
    return response_counts(documents, vocab_size).tolist()


def _check_vocabulary(documents: Sequence[Document], vocab_size: int) -> None:
    for document in documents:
        if len(document) and not 0 <= int(document.token_ids.min()) <= int(document.token_ids.max()) < vocab_size:
            raise InputError(
                f"a row has a token id outside the target's vocabulary of {vocab_size}; "
                "its token ids come from another target: collect it again"
            )


def _cut(prompt: list[int], response: list[int], max_length: int) -> Document:
    return Document(torch.tensor((prompt + response)[:max_length], dtype=torch.int32), len(prompt))


def _encode_chunk(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row], end: int | None
) -> Iterator[tuple[list[int], list[int]]]:
    texts = [row for row in rows if not _has_ids(row)]
    bare, chats = [row for row in texts if _is_bare(row)], [row for row in texts if not _is_bare(row)]
    prompts: dict[bool, Iterator[list[int]]] = {}
    if bare:
        prompts[True] = iter(tokenizer([row["messages"][0]["content"] for row in bare])["input_ids"])
    if chats:
        rendered = [render_chat(tokenizer, row["messages"][:-1], thinking=_thinking(row)) for row in chats]
        prompts[False] = iter(tokenize_rendered(tokenizer, rendered))
    contents = [row["messages"][-1]["content"] for row in texts]
    responses = iter(tokenizer(contents, add_special_tokens=False)["input_ids"] if texts else ())
    for row in rows:
        if _has_ids(row):
            yield list(row["prompt_token_ids"]), list(row["response_token_ids"])
            continue
        prompt, response = next(prompts[_is_bare(row)]), next(responses)
        own = tokenizer.eos_token_id if _is_bare(row) else end
        has_ended = row.get("finish_reason", "stop") == "stop"
        yield list(prompt), [*response, own] if own is not None and has_ended else list(response)


def _is_bare(row: Row) -> bool:
    """Return True if the target read the prompt without a chat template (``volley collect --raw``)."""
    return row.get("chat_template") is False and len(row["messages"]) == 2


def _thinking(row: Row) -> bool | None:
    return {"on": True, "off": False}.get(str(row.get("thinking")))


def _template(row: Row, own: str | bool) -> str | bool | None:
    """Return the digest of the template of a row's prompt, if it is known; ``own`` is that of the tokenizer."""
    if not _has_ids(row):
        return not _is_bare(row) and own
    found = row.get("chat_template")
    return found if found is False or isinstance(found, str) else None


def asked(row: Row) -> str:
    """Return a digest of the conversation that a row belongs to; it is equal for all turns."""
    if row.get("turns", 1) > 1:
        prompt = row.get("id")
    else:
        prompt = row.get("prompt_token_ids") or [message["content"] for message in row["messages"][:-1]]
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[int]:
    """Return the token ids of a row's prompt."""
    if _has_ids(row):
        return list(row["prompt_token_ids"])
    if _is_bare(row):
        return encode_prompt(tokenizer, row["messages"][0]["content"])
    return encode_chat(tokenizer, row["messages"][:-1], thinking=_thinking(row))


class TrainingData:
    """Training rows (``documents``) and held-out rows (``held_out``, and ``prompts`` for the engine)."""

    def __init__(self, config: TrainConfig, target: FrozenTarget) -> None:
        self.target = target
        longest = config.max_length or filled(config.tokens_per_batch)
        context = getattr(target.text_config, "max_position_embeddings", longest)
        self.max_length = min(longest, context)
        rows, held_rows = self._split(config)
        self.documents = self._encode(rows)
        own = template_digest(target.tokenizer)
        self.origin = {
            "temperatures": sorted({float(row["temperature"]) for row in rows if row.get("temperature") is not None}),
            "thinking": sorted({str(row.get("thinking")) for row in rows}),
            "chat_templates": sorted({str(_template(row, own)) for row in rows}),
        }
        if not self.documents:
            raise InputError(
                f"no row of {', '.join(config.data)} has two response tokens within {self.max_length} tokens; "
                "collect longer responses, or raise --max-length"
            )
        self.dropped = len(rows) - len(self.documents)
        self.held_out = self._encode(held_rows)[:EVAL_DOCUMENTS]
        self.prompts = self._prompts(held_rows, config, context)
        self.lengths = [len(document) for document in self.documents]
        self.response_tokens = sum(len(document) - document.response_start for document in self.documents)
        self.fingerprint = fingerprint(self.documents)

    @staticmethod
    def _split(config: TrainConfig) -> tuple[list[Row], list[Row]]:
        rows = read_rows(config.data)
        if config.eval_data is not None:
            return rows, read_rows([config.eval_data])
        groups: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(asked(row), []).append(index)
        order, held = random.Random(config.seed).sample(list(groups.values()), len(groups)), set[int]()
        for group in order:
            if len(held) + len(group) <= len(rows) * config.eval_share:
                held.update(group)
        return [row for index, row in enumerate(rows) if index not in held], [rows[index] for index in sorted(held)]

    def _prompts(self, rows: list[Row], config: TrainConfig, context: int) -> list[list[int]]:
        """Return the distinct prompts of ``rows`` after which an answer fits the context."""
        found: dict[tuple[int, ...], None] = {}
        for row in rows:
            if len(found) >= config.eval_prompts:
                break
            ids = prompt_ids(self.target.tokenizer, row)
            if 0 < len(ids) <= context - config.eval_max_tokens:
                found[tuple(ids)] = None
        return [list(ids) for ids in found]

    def _encode(self, rows: list[Row]) -> list[Document]:
        encoded = encode_rows(self.target.tokenizer, rows, self.max_length, self.target.stop_token_ids)
        encoded = [document for document in encoded if len(document) - document.response_start >= 2]
        _check_vocabulary(encoded, self.target.vocab_size)
        return encoded

    def summary(self) -> dict[str, Any]:
        """Return the facts about the data for the report: counts, and how the responses were made."""
        return {
            **self.origin,
            "longest": max(self.lengths),
            "rows": len(self.documents),
            "rows_without_two_response_tokens": self.dropped,
            "tokens": sum(self.lengths),
            "response_tokens": self.response_tokens,
            "held_out_rows": len(self.held_out),
        }

    def describe(self) -> str:
        """Describe the data in one line."""
        return (
            f"data: {len(self.documents)} rows, {sum(self.lengths)} tokens, {self.response_tokens} of them in responses; "
            f"{self.dropped} rows too short, {len(self.held_out)} held out for the loss and {len(self.prompts)} for τ"
        )
