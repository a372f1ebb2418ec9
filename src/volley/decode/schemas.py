"""Rewrite JSON schemas for the grammar library: drop what constrains nothing, and express some keywords by others.

JSON Schema's annotations are allowed, as are assertions that every value passes: ``uniqueItems: false``, ``propertyNames:
{"type": "string"}``, ``if`` without ``then`` and ``else``. ``format`` is an annotation in JSON Schema. The formats that the
library knows are enforced; the others have no effect. Keywords that constrain and that cannot be expressed here stay in the
schema, and the library refuses them.

These keywords are expressed by others:

propertyNames           as ``properties`` or ``patternProperties``
unevaluatedProperties   as ``additionalProperties`` where no keyword beside it evaluates properties in place
oneOf                   as ``anyOf`` where no value can match two of the schemas, perhaps with a discriminator that is required
"""

import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any

Schema = dict[str, Any]

_FORMATS = {"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
_VALUES = {"const", "enum", "default", "examples", "example"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
_IDENTIFIERS = {"$dynamicAnchor", "$recursiveAnchor"}
_OF_ARRAYS = {"uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"}
_OF_OBJECTS = {"propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"}
_IN_PLACE = {
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentSchemas",
}
_ASSERTIONS = {
    *("type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength"),
    *("minLength", "pattern", "format", "maxItems", "minItems", "maxProperties", "minProperties", "required", "items"),
    *("prefixItems", "additionalItems", "properties", "patternProperties", "additionalProperties"),
    *_OF_ARRAYS,
    *_OF_OBJECTS,
    *_IN_PLACE,
}
_LARGEST = 10**18
"""Largest bound that the library can express."""
_IMPLIED = {"email": (r"(?!\.)", r"(?!.*\.\.)"), "duration": (r"(?!.*W)", r"(?=\d|T\d)", r"(?=\d)", r"(?!$)")}
"""Look-around that zod writes, and that the library's grammar of the format implies."""
_ANY = "#/definitions/OpenAiAnyType"
_MOST_REFERENCES = 20
_DIALECTS = re.compile(r"https?://json-schema\.org/")


def enforceable(schema: Schema) -> Schema:
    """Rewrite ``schema`` for the grammar library. Each value that is valid under the result is valid under ``schema``."""
    found: Schema = _simplify(schema, schema)
    if not _DIALECTS.match(str(found.get("$schema", ""))):
        found.pop("$schema", None)
    return found


def _simplify(node: Any, root: Schema) -> Any:
    """Simplify a schema, or a value that has schemas inside, by dropping what constrains nothing."""
    if isinstance(node, list):
        return [_simplify(inner, root) for inner in node]
    if not isinstance(node, dict):
        return node
    schema: Schema = {}
    for key, value in node.items():
        if key in _VALUES:
            schema[key] = value
        elif key in _MAPS and isinstance(value, dict):
            schema[key] = {name: _simplify(inner, root) for name, inner in value.items()}
        else:
            schema[key] = _simplify(value, root)
    kinds = _kinds(schema)
    for key in [key for key in schema if _is_vacuous(key, schema, kinds)]:
        del schema[key]
    for rewrite in (_bound, _drop_impossible, _match_without_looking, _name_properties, _forbid_others, _join_disjoint):
        schema = rewrite(schema, root)
    return schema


def _kinds(schema: Schema) -> set[str] | None:
    """Return the types that a value may have; ``None`` for any."""
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    return set(given) if isinstance(given, list) and all(isinstance(own, str) for own in given) else None


def _is_vacuous(key: str, schema: Schema, kinds: set[str] | None) -> bool:
    """Return True if the keyword ``key`` of a schema allows every value of the types ``kinds``."""
    value, is_arrays, is_objects = schema[key], key in _OF_ARRAYS, key in _OF_OBJECTS
    if kinds is not None and ((is_arrays and "array" not in kinds) or (is_objects and "object" not in kinds)):
        return True
    match key:
        case "format":
            return isinstance(value, str) and value not in _FORMATS
        case "uniqueItems":
            return value is False or schema.get("maxItems") in (0, 1)
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema)
        case "propertyNames":
            return _allows_all_names(value)
        case "unevaluatedProperties" | "unevaluatedItems":
            return allows_all(value)
        case "not":
            return value is False
        case "if":
            return allows_all(schema.get("then", True)) and allows_all(schema.get("else", True))
        case "then" | "else":
            return "if" not in schema or (allows_all(schema.get("then", True)) and allows_all(schema.get("else", True)))
        case "dependentRequired":
            return isinstance(value, dict) and not any(value.values())
        case "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(own == [] or allows_all(own) for own in value.values())
    return key in _IDENTIFIERS


def allows_all(schema: Any) -> bool:
    """Return True if a schema allows every value: it has only annotations."""
    return schema is True or (isinstance(schema, dict) and not schema.keys() & _ASSERTIONS)


def _allows_all_names(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return schema is True
    return allows_all(_of_name(schema))


def _of_name(schema: Schema) -> Schema:
    """Return a schema of property names without keywords that every name passes; formats of names are annotations."""
    kinds = _kinds(schema)
    is_string = "type" in schema and (kinds is None or "string" in kinds)
    vacuous = (
        {"format"} | ({"type"} if is_string else set()) | ({"minLength"} if schema.get("minLength") == 0 else set())
    )
    return {key: value for key, value in schema.items() if key not in vacuous}


def _bound(schema: Schema, _: Schema) -> Schema:
    """Narrow bounds that are too large for the library, such as those of 32-bit floating point."""
    bounds = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
    large = {
        key: sign * _LARGEST
        for key, sign in bounds.items()
        if isinstance(value := schema.get(key), int | float) and sign * value > _LARGEST
    }
    return schema | large


def _drop_impossible(schema: Schema, root: Schema) -> Schema:
    """Drop choices that no value matches, and forbid properties that no value matches."""

    def is_never(own: Any) -> bool:
        return own is False or (isinstance(own, dict) and "not" in own and _allows_json(own["not"], root))

    choices, properties = schema.get("anyOf"), schema.get("properties")
    if isinstance(choices, list) and 0 < sum(map(is_never, choices)) < len(choices):
        schema = {**schema, "anyOf": [own for own in choices if not is_never(own)]}
    if isinstance(properties, dict) and any(map(is_never, properties.values())):
        schema = {**schema, "properties": {name: not is_never(own) and own for name, own in properties.items()}}
    return schema


def _allows_json(schema: Any, root: Schema) -> bool:
    """Return True if a schema allows everything, perhaps by ``zod-to-json-schema``'s name for it."""
    return allows_all(schema) or (
        isinstance(schema, dict) and schema.get("$ref") == _ANY and _resolved(schema, root) is not None
    )


def _match_without_looking(schema: Schema, _: Schema) -> Schema:
    """Rewrite ``pattern`` without look-around: drop what the format implies, and turn leading look-aheads into patterns."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return schema
    for implied in _IMPLIED.get(str(schema.get("format")), ()):
        pattern = pattern.replace(implied, "")
    parts = list[str]()
    while pattern.startswith("^(?=") and (end := _end_of_group(pattern, 1)):
        parts.append("^" + pattern[4 : end - 1])
        pattern = "^" + pattern[end:]
    if pattern == schema["pattern"]:
        return schema
    return {
        **schema,
        "pattern": pattern,
        **({"allOf": [*schema.get("allOf", []), *({"pattern": own} for own in parts)]} if parts else {}),
    }


def _end_of_group(pattern: str, start: int) -> int:
    """Return the index after the group that begins at ``start``; 0 if it does not end."""
    depth, in_class, at = 0, False, start
    while at < len(pattern):
        match pattern[at]:
            case "\\":
                at += 1
            case "[" if not in_class:
                in_class = True
            case "]":
                in_class = False
            case "(" if not in_class:
                depth += 1
            case ")" if not in_class:
                depth -= 1
                if depth == 0:
                    return at + 1
        at += 1
    return 0


def _name_properties(schema: Schema, root: Schema) -> Schema:
    """Express ``propertyNames`` by the names, or a pattern of them, if no property has a schema of its own."""
    names = _resolved(schema.get("propertyNames"), root)
    if (
        names is None
        or schema.keys() & {"properties", "patternProperties"}
        or schema.keys() & {"unevaluatedProperties"}
    ):
        return schema
    names, others = _of_name(names), schema.get("additionalProperties", True)
    given = names.keys() & _ASSERTIONS
    rest = {key: value for key, value in schema.items() if key not in ("propertyNames", "additionalProperties")}
    if given <= {"enum", "const"} and given:
        allowed = [name for name in _constants(names) or () if isinstance(name, str)]
        return {**rest, "properties": dict.fromkeys(allowed, others), "additionalProperties": False}
    if given == {"pattern"}:
        pattern = names["pattern"]
    elif given and given <= {"minLength", "maxLength"}:
        pattern = r"^[\s\S]{%s,%s}$" % (names.get("minLength", 0), names.get("maxLength", ""))  # noqa: UP031
    else:
        return schema
    return {**rest, "patternProperties": {pattern: others}, "additionalProperties": False}


def _forbid_others(schema: Schema, _: Schema) -> Schema:
    """Express ``unevaluatedProperties`` by ``additionalProperties`` if that means the same."""
    if "unevaluatedProperties" not in schema or schema.keys() & _IN_PLACE:
        return schema
    rest = {key: value for key, value in schema.items() if key != "unevaluatedProperties"}
    return rest if "additionalProperties" in rest else {**rest, "additionalProperties": schema["unevaluatedProperties"]}


# -- oneOf -----------------------------------------------------------------------------------------------------------------
def _join_disjoint(schema: Schema, root: Schema) -> Schema:
    """Express ``oneOf`` by ``anyOf`` if its schemas have no value in common, perhaps after narrowing."""
    choices = schema.get("oneOf")
    if not isinstance(choices, list) or "anyOf" in schema:
        return schema
    shapes = [own for choice in choices if (own := _resolved(choice, root)) is not None]
    tag = schema.get("discriminator")
    name = tag.get("propertyName") if isinstance(tag, Mapping) else None
    for narrowed in (shapes, [_tagged(own, name, root) for own in shapes], _apart(shapes)):
        if len(shapes) == len(choices) and all(_are_disjoint(*pair, root) for pair in combinations(narrowed, 2)):
            pairs = zip(choices, shapes, narrowed, strict=True)
            rest = {key: value for key, value in schema.items() if key != "oneOf"}
            return {**rest, "anyOf": [choice if own == shape else _simplify(own, root) for choice, shape, own in pairs]}
    return schema


def _tagged(schema: Schema, name: Any, root: Schema) -> Schema:
    """Return ``schema`` with its discriminator ``name`` required, if it lists the discriminator's values."""
    if not isinstance(name, str) or name in schema.get("required", []) or _tags(schema, name, root) is None:
        return schema
    return {**schema, "required": [*schema.get("required", []), name]}


def _apart(shapes: list[Schema]) -> list[Schema]:
    """Forbid in each object schema the properties that others require and that it does not describe."""
    found = []
    for own in shapes:
        known = own.get("properties", {})
        others = [name for other in shapes for name in other.get("required", []) if name not in known]
        is_object = _possible_kinds(own) == {"object"} and bool(others)
        found.append({**own, "properties": {**known, **dict.fromkeys(others, False)}} if is_object else own)
    return found


def _resolved(schema: Any, root: Schema) -> Schema | None:
    """Resolve the reference of ``schema``, if it has one. Annotations beside a reference are added. ``None`` if the result is
    unknown or no object."""
    beside: Schema = {}
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict):
            return None
        reference = schema.get("$ref")
        if reference is None:
            return {**schema, **beside}
        beside = {**{key: value for key, value in schema.items() if key in _VALUES or key not in _ASSERTIONS}, **beside}
        if schema.keys() & (_ASSERTIONS - {"$ref"}) or not isinstance(reference, str) or not reference.startswith("#"):
            return None
        schema = _pointed_at(root, reference[1:])
    return None


def _pointed_at(root: Schema, pointer: str) -> Any:
    found: Any = root
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found if pointer in ("",) or pointer.startswith("/") else None


def _constants(schema: Schema) -> list[Any] | None:
    """Return the only values that a schema allows; ``None`` if it does not list them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _tags(schema: Schema, name: str, root: Schema) -> list[Any] | None:
    """Return the values that an object schema lists for its property ``name``."""
    own = _resolved(schema.get("properties", {}).get(name), root)
    return None if own is None else _constants(own)


def _are_disjoint(one: Schema, other: Schema, root: Schema) -> bool:
    """Return True if no value is valid under both schemas, as far as types, listed values and required properties tell."""
    kinds = [_possible_kinds(own) for own in (one, other)]
    if kinds[0] is not None and kinds[1] is not None:
        common = kinds[0] & kinds[1]
        if not common:
            return True
        values = _constants(one), _constants(other)
        if values[0] is not None and values[1] is not None:
            return not any(_are_equal(a, b) for a in values[0] for b in values[1])
        return common == {"object"} and _are_disjoint_objects(one, other, root)
    return False


def _possible_kinds(schema: Schema) -> set[str] | None:
    """Return the types of the values that a schema allows; integers are numbers. ``None`` for any."""
    values, kinds = _constants(schema), _kinds(schema)
    if values is not None:
        return {_kind_of(value) for value in values}
    return None if kinds is None else {"number" if kind == "integer" else kind for kind in kinds}


def _kind_of(value: Any) -> str:
    names: dict[type, str] = {
        bool: "boolean",
        int: "number",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    return names.get(type(value), "null")


def _are_equal(one: Any, other: Any) -> bool:
    """Compare as JSON: true is not 1."""
    return _kind_of(one) == _kind_of(other) and one == other


def _are_disjoint_objects(one: Schema, other: Schema, root: Schema) -> bool:
    def forbids(schema: Schema, name: str) -> bool:
        is_closed, known = schema.get("additionalProperties") is False, schema.get("properties", {})
        return known.get(name) is False or (is_closed and not schema.get("patternProperties") and name not in known)

    for own, against in ((one, other), (other, one)):
        if any(forbids(against, name) for name in own.get("required", [])):
            return True
    for name in set(one.get("required", [])) & set(other.get("required", [])):
        parts = [_resolved(own.get("properties", {}).get(name), root) for own in (one, other)]
        if parts[0] is not None and parts[1] is not None and _are_disjoint(parts[0], parts[1], root):
            return True
    return False
