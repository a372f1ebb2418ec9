"""Request fields that constrain the answer: OpenAI's ``response_format`` and the fields of vLLM and SGLang."""

import asyncio
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from volley.decode.grammars import Grammars
from volley.errors import ConfigError
from volley.grammar import WHITESPACE, Grammar
from volley.serve.errors import ApiError
from volley.serve.fields import Strict


class _Part(Strict):
    model_config = ConfigDict(populate_by_name=True)
    may_ignore = False


class JsonSchemaFormat(_Part):
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema", description="The JSON schema; any JSON object without one.")
    strict: bool | None = Field(None, description="Without effect: answers always follow the schema.")


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Part):
    """vLLM's ``structured_outputs``."""

    json_: Any = Field(None, alias="json", description="A JSON schema, as an object or as text.")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="In Lark's notation, or in EBNF if it has `::=`.")
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False
    disable_additional_properties: Literal[False] = False


class GrammarFields(BaseModel):
    """Fields of a request, at most one of which constrains the text."""

    response_format: ResponseFormat | None = Field(None, description="OpenAI's.")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's.")
    json_schema: Any = Field(None, description="SGLang's: a JSON schema, as text or as an object.")
    regex: str | None = Field(None, description="SGLang's.")
    ebnf: str | None = Field(None, description="SGLang's.")


def grammar_of(body: GrammarFields) -> Grammar | None:
    """Return the grammar that the answer must follow, or ``None``. Raises :class:`ApiError` (400) that names the field at
    fault."""
    found = asked_for(body)
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise ApiError(400, f"{first} and {second} both say what the answer must be; give one of them", param=second)
    for field, kind, value, whitespace in found:
        try:
            return _grammar(kind, value, whitespace)
        except ConfigError as error:
            raise ApiError(400, f"{field}: {error}", param=field) from None
    return None


async def compile_grammar(grammars: Grammars, body: GrammarFields) -> Grammar | None:
    """Compile a body's grammar outside the engine's thread, so that the engine finds it ready. Raises as :func:`grammar_of`
    does."""
    grammar = grammar_of(body)
    if grammar is not None:
        try:
            await asyncio.to_thread(grammars.compile, grammar)
        except ConfigError as error:
            field = asked_for(body)[0][0]
            raise ApiError(400, f"{field}: {error}", param=field) from None
    return grammar


_Asked = tuple[str, str, Any, str]


def asked_for(body: GrammarFields) -> list[_Asked]:
    """Return each field that is given: name, type of grammar, value and JSON white space."""
    fields: list[_Asked] = [
        ("json_schema", "json_schema", body.json_schema, WHITESPACE),
        ("regex", "regex", body.regex, ""),
        ("ebnf", "ebnf", body.ebnf, ""),
    ]
    if (form := body.response_format) is not None and form.type != "text":
        if form.type == "json_object":
            fields.append(("response_format", "json_object", True, WHITESPACE))
        else:
            field = "response_format.json_schema"
            if form.json_schema is None:
                raise ApiError(400, f"{field} is missing; a format of type json_schema needs a schema", param=field)
            schema = form.json_schema.schema_
            fields.append((field, "json_schema", {} if schema is None else schema, WHITESPACE))
    if (outputs := body.structured_outputs) is not None:
        spaces = "" if outputs.disable_any_whitespace else outputs.whitespace_pattern or WHITESPACE
        fields += [
            ("structured_outputs.json", "json_schema", outputs.json_, spaces),
            ("structured_outputs.regex", "regex", outputs.regex, ""),
            ("structured_outputs.choice", "choice", outputs.choice, ""),
            ("structured_outputs.grammar", "grammar", outputs.grammar, ""),
            ("structured_outputs.json_object", "json_object", outputs.json_object or None, spaces),
        ]
    return [field for field in fields if field[2] is not None]


def _grammar(kind: str, value: Any, whitespace: str) -> Grammar:
    match kind:
        case "json_schema":
            return Grammar.json_schema(value, whitespace=whitespace)
        case "json_object":
            return Grammar.json_object(whitespace=whitespace)
        case "regex":
            return Grammar.regex(value)
        case "choice":
            return Grammar.choice(value)
        case "ebnf":
            return Grammar.ebnf(value)
    return Grammar.ebnf(value) if "::=" in value else Grammar.lark(value)
