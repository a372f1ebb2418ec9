"""The server's tools, forms, reasoning, stops and streams over tokenizers and templates like those of published models.

Tokenizers are made here, with every pair of their properties in some row. Published ones are read from the GGUF files in the
folder that ``VOLLEY_TEST_MODELS`` names.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise as pairwise_of
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jsonschema import validate
from torch import Tensor

from tests import tiny
from tests.pairwise import Row, pairs_of, pairwise
from tests.serve.running import Running, running
from tests.serve.tokenizers import EOS, FORMS, MARKS, VOCAB, call_in, made_up
from volley import Engine, Grammar
from volley.decode.grammars import Grammars
from volley.decode.rules import TokenRule
from volley.models.targets.target import Target, load_tokenizer
from volley.params import SamplingParams
from volley.serve.calls import grammar_of_answer
from volley.serve.formats import AnswerFormat, format_of, load_format
from volley.serve.messages import Tool, Tools
from volley.serve.parsing import AnswerParser
from volley.serve.protocol import ChatRequest

DIMENSIONS: dict[str, Sequence[Any]] = {
    "form": FORMS,
    "split": ("byte_level", "llama", "gemma"),
    "marks": ("text", "added", "special"),
    "template": ("single", "named", "text_arguments"),
    "begin": ("none", "tokenizer", "template"),
    "thinks": ("prompt", "model", "never"),
    "drafts": (False, True),
    "streams": (False, True),
}
ROWS = pairwise(DIMENSIONS)
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORCED: Any = {**SCHEMA, "properties": {**SCHEMA["properties"], "city": {"enum": ["Bern", "New York"]}}}
USER: Any = [{"role": "user", "content": "How is the weather in Bern?"}]


class Script(TokenRule):
    """Makes a model write given tokens."""

    title = "a script"

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._rest = list(token_ids)

    def take(self, token_id: int) -> None:
        assert self._rest.pop(0) == token_id, "no other rule has forbidden it"

    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        for row, path in enumerate(paths):
            if len(path) < len(self._rest):
                kept = logits[row, self._rest[len(path)]].clamp(min=0)
                logits[row] -= 1e4
                logits[row, self._rest[len(path)]] = kept
        return logits


class Cell(NamedTuple):
    """A server with one of the tokenizers."""

    server: Running
    tokenizer: Any
    form: AnswerFormat
    row: Row
    script: list[int]
    """Text that the model writes next; empty: any."""

    @property
    def is_special(self) -> bool:
        """True if the markers are special tokens."""
        return bool(self.row["marks"] == "special" or self.row["form"] == "gpt_oss")

    def ids(self, text: str, *, spelt: bool = False) -> list[int]:
        """The tokens of a text, each marker as its own token, or all of them ``spelt`` by ordinary ones."""
        inner = self.tokenizer.backend_tokenizer
        if spelt:
            known = json.loads(inner.to_str())
            known["added_tokens"] = [one for one in known["added_tokens"] if one["id"] <= 2]
            inner = type(inner).from_str(json.dumps(known))
        marks = [one for one in MARKS[self.row["form"]] if inner.token_to_id(one) is not None]
        ids: list[int] = []
        for part in filter(None, re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]):
            if part in marks:
                ids.append(inner.token_to_id(part))
            else:  # it is no first word
                before = inner.encode("~", add_special_tokens=False).ids
                ids += inner.encode(f"~{part}", add_special_tokens=False).ids[len(before) :]
        return ids

    def says(self, text: str, *, spelt: bool = False, **body: Any) -> tuple[dict[str, Any], str]:
        """The message and the reason of an answer that is this text."""
        self.script[:] = [*self.ids(text, spelt=spelt), self.tokenizer.convert_tokens_to_ids(EOS)]
        try:
            return self.ask(**{"max_tokens": 500, "temperature": 0, **body})
        finally:
            self.script.clear()

    def ask(self, **body: Any) -> tuple[dict[str, Any], str]:
        asked = {"messages": USER, "seed": 7, **body}
        if self.row["streams"]:
            return self._streamed(asked)
        response = self.server.post("chat/completions", asked)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return {"content": choice["message"]["content"] or "", **_told(choice["message"])}, choice["finish_reason"]

    def _streamed(self, body: Any) -> tuple[dict[str, Any], str]:
        texts, calls, reason = {"content": "", "reasoning": ""}, list[list[str]](), ""
        with self.server.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                delta, reason = choice["delta"], choice["finish_reason"] or reason
                texts["content"] += delta.get("content") or ""
                texts["reasoning"] += delta.get("reasoning_content") or ""
                for part in delta.get("tool_calls", []):
                    calls += [["", ""]] * (part["index"] == len(calls))
                    name, arguments = calls[part["index"]]
                    own = part["function"]
                    calls[part["index"]] = [name + own.get("name", ""), arguments + own["arguments"]]
        return {**texts, "calls": [tuple(call) for call in calls]}, reason


def _told(message: dict[str, Any]) -> dict[str, Any]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return {"reasoning": message.get("reasoning_content", ""), "calls": calls}


@pytest.fixture(scope="module")
def weights() -> tiny.Pair:
    """One random model for all tokenizers."""
    return tiny.make_pair(
        drafter={"vocab_size": VOCAB, "num_hidden_layers": 1},
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        eos_token_id=2,
        num_hidden_layers=4,
    )


@contextmanager
def served(weights: tiny.Pair, tokenizer: Any, row: Row) -> Iterator[Cell]:
    target = Target(weights.hf, tokenizer)
    engine = Engine(target, weights.drafter, policy="fixed") if row["drafts"] else Engine(target)
    script: list[int] = []
    sampling: Callable[..., SamplingParams] = ChatRequest.sampling

    def scripted(body: ChatRequest, *options: Any) -> SamplingParams:
        params, tokens = sampling(body, *options), list(script)
        return params if not tokens else SamplingParams(**{**vars_of(params), "rules": (lambda *_: Script(tokens),)})

    with pytest.MonkeyPatch.context() as patch, running(engine) as server:
        patch.setattr("tests.serve.conftest.PASS_SECONDS", 0)
        patch.setattr(ChatRequest, "sampling", scripted)
        yield Cell(server, tokenizer, load_format(row["form"]), row, script)
        server.settle()


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


@pytest.fixture(
    scope="module",
    params=[pytest.param(row, marks=[] if number % 4 == 0 else pytest.mark.slow) for number, row in enumerate(ROWS)],
    ids=lambda row: "-".join(str(own) for own in row.values()),
)
def cell(request: pytest.FixtureRequest, weights: tiny.Pair) -> Iterator[Cell]:
    row = request.param
    tokenizer = made_up(*(row[name] for name in ("split", "marks", "form", "template", "begin", "thinks")))
    with served(weights, tokenizer, row) as cell:
        yield cell


def tool(schema: Any = SCHEMA, *, strict: bool = False) -> Any:
    return {
        "type": "function",
        "function": {"name": "weather", "description": "", "parameters": schema, "strict": strict},
    }


def thought(cell: Cell, text: str = "Is it?") -> str:
    """Reasoning that the model writes, if it reasons."""
    marks = cell.form.thinking
    if marks is None or cell.row["thinks"] == "never":
        return ""
    is_open = cell.row["thinks"] == "prompt" and cell.row["form"] != "gpt_oss"
    return ("" if is_open else marks[0]) + text + marks[1] + (cell.form.answer[1] if cell.form.answer else "")


def answer(cell: Cell, text: str) -> str:
    return (cell.form.answer[0] if cell.form.answer else "") + text


def test_rows_have_every_pair() -> None:
    rows = [pair for row in ROWS for pair in pairs_of(row)]
    for first, firsts in DIMENSIONS.items():
        for second, seconds in DIMENSIONS.items():
            if list(DIMENSIONS).index(first) < list(DIMENSIONS).index(second):
                wanted = {((first, a), (second, b)) for a in firsts for b in seconds}
                assert wanted <= set(rows)
    assert len(ROWS) < 40


def test_prompts_are_those_of_transformers(cell: Cell) -> None:
    """With one beginning token at most, from the template that the tokenizer chooses."""
    for tools in ([], [tool()]):
        body = {"messages": USER, "tools": tools}
        served_ = cell.server.client.post("/tokenize", json=body).json()["tokens"]
        own = {"tools": [Tool.model_validate(one).for_template() for one in tools]} if tools else {}
        text = cell.tokenizer.apply_chat_template(USER, add_generation_prompt=True, tokenize=False, **own)
        assert served_ == cell.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ("tool_use" in text) == (cell.row["template"] == "named" and bool(tools))
    raw = cell.server.client.post("/tokenize", json={"prompt": "Bern"}).json()["tokens"]
    assert raw.count(1) == (cell.row["begin"] != "none")


def test_calls_in_a_conversation_are_written_as_the_template_does(cell: Cell) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "Sun"},
    ]
    tokens = cell.server.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert '<call weather {"city": "Bern"}>' in cell.tokenizer.decode(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("spelt", [False, True])
def test_what_a_model_writes_is_taken_apart(cell: Cell, spelt: bool) -> None:
    """True if a marker is one token, False if it is many."""
    if spelt and cell.row["marks"] == "text":
        pytest.skip("it has no other spelling")
    text = "Grüße aus 東京: 1 < 2."
    message, reason = cell.says(thought(cell) + answer(cell, text), spelt=spelt)
    assert (message, reason) == ({"content": text, "reasoning": "Is it?" if thought(cell) else "", "calls": []}, "stop")
    for strict in (False,) if spelt else (False, True):  # text that a grammar forces has one spelling
        has_marks = not strict or not cell.is_special  # a special token is no text in a schema
        arguments = {"city": "a </tool_call> <|end|> [ARGS] b ü" if has_marks else "a ü", "days": 3}
        said = thought(cell) + call_in(cell.form, "weather", arguments)
        message, reason = cell.says(said, spelt=spelt, tools=[tool(strict=strict)])
        assert [(name, json.loads(own)) for name, own in message["calls"]] == [("weather", arguments)]
        assert (message["content"], reason) == ("", "tool_calls")
        assert message["reasoning"] == ("Is it?" if thought(cell) else "")


@pytest.mark.slow
def test_a_bare_call_is_one(cell: Cell) -> None:
    said = answer(cell, '{"name": "weather", "arguments": {"city": "Bern", "days": 3}}')
    message, reason = cell.says(thought(cell) + said, tools=[tool()])
    assert [(name, json.loads(own)) for name, own in message["calls"]] == [("weather", {"city": "Bern", "days": 3})]
    assert (message["content"], reason) == ("", "tool_calls")


@pytest.mark.slow
def test_a_stop_is_found_whatever_its_tokens_are(cell: Cell) -> None:
    for stop in ("東", "is", "[STOP]", *(MARKS[cell.row["form"]][:1] if cell.row["form"] != "gpt_oss" else [])):
        opening = thought(cell) + answer(cell, "Bern")
        if stop in opening:
            continue
        message, reason = cell.says(opening + f" and{stop} Rome", stop=[stop])
        assert (message["content"], reason) == ("Bern and", "stop"), stop


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_are_valid(cell: Cell, choice: Any) -> None:
    body = {"tools": [tool(FORCED)], "tool_choice": choice, "max_tokens": 200, "temperature": 1}
    if cell.row["thinks"] == "prompt" and cell.form.thinking:
        body["thinking_token_budget"] = 5
    message, reason = cell.ask(**body, parallel_tool_calls=False)
    ((name, arguments),) = message["calls"]
    assert (name, message["content"]) == ("weather", "")
    assert reason == ("tool_calls" if choice == "required" else "stop")
    validate(json.loads(arguments), FORCED)


@pytest.mark.slow
def test_a_form_comes_after_reasoning_that_ends_at_its_budget(cell: Cell) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": FORCED}}
    budget = {"thinking_token_budget": 5} if cell.form.thinking else {}
    is_bound = cell.form.call is not None and cell.form.call.is_json
    for tools in ({}, {"tools": [tool(FORCED)]})[: 1 + is_bound]:
        asked: Any = {"response_format": schema, "max_tokens": 250, "temperature": 1, "parallel_tool_calls": False}
        message, reason = cell.ask(**asked, **budget, **tools)
        assert reason in ("stop", "tool_calls")
        found = [json.loads(own) for _, own in message["calls"]] or [json.loads(message["content"])]
        for one in found:
            validate(one, FORCED)


@pytest.mark.parametrize("spelt", [False, True])
def test_strict_tools_bind_a_call_however_it_is_spelt(cell: Cell, spelt: bool) -> None:
    offered = Tools(tools=[Tool.model_validate(tool(FORCED, strict=True))])
    grammar = grammar_of_answer(cell.form, offered, None, cell.tokenizer, is_thinking=False)
    if cell.form.call is None or not cell.form.call.is_json:
        assert grammar is None
        return
    assert isinstance(grammar, Grammar)
    right, wrong = (call_in(cell.form, "weather", {"city": city, "days": 3}) for city in ("Bern", "Oslo"))
    for text, is_allowed in ((right, True), (wrong, False), ("Sun.", True)):
        rule = cell.server.engine.grammars.rule(grammar)
        tokens = cell.ids(text, spelt=spelt)
        assert (rule.num_allowed(tokens) == len(tokens)) is is_allowed, text


PUBLISHED = ("SmolLM2", "Qwen2.5-Coder", "gemma-3")


def _published(name: str) -> Path:
    """The GGUF file of a published model; skips the test if there is none."""
    folder = os.environ.get("VOLLEY_TEST_MODELS")
    if folder is None:
        pytest.skip("VOLLEY_TEST_MODELS names no folder of GGUF files")
    found = next(iter(sorted(Path(folder).glob(f"{name}*.gguf"))), None)
    return found if found is not None else pytest.skip(f"{folder} has no {name}*.gguf")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokenizers(name: str) -> None:
    """Every format's calls pass its grammar in the model's own tokens, and are read from them piece by piece."""
    pytest.importorskip("gguf")
    tokenizer = load_tokenizer(_published(name))
    grammars = Grammars(tokenizer, len(tokenizer), {tokenizer.eos_token_id})
    known = format_of(tokenizer, str(tokenizer.chat_template or ""))
    assert (known and known.name) == ("hermes" if name == "Qwen2.5-Coder" else None)
    if name == "Qwen2.5-Coder":
        assert len(tokenizer("<tool_call>", add_special_tokens=False)["input_ids"]) == 1
        assert tokenizer("<tool_call>")["input_ids"][0] not in tokenizer.all_special_ids
    arguments = {"city": "a </tool_call> ü", "days": 3}
    for form in (load_format(one) for one in FORMS):
        said, prompt = call_in(form, "weather", arguments), BEGINS.get(form.name, "")
        token_ids = tokenizer(said, add_special_tokens=False)["input_ids"]
        for choice in ("auto", "required") if form.call is not None and form.call.is_json else ():
            offered = Tools(tools=[Tool.model_validate(tool(strict=True))], tool_choice=choice)
            grammar = grammar_of_answer(form, offered, None, tokenizer, is_thinking=False)
            if not form.call.anywhere:
                rule = grammars.rule(grammar)
                assert rule.num_allowed(token_ids) == len(token_ids), (form.name, choice)
        parser = AnswerParser(form, prompt, [tool()], with_calls=True)
        decoded = [tokenizer.decode(token_ids[:end]) for end in range(len(token_ids) + 1)]
        whole = [text for text in decoded if not text.endswith("\ufffd")]
        parts = [part for a, b in pairwise_of(whole) for part in parser.feed(b[len(a) :])] + parser.finish()
        assert json.loads("".join(part.text for part in parts if part.kind == "arguments")) == arguments, form.name


BEGINS = {"gpt_oss": "<|start|>assistant"}
