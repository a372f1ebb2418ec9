"""Validation of request bodies: known, refused and ignored fields, and the message about the first wrong one."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import islice
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator
from pydantic_core import PydanticCustomError

from volley.errors import did_you_mean


def _encodable(text: str) -> str:
    """Refuse lone surrogates: JSON can express them, and no tokenizer accepts them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("unicode", "the text is not valid Unicode: it has a lone surrogate") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
"""Types of content blocks in ``/v1/messages``."""
KINDS_OF_ITEMS = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"),
)

OPENAI_WITHOUT_EFFECT = (
    *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id"),
    *("safety_identifier", "session_id", "user"),
)
"""Fields of OpenAI's endpoints that do not change the answer."""


def refusal(field: str | None, message: str) -> PydanticCustomError:
    """Return an error about ``field``; ``None``: about the field whose validator raises it."""
    context = {"field": field and _printable(field), "message": _printable(message)}
    return PydanticCustomError("refused", "{message}", context)


def ignored_names(ignored: Mapping[str, str]) -> str:
    """Return the names of ignored fields for a header, encoded because clients may send any characters."""
    return ", ".join(re.sub(r"[^!-+\--~]", "?", name)[:64] or "?" for name in ignored)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


IGNORED: ContextVar[dict[str, str] | None] = ContextVar("ignored", default=None)
"""Unknown fields of the body under validation, each with its replacement if known. ``None``: unknown fields are refused."""
_MOST_IGNORED = 20
"""Maximum number of ignored fields that are named per body."""


class Strict(BaseModel):
    """Object with known fields of exact types. Unknown fields are refused, or recorded in :data:`IGNORED`.

    Null fields are dropped: they request nothing, and clients send messages of answers back unchanged.
    """

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    may_ignore: ClassVar[bool] = True
    """True if unknown fields may be ignored. Ignoring one in an object that constrains the answer would weaken the constraint."""
    unread: ClassVar[tuple[str, ...]] = ()
    """Fields that clients send and the model never sees."""

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of the fields as clients write them."""
        return {own.alias or name for name, own in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _are_known(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        names, ignored = cls.names(), IGNORED.get()
        data = {name: value for name, value in data.items() if value is not None and name not in cls.unread}
        unknown = [name for name in data if name not in names]
        if not unknown:
            return data
        remedies = {name: cls.remedy(name) for name in islice(unknown, _MOST_IGNORED)}
        known = {name: "" if remedy.startswith("known: ") else remedy for name, remedy in remedies.items()}
        refused = next(iter(remedies)) if ignored is None or not cls.may_ignore else None
        if not cls.required() <= data.keys():  # an unknown field may be a required one misspelt
            refused = refused or next((name for name, remedy in known.items() if remedy), None)
        if refused is not None:
            context = {"name": _printable(refused), "remedy": remedies[refused]}
            raise PydanticCustomError("unknown", "unknown", context)
        if ignored is not None and len(ignored) < _MOST_IGNORED:
            ignored |= known
        return {name: value for name, value in data.items() if name in names}

    @model_validator(mode="wrap")
    @classmethod
    def _forget_what_is_no_part(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Drop what validation recorded in :data:`IGNORED` for a union's member that does not match."""
        ignored = IGNORED.get()
        before = dict(ignored or {})
        try:
            return handler(data)
        except ValueError:
            if ignored is not None:
                ignored.clear()
                ignored |= before
            raise

    @classmethod
    def required(cls) -> set[str]:
        """Return the required fields as clients write them."""
        return {own.alias or name for name, own in cls.model_fields.items() if own.is_required()}

    @classmethod
    def remedy(cls, name: str) -> str:
        """Return what to write instead of an unknown field."""
        names = sorted(cls.names())
        return did_you_mean(name, names) or f"known: {', '.join(names)}"


class Body(Strict):
    """Request body. Nulls and fields that request nothing are dropped, as OpenAI does. Unsupported requests are refused."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Unsupported fields, each with the values that request nothing and are accepted."""
    without_effect: ClassVar[tuple[str, ...]] = ()
    """Fields that do not change the answer."""
    remedies: ClassVar[dict[str, str]] = {}
    """Advice about unsupported fields, if it is not to leave them out."""
    elsewhere: ClassVar[dict[str, str]] = {}
    """Fields of other endpoints and servers, with what to do here instead."""

    @model_validator(mode="before")
    @classmethod
    def _ask_for_something(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kept = {}
        for name, value in data.items():
            if value is None or name in cls.without_effect:
                continue
            if name not in cls.unsupported:
                kept[name] = value
            elif value not in cls.unsupported[name]:
                remedy = cls.remedies.get(name)
                told = f"{name}: {remedy}" if remedy else f"{name} is not supported by this server; leave it out"
                raise refusal(name, told)
        return kept

    @classmethod
    def remedy(cls, name: str) -> str:
        if name in cls.elsewhere:
            return cls.elsewhere[name]
        names = sorted(cls.names() | cls.unsupported.keys())
        return did_you_mean(name, names) or f"known: {', '.join(names)}"


_FORMS = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists, none of them empty",
    "stop": "a string or up to 16 strings, none of them empty or longer than 1000 characters",
    "content": "a string or a list of text parts; images, audio and files are not read",
    "output": "a string or a list of text parts; images, audio and files are not read",
    "tool_choice": "none, auto, required, {type: function, function: {name}}, or {type: allowed_tools, allowed_tools: {…}}",
}
"""Fields with several accepted types, because pydantic would report an error for each type."""


def first_problem(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Return the message and the field of the first error in pydantic's list."""
    error = next((error for error in errors if error["type"] == "unicode"), errors[0])
    path, context = _path_of(error), error.get("ctx", {})
    for place, part in enumerate(path):
        if part in _FORMS and error["type"] not in ("unicode", "refused") and _is_of_several_types(error, part):
            inside = [(_path_of(own), own) for own in errors if own["type"] == "unknown" and "text" in own["input"]]
            for own_path, own in inside:  # a content part of type text that has an unknown field
                if own_path[: place + 1] == path[: place + 1]:
                    return _unknown(own_path, own["ctx"])
            field = ".".join(path[: place + 1])
            return f"{field} must be {_FORMS[part]}", field
    named = context.get("field") or ".".join(path) or None
    match error["type"]:
        case "refused":
            return error["msg"], named
        case "unknown":
            return _unknown(path, context)
        case "json_invalid":
            return f"the body is not JSON: {context.get('error', error['msg'])} (character {error['loc'][-1]})", None
        case "string_pattern_mismatch" if path[:1] == ["logit_bias"]:
            return f"{named}: keys are token ids, in digits; /tokenize tells those of a text", named
    if named is None:
        return "the body must be a JSON object, sent as application/json", None
    return f"{named}: {error['msg']}", named


def _is_of_several_types(error: Any, field: str) -> bool:
    """Return whether ``field`` is a union: the name of one of its types, or nothing, follows it in the error's path."""
    own = error["loc"][error["loc"].index(field) + 1 :]
    return not own or (isinstance(own[0], str) and ("[" in own[0] or own[0][0].isupper() or own[0] == "str"))


def _unknown(path: Sequence[str], context: Mapping[str, str]) -> tuple[str, str]:
    named = ".".join([*path, context["name"]])
    return f"unknown field {named!r}; {context['remedy']}", named


def _path_of(error: Any) -> list[str]:
    return list(_path(error["loc"]))


def _path(places: Sequence[Any]) -> Iterator[str]:
    """Yield the path of an error as the client wrote it, without pydantic's names for the members of a union."""
    own = places[1:] if places[:1] == ("body",) else places
    for depth, place in enumerate(own):
        is_kind_of_item = depth == 2 and own[0] == "input" and place in KINDS_OF_ITEMS
        is_kind_of_block = depth == 4 and own[2] == "content" and isinstance(own[3], int) and place in BLOCKS
        if "[" not in str(place) and not is_kind_of_item and not is_kind_of_block:
            yield str(place)
