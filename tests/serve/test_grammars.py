"""Constraints on an answer's form in a request, from the body to the text, and their errors."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from tests.serve.running import MODEL, Running, Tiny
from volley.grammar import WHITESPACE, Grammar
from volley.serve.errors import ApiError
from volley.serve.grammars import grammar_of
from volley.serve.protocol import ChatRequest, CompletionRequest

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 0, "maximum": 20}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA)
OPENAI = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
LARK, EBNF = 'start: "a"+', 'root ::= "a"+'
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def _left_idle(drafting: Running) -> Iterator[None]:
    yield
    drafting.settle()


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "guided_decoding_backend": "xgrammar"}, None),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        ({"response_format": OPENAI}, Grammar.json_schema(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, Grammar.json_schema(True)),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
        (
            {"structured_outputs": {"json": TEXT, "disable_any_whitespace": True}},
            Grammar.json_schema(SCHEMA, whitespace=""),
        ),
        (
            {"structured_outputs": {"json": TEXT, "whitespace_pattern": " ?"}},
            Grammar.json_schema(SCHEMA, whitespace=" ?"),
        ),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"structured_outputs": {"grammar": LARK}}, Grammar.lark(LARK)),
        ({"structured_outputs": {"regex": "a+"}}, Grammar.regex("a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar.choice(["a"])),
        ({"structured_outputs": {"grammar": EBNF}}, Grammar.ebnf(EBNF)),
        ({"json_schema": TEXT}, Grammar.json_schema(SCHEMA)),
        ({"regex": "a+"}, Grammar.regex("a+")),
        ({"ebnf": EBNF}, Grammar.ebnf(EBNF)),
    ],
)
def test_each_dialect_says_the_same(fields: dict[str, Any], grammar: Grammar | None) -> None:
    for body in (ChatRequest(messages=USER, **fields), CompletionRequest(prompt="x", **fields)):
        assert grammar_of(body) == grammar
        assert body.sampling(5, None).grammar == grammar
    assert grammar is None or grammar.whitespace in ("", " ?", WHITESPACE)


def test_two_forms_at_once_are_refused() -> None:
    body = ChatRequest(messages=USER, regex="a", response_format={"type": "json_object"})  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="regex and response_format both say what the answer must be"):
        grammar_of(body)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"not": {}}}}}},
            "response_format.json_schema",
            'the JSON schema cannot be used, at /items: Unimplemented keys: ["not"]',
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x", "unknown field"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs a schema"),
        ({"json_schema": "{"}, "json_schema", "not JSON: Expecting property name"),
        ({"json_schema": 3}, "json_schema", "the JSON schema is a int; give an object"),
        ({"regex": "("}, "regex", "unclosed group"),
        ({"regex": ""}, "regex", "is empty"),
        ({"regex": "\ud800"}, "regex", "lone surrogate"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "one or more texts"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice.0", "valid string"),
        ({"structured_outputs": {"grammar": "start: nope"}}, "structured_outputs.grammar", 'unknown name: "nope"'),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unknown field"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "'json_schema'"),
        ({"guided_json": TEXT}, "guided_json", "guided_json: use structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"ebnf": "root = 1"}, "ebnf", "Expected ::= at line 1"),
        ({"ebnf": 'a ::= "b"'}, "ebnf", "the ebnf grammar cannot be used: No 'root' rule"),
        ({"ebnf": "root ::= x"}, "ebnf", "the ebnf grammar cannot be used: Rule 'x'"),
        ({"ebnf": 'root ::= "\\'}, "ebnf", "the ebnf grammar cannot be used"),
        ({"regex": "a", "ebnf": EBNF}, "ebnf", "regex and ebnf both say"),
    ],
)
def test_what_is_wrong_is_said_and_where(drafting: Running, fields: dict[str, Any], param: str, message: str) -> None:
    for path, body in (("chat/completions", {"messages": USER}), ("completions", {"prompt": "Hello"})):
        text = json.dumps({**body, **fields})  # in ASCII, which lone surrogates survive
        answer = drafting.client.post(f"/v1/{path}", content=text, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert message in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": OPENAI},
        {"structured_outputs": {"json": SCHEMA}, "temperature": 0.7, "n": 3},
        {"json_schema": TEXT, "temperature": 1.0, "seed": 4, "presence_penalty": 0.5, "logprobs": True},
    ],
)
def test_answers_follow_the_schema(drafting: Running, fields: dict[str, Any]) -> None:
    answer = drafting.chat("Hello", **{"temperature": 0, **fields}).json()
    assert len(answer["choices"]) == fields.get("n", 1)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_the_openai_client_streams_a_schema(drafting: Running, tiny: Tiny) -> None:
    client = openai.OpenAI(base_url=f"{drafting.url}/v1", api_key="any")
    expected = tiny.answer(USER, grammar=Grammar.json_schema(SCHEMA))
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=USER,  # type: ignore[arg-type]
        temperature=0,
        stream=True,
        response_format=OPENAI,  # type: ignore[call-overload]
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == expected
    jsonschema.validate(json.loads(text), SCHEMA)


def test_grammars_that_explode_are_refused_while_others_are_answered(drafting: Running) -> None:
    answered = 0
    with ThreadPoolExecutor(4) as pool:
        patterns = ("a{1000000}", "((a{1000}){1000}){1000}") * 4
        refused = [pool.submit(drafting.complete, "Hello", regex=pattern) for pattern in patterns]
        while not all(future.done() for future in refused):
            answer = drafting.complete("Hello", temperature=0, regex="(ab){3}").json()["choices"][0]
            assert answer["text"] == "ababab"
            answered += not all(future.done() for future in refused)
    assert answered
    for future in refused:
        error = future.result().json()["error"]
        assert (future.result().status_code, error["param"]) == (400, "regex")
        assert "too complex" in error["message"]
        assert "bound repetitions lower" in error["message"]
