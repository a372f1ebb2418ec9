"""Constraint on the text of an answer: a JSON schema, a regular expression, a grammar, or a choice.

This module only describes it. ``decode/grammars.py`` compiles it for a tokenizer and masks logits with it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from volley.errors import ConfigError

WHITESPACE = r"( |\n[ ]{0,40})?"
"""Allowed white space between the parts of JSON: none, a space, or a new line with indentation. It is bounded, because a model
allowed to write unlimited white space sometimes does."""
_MOST_CHARACTERS = 2**18


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint on the text of an answer, made by one of this class's methods. It compares by value.

    ``source`` is the schema or the list of choices as JSON, or the text of the expression or grammar. ``whitespace`` is a regular
    expression for white space between the parts of JSON; empty for none.
    """

    kind: Literal["json_schema", "regex", "lark", "ebnf", "choice"]
    source: str
    whitespace: str = ""

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError(f"the {self.kind} grammar is empty; say what the text may be")
        if len(self.source) > _MOST_CHARACTERS:
            raise ConfigError(
                f"the {self.kind} grammar has {len(self.source)} characters; give at most {_MOST_CHARACTERS}"
            )
        try:
            (self.source + self.whitespace).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the {self.kind} grammar is not valid Unicode: it has a lone surrogate") from None

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, *, whitespace: str = WHITESPACE) -> Self:
        """Allow JSON that is valid under ``schema``: a mapping, ``True`` for any JSON, or either of them as text."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"the JSON schema is not JSON: {error}") from None
        if not isinstance(schema, Mapping | bool):
            raise ConfigError(f"the JSON schema is a {type(schema).__name__}; give an object")
        if schema is False:
            raise ConfigError("the JSON schema is false, which nothing satisfies; give an object")
        try:
            source = json.dumps({} if schema is True else dict(schema), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the JSON schema cannot be written as JSON: {error}") from None
        return cls("json_schema", source, whitespace)

    @classmethod
    def json_object(cls, *, whitespace: str = WHITESPACE) -> Self:
        """Allow any JSON object."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Allow text that ``pattern`` matches completely."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Self:
        """Allow text of a context-free grammar in Lark's notation, from ``start`` on."""
        return cls("lark", text)

    @classmethod
    def ebnf(cls, text: str) -> Self:
        """Allow text of a context-free grammar in the notation ``root ::= "a" | "b"``, from ``root`` on."""
        return cls("ebnf", text)

    @classmethod
    def choice(cls, options: Iterable[str]) -> Self:
        """Allow one of several texts."""
        choices = [options] if isinstance(options, str) else list(options)
        if not choices or not all(isinstance(option, str) and option for option in choices):
            raise ConfigError("choices are one or more texts, none of them empty")
        return cls("choice", json.dumps(choices, ensure_ascii=False))
