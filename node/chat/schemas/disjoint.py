"""Whether no value can satisfy two schemas at once; `oneOf` needs to know."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from node.chat.schemas.keywords import kind_of_value
from node.chat.schemas.merge import types_of

__all__ = ["disjoint"]

_MAX_DEPTH = 4


def disjoint(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    flat: Callable[[Any], Mapping[str, Any]],
    depth: int = 0,
) -> bool:
    """False when it cannot be shown. `flat` resolves references and merges."""
    if depth > _MAX_DEPTH:
        return False
    if "enum" in a and "enum" in b:
        return not {_key(v) for v in a["enum"]} & {_key(v) for v in b["enum"]}
    common = _kinds(a) & _kinds(b)
    if not common:
        return True
    if common != {"object"}:
        return False
    return (
        any(
            disjoint(flat(a["properties"][name]), flat(b["properties"][name]), flat, depth + 1)
            for name in _demanded(a) & _demanded(b)
        )
        or _needs_stranger(a, b)
        or _needs_stranger(b, a)
    )


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    if "enum" in schema:
        return {kind_of_value(value) for value in schema["enum"]}
    return {"number" if kind == "integer" else kind for kind in types_of(schema)}


def _demanded(schema: Mapping[str, Any]) -> set[str]:
    return {name for name in schema.get("required", ()) if name in schema.get("properties", {})}


def _needs_stranger(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    closed = b.get("additionalProperties") is False
    return closed and bool(set(a.get("required", ())) - b.get("properties", {}).keys())


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
