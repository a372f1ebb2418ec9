"""vLLM's ``structural_tag``: free text in which a trigger begins a tag that contains JSON under a schema."""

import json
from typing import Any, Literal

from pydantic import Field, ValidationError

from volley.decode.schemas import enforceable
from volley.errors import ConfigError
from volley.grammar import WHITESPACE, Grammar
from volley.serve.fields import Strict
from volley.serve.markers import TERMINALS, Markers


class Structure(Strict):
    """Tag: the text that begins it, the schema of its content, and the text that ends it."""

    may_ignore = False

    begin: str = Field(min_length=1)
    schema_: Any = Field(None, alias="schema", description="The JSON schema of what is inside; any JSON without one.")
    end: str


class StructuralTag(Strict):
    may_ignore = False

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[Structure] = Field(min_length=1)
    triggers: list[str] = Field(min_length=1)
    """Texts that begin tags. A tag begins only with a trigger, and after a trigger a matching tag must follow."""


def read_tags(value: Any) -> StructuralTag:
    """Read structures and triggers from an object or from JSON. Raises :class:`ConfigError`."""
    try:
        return StructuralTag.model_validate(json.loads(value) if isinstance(value, str) else value)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        problem = f"it is not JSON: {error}"
    raise ConfigError(
        f"the structural tag cannot be read: {problem}; give structures (begin, schema, end) and triggers"
    )


def grammar_of_tags(tag: StructuralTag, markers: Markers) -> Grammar:
    """Return the grammar of free text with any number of tags. A special token that begins a trigger occurs only in triggers.

    Raises :class:`ConfigError`.
    """
    used = {structure.begin for trigger in tag.triggers for structure in _under(trigger, tag)}
    if lost := [structure.begin for structure in tag.structures if structure.begin not in used]:
        raise ConfigError(f"the tag {lost[0]!r} begins with none of the triggers; add one that it begins with")
    others = markers.others(*(first for own in tag.triggers if (first := markers.first_of(own)) is not None))
    rules = [
        f"start: ({' | '.join(f'opening_{index} tag_{index}' for index in range(len(tag.triggers)))})* {markers.free(others)}",
        *TERMINALS,
    ]
    for index, trigger in enumerate(tag.triggers):
        if not trigger or not (structures := _under(trigger, tag)):
            raise ConfigError(f"the trigger {trigger!r} begins no tag; leave it out, or add a structure for it")
        if longer := [own for own in tag.triggers if own.startswith(trigger) and own != trigger]:
            raise ConfigError(f"the trigger {longer[0]!r} begins with another one, {trigger!r}; leave one of them out")
        rules += markers.up_to(f"opening_{index}", trigger, passing=others)
        rules.append(f"tag_{index}: " + " | ".join(_inside(own, trigger, markers) for own in structures))
    return Grammar.lark("\n".join(rules) + "\n")


def _under(trigger: str, tag: StructuralTag) -> list[Structure]:
    return [structure for structure in tag.structures if structure.begin.startswith(trigger)]


def _inside(structure: Structure, trigger: str, markers: Markers) -> str:
    """Return the rest of a tag after its trigger, as a Lark expression."""
    schema = json.loads(Grammar.json_schema(True if structure.schema_ is None else structure.schema_).source)
    inner = json.dumps({**enforceable(schema), "x-guidance": {"whitespace_pattern": WHITESPACE}})
    begin = markers.literal(structure.begin.removeprefix(trigger))
    return f"{begin} %json {inner} {markers.literal(structure.end)}"
