"""One schema that says what two say together (`allOf`, `$ref` with neighbours, `anyOf` in context).

Nested schemas are joined with `allOf` and merged when their turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["MergeError", "merged", "types_of"]

Schema = dict[str, Any]

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_LARGEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_ASSERTIONS = ("pattern", "multipleOf", "oneOf", "items", "prefixItems")
_MAX_ALTERNATIVES = 64


class MergeError(ValueError):
    """`keyword` cannot be merged."""

    def __init__(self, keyword: str, reason: str) -> None:
        super().__init__(reason)
        self.keyword = keyword


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """Allowed types; all if none are named."""
    given = schema.get("type", list(_TYPES))
    return [given] if isinstance(given, str) else list(given)


def merged(a: Mapping[str, Any], b: Mapping[str, Any]) -> Schema:
    """
    Raises:
        MergeError: there is no such schema, or not one that we can find.
    """
    result: Schema = {**a, **b}
    for keyword in a.keys() & b.keys():
        if a[keyword] == b[keyword]:
            continue
        join = _JOINS.get(keyword)
        if join is not None:
            result[keyword] = join(a[keyword], b[keyword])
        elif keyword in _ASSERTIONS:
            raise MergeError(keyword, "cannot be combined with another of its kind")
    if "type" in a and "type" in b:
        result["type"] = _types(types_of(a), types_of(b))
    if "format" in a and "format" in b and a["format"] != b["format"]:
        raise MergeError("format", "cannot be combined with another of its kind")
    _close(a, b, result)
    _close(b, a, result)
    return result


def _close(closed: Mapping[str, Any], other: Mapping[str, Any], result: Schema) -> None:
    """`additionalProperties` speaks of the properties beside it, not of those merged in."""
    extra = closed.get("additionalProperties", True)
    strangers = other.get("properties", {}).keys() - closed.get("properties", {}).keys()
    if extra is True or extra == {}:
        if "additionalProperties" in closed and "additionalProperties" in other:
            result["additionalProperties"] = other["additionalProperties"]
        return
    result["additionalProperties"] = extra
    properties = dict(result.get("properties", {}))
    for name in strangers:
        if extra is False:
            del properties[name]
        else:
            properties[name] = {"allOf": [properties[name], extra]}
    if strangers:
        result["properties"] = properties


def _types(a: list[str], b: list[str]) -> list[str]:
    both = [t for t in a if t in b]
    both += (
        ["integer"] if "integer" in a + b and "number" in a + b and "integer" not in both else []
    )
    if not both:
        raise MergeError("type", "leaves no type that fits")
    return both


def _enums(a: list[Any], b: list[Any]) -> list[Any]:
    both = [value for value in a if value in b]
    if not both:
        raise MergeError("enum", "leaves no value that fits")
    return both


def _properties(a: Schema, b: Schema) -> Schema:
    return {
        name: {"allOf": [a[name], b[name]]} if name in a and name in b else a.get(name, b.get(name))
        for name in {**a, **b}
    }


def _alternatives(a: list[Any], b: list[Any]) -> list[Any]:
    if len(a) * len(b) > _MAX_ALTERNATIVES:
        raise MergeError("anyOf", "has too many combinations")
    return [{"allOf": [x, y]} for x in a for y in b]


_JOINS: dict[str, Callable[[Any, Any], Any]] = {
    "properties": _properties,
    "$defs": lambda a, b: {**a, **b},
    "required": lambda a, b: list(dict.fromkeys([*a, *b])),
    "enum": _enums,
    "anyOf": _alternatives,
    "allOf": lambda a, b: [*a, *b],
    **dict.fromkeys(_LARGEST, max),
    **dict.fromkeys(_SMALLEST, min),
}
