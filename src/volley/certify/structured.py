"""Check that a server answers a request for JSON under a schema with such JSON, with or without drafts."""

import json
from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import Any

from volley.certify.checks import Check
from volley.certify.subject import ServerSubject, Structured

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"verdict": {"enum": ["yes", "no", "unclear"]}, "sure": {"type": "boolean"}},
    "required": ["verdict", "sure"],
    "additionalProperties": False,
}
"""Schema whose answers all end soon, whatever the model prefers to write."""
MAX_TOKENS = 96
TEMPERATURES = (0.0, 1.0)
NAME = "json"


def check_json(subject: ServerSubject, plain: ServerSubject | None, prompts: Sequence[str]) -> Check:
    """Check greedy and sampled answers to a ``response_format``, eight at once.

    The check is not judged if the server refuses the field, or if greedy answers show that it and ``plain`` ignore it.
    """
    asked = [(prompt, temperature) for temperature, prompt in product(TEMPERATURES, prompts)]
    replies = subject.structured(asked, SCHEMA, MAX_TOKENS)
    if replies is None:
        return Check(NAME, True, "not offered by this server", judged=False)
    wrong = [reply for reply in replies if not is_right(reply)]
    if wrong and _ignores(subject, prompts, replies):
        honoured = plain.structured(asked[: len(prompts)], SCHEMA, MAX_TOKENS) if plain is not None else None
        if honoured is None or not all(map(is_right, honoured)):
            return Check(NAME, True, "not offered by this server: response_format changes nothing", judged=False)
    if wrong:
        detail = f"{len(wrong)} of {len(replies)} answers are not of the schema; the first is {wrong[0].text[:60]!r}"
        return Check(NAME, False, detail, sample=len(replies))
    cut = sum(reply.finish_reason == "length" for reply in replies)
    note = f"; {cut} were cut off in white space or before their end" if cut else ""
    return Check(NAME, True, f"{len(replies)} answers of the schema that was asked for{note}", sample=len(replies))


def _ignores(subject: ServerSubject, prompts: Sequence[str], replies: Sequence[Structured]) -> bool:
    """Return whether greedy answers equal those without a schema."""
    free = subject.structured([(prompt, 0.0) for prompt in prompts], None, MAX_TOKENS)
    return free is not None and [one.text for one in free] == [one.text for one in replies[: len(prompts)]]


def is_right(reply: Structured) -> bool:
    """Return whether an answer follows the schema. An answer cut off must be the beginning of a valid one."""
    if reply.finish_reason != "length":
        return is_of_schema(reply.text)
    compact = "".join(reply.text.split())
    return any(whole.startswith(compact) for whole in _compact_answers())


def _compact_answers() -> Iterator[str]:
    """Yield all valid answers without white space; servers may require either order of the properties."""
    for verdict, sure in product(SCHEMA["properties"]["verdict"]["enum"], (True, False)):
        for pairs in permutations({"verdict": verdict, "sure": sure}.items()):
            yield json.dumps(dict(pairs), separators=(",", ":"))


def is_of_schema(text: str) -> bool:
    """Return whether a text is JSON that follows ``SCHEMA``."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    properties = SCHEMA["properties"]
    return (
        isinstance(found, dict)
        and set(found) == set(properties)
        and found["verdict"] in properties["verdict"]["enum"]
        and isinstance(found["sure"], bool)
    )
