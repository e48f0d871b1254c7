"""A JSON schema (2020-12, and draft 7 where it differs) to grammar rules.

Every text of the grammar validates against the schema; it may be narrower (properties in the
order of the schema, no others beside them). A keyword that cannot be kept that way is refused
by name. Keywords that no vocabulary defines say nothing about validity and are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import unquote

from node.chat.schemas import keywords
from node.chat.schemas.disjoint import disjoint
from node.chat.schemas.gbnf import Rules, literal
from node.chat.schemas.merge import MergeError, merged, types_of
from node.chat.schemas.values import Refused, ValueRules
from node.errors import InvalidRequest

__all__ = ["SchemaCompiler", "check_schema"]

_MAX_BYTES = 256 * 1024
_MAX_DEPTH = 32
_MAX_VISITS = 4000
_MAX_RULES = 8000


def check_schema(schema: Mapping[str, Any], param: str) -> None:
    """
    Raises:
        InvalidRequest: names the keyword that is malformed, too large or cannot be honoured.
    """
    SchemaCompiler(Rules(), schema, param).compile()


class SchemaCompiler:
    """Adds the rules of one schema to `rules`. `param` is the request field it came in."""

    def __init__(self, rules: Rules, schema: Mapping[str, Any], param: str) -> None:
        self._rules = rules
        self._root = schema
        self._param = param
        self._names: dict[str, str] = {}
        self._visits = 0

    def compile(self) -> str:
        """Name of the rule for the whole schema."""
        try:
            if len(json.dumps(self._root)) > _MAX_BYTES:
                self._refuse("", "the schema", f"is larger than {_MAX_BYTES} bytes")
            return self._rule(self._root, "", 0, frozenset())
        except RecursionError:
            self._refuse("", "the schema", "is nested too deeply")

    def _rule(self, schema: Any, path: str, depth: int, direct: frozenset[str]) -> str:
        """`direct` holds the references followed since the last object or array: coming back to
        one of them would go round for ever."""
        self._count(path, depth)
        if schema is True:
            return "value"
        meaning = self._meaning(schema, path)
        if set(meaning) == {"$ref"}:
            return self._reference(meaning["$ref"], path, depth, direct)
        try:
            flat, direct = self._flat(meaning, path, direct)
        except MergeError as error:
            self._refuse(path, error.keyword, str(error))
        alternatives = self._alternatives(flat, path, direct)
        if alternatives is not None:
            names = [self._rule(s, p, depth + 1, direct) for s, p in alternatives]
            return self._rules.add(" | ".join(dict.fromkeys(names)))
        if "enum" in flat:
            return self._rules.add(" | ".join(self._values(flat, path)))

        def inner(schema: Any, name: str) -> str:
            return self._rule(schema, f"{path}.{name}", depth + 1, frozenset())

        try:
            kinds = ValueRules(self._rules, flat, inner)
            names = [kinds.rule(kind) for kind in _kinds(flat)]
        except Refused as error:
            self._refuse(path, error.keyword, str(error))
        return names[0] if len(names) == 1 else self._rules.add(" | ".join(names))

    def _count(self, path: str, depth: int) -> None:
        self._visits += 1
        if depth > _MAX_DEPTH:
            self._refuse(path, "the schema", f"is nested more than {_MAX_DEPTH} levels deep")
        if self._visits > _MAX_VISITS or len(self._rules) > _MAX_RULES:
            self._refuse(path, "the schema", "has too many parts")

    def _meaning(self, schema: Any, path: str) -> dict[str, Any]:
        """The keywords that matter, checked; `const` as an `enum` of one."""
        if not isinstance(schema, Mapping):
            self._refuse(path, "the schema", "must be an object that allows some value")
        problem = keywords.problem(schema)
        if problem is not None:
            self._refuse(path, *problem)
        meaning = {k: v for k, v in schema.items() if k in keywords.ASSERTIONS}
        if "const" in meaning:
            const = {"enum": [meaning.pop("const")]}
            meaning = merged(meaning, const) if "enum" in meaning else {**meaning, **const}
        return meaning

    def _reference(self, ref: str, path: str, depth: int, direct: frozenset[str]) -> str:
        if ref in direct:
            self._refuse(path, "$ref", "refers to itself")
        if ref not in self._names:
            name = self._names[ref] = self._rules.reserve()
            target = self._target(ref, path)
            self._rules.define(name, self._rule(target, ref, depth + 1, direct | {ref}))
        return self._names[ref]

    def _target(self, ref: str, path: str) -> Any:
        if ref != "#" and not ref.startswith("#/"):
            self._refuse(path, "$ref", "must refer to a part of this schema (#/…)")
        target: Any = self._root
        for step in unquote(ref[1:]).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                self._refuse(path, "$ref", "refers to nothing in this schema")
        return target

    def _flat(
        self, meaning: dict[str, Any], path: str, direct: frozenset[str]
    ) -> tuple[dict[str, Any], frozenset[str]]:
        """Without `$ref` and `allOf`: what they say is merged into what stands beside them."""
        parts = list(meaning.get("allOf", ()))
        if "$ref" in meaning:
            ref = meaning["$ref"]
            if ref in direct:
                self._refuse(path, "$ref", "refers to itself")
            direct |= {ref}
            parts.insert(0, self._target(ref, path))
        flat = {k: v for k, v in meaning.items() if k not in ("$ref", "allOf")}
        for part in parts:
            self._count(path, 0)
            if part is True:
                continue
            inner, direct = self._flat(self._meaning(part, path), path, direct)
            flat = merged(flat, inner)
        return flat, direct

    def _alternatives(
        self, flat: dict[str, Any], path: str, direct: frozenset[str]
    ) -> list[tuple[Any, str]] | None:
        """Alternatives of `anyOf` or `oneOf`, each with all that stands beside it."""
        keyword = "oneOf" if "oneOf" in flat else "anyOf"
        if keyword not in flat:
            return None
        if "anyOf" in flat and "oneOf" in flat:
            self._refuse(path, "oneOf", "cannot be combined with anyOf")
        beside = {k: v for k, v in flat.items() if k != keyword}
        found: list[tuple[Any, str]] = []
        for i, schema in enumerate(flat[keyword]):
            whole = {"allOf": [beside, schema]} if beside else schema
            if schema is not False and self._possible(whole, path, direct):
                found.append((whole, f"{path}.{keyword}[{i}]"))
        if not found:
            self._refuse(path, keyword, "leaves no alternative that fits")
        if keyword == "oneOf":
            self._check_exclusive([schema for schema, _ in found], path, direct)
        return found

    def _possible(self, schema: Any, path: str, direct: frozenset[str]) -> bool:
        try:
            self._shallow(schema, path, direct)
        except MergeError as error:
            if error.keyword in ("type", "enum"):
                return False
            self._refuse(path, error.keyword, str(error))
        return True

    def _shallow(self, schema: Any, path: str, direct: frozenset[str]) -> dict[str, Any]:
        if isinstance(schema, bool):
            return {}
        return self._flat(self._meaning(schema, path), path, direct)[0]

    def _check_exclusive(self, schemas: list[Any], path: str, direct: frozenset[str]) -> None:
        flats = [self._shallow(schema, path, direct) for schema in schemas]
        for i, a in enumerate(flats):
            for b in flats[i + 1 :]:
                if not disjoint(a, b, lambda s: self._shallow(s, path, frozenset())):
                    self._refuse(
                        path,
                        "oneOf",
                        "has alternatives that may hold at once; use anyOf, or give each"
                        " a required property with a const of its own",
                    )

    def _values(self, flat: dict[str, Any], path: str) -> list[str]:
        kinds = set(types_of(flat))
        found = []
        for value in flat["enum"]:
            kind = keywords.kind_of_value(value)
            whole = kind == "number" and value == int(value)
            if kind not in kinds and not (whole and "integer" in kinds):
                continue
            for keyword in flat:
                if keywords.KIND_OF.get(keyword) == kind and keyword != "format":
                    self._refuse(path, keyword, "cannot be combined with enum or const")
            found.append(literal(json.dumps(value, ensure_ascii=False, allow_nan=False)))
        if not found:
            self._refuse(path, "enum", "has no value of the type")
        return found

    def _refuse(self, path: str, keyword: str, reason: str) -> NoReturn:
        where = self._param + path.replace("#", "").replace("/", ".")
        named = keyword if keyword == "the schema" else repr(keyword)
        raise InvalidRequest(f"{where}: {named} {reason}", param=self._param)


def _kinds(flat: Mapping[str, Any]) -> list[str]:
    """The types to write: those named, else those that the keywords speak of, else any."""
    if "type" in flat:
        kinds = list(dict.fromkeys(types_of(flat)))
        return [k for k in kinds if k != "integer" or "number" not in kinds]
    hinted = dict.fromkeys(keywords.KIND_OF[k] for k in flat if k in keywords.KIND_OF)
    return list(hinted) or ["value"]
