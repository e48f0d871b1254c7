"""Which keywords say something about validity, what their values have to be, which are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ASSERTIONS", "KIND_OF", "kind_of_value", "problem"]

_MAX_ENUM = 1000
_MAX_COUNT = 1000
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

# Keywords that speak of one kind of value only.
KIND_OF = {
    **dict.fromkeys(("properties", "required", "additionalProperties"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "minItems", "maxItems"), "array"),
    "uniqueItems": "array",
    **dict.fromkeys(("pattern", "format", "minLength", "maxLength"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    "multipleOf": "number",
}
ASSERTIONS = frozenset(KIND_OF) | {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}

_REFUSED = frozenset(
    "not if then else dependentSchemas dependentRequired dependencies patternProperties"
    " propertyNames contains minContains maxContains unevaluatedItems unevaluatedProperties"
    " $dynamicRef $recursiveRef".split()
)


def problem(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first keyword of this schema that is refused or malformed, and why."""
    for keyword, value in schema.items():
        if keyword in _REFUSED:
            return keyword, "cannot be turned into a grammar"
        check = _CHECKS.get(keyword)
        reason = check(value) if check else None
        if reason is not None:
            return keyword, reason
    return None


def kind_of_value(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _count(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return "must be a whole number from 0"
    return f"must not be over {_MAX_COUNT}" if value > _MAX_COUNT else None


def _number(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "must be a number"
    return "must be within 2^63" if abs(value) > 2**63 else None


def _schemas(value: Any) -> str | None:
    if not isinstance(value, list) or not value or not all(map(_is_schema, value)):
        return "must be a list of schemas"
    return None


def _schema_map(value: Any) -> str | None:
    if not isinstance(value, Mapping) or not all(map(_is_schema, value.values())):
        return "must be an object of schemas"
    return None


def _is_schema(value: Any) -> bool:
    return isinstance(value, (bool, Mapping))


def _schema(value: Any) -> str | None:
    return None if _is_schema(value) else "must be a schema"


def _items(value: Any) -> str | None:
    return _schemas(value) if isinstance(value, list) else _schema(value)


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "must be a string"


def _names(value: Any) -> str | None:
    good = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return None if good else "must be a list of strings"


def _type(value: Any) -> str | None:
    given = [value] if isinstance(value, str) else value
    good = isinstance(given, list) and given and all(t in _TYPES for t in given)
    return None if good else f"must be one or more of {', '.join(_TYPES)}"


def _enum(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "must be a list of values"
    return f"has more than {_MAX_ENUM} values" if len(value) > _MAX_ENUM else None


def _unique(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


_CHECKS: Mapping[str, Callable[[Any], str | None]] = {
    "type": _type,
    "enum": _enum,
    "$ref": _text,
    "pattern": _text,
    "format": _text,
    "properties": _schema_map,
    "$defs": _schema_map,
    "definitions": _schema_map,
    "required": _names,
    "additionalProperties": _schema,
    "items": _items,
    "additionalItems": _schema,
    "uniqueItems": _unique,
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _schemas),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _count),
    **dict.fromkeys(("minProperties", "maxProperties"), _count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _number),
    "multipleOf": _number,
}
