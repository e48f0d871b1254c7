"""Rules for one schema without references and combinations, by type of value."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from node.chat.schemas.gbnf import Rules, literal, repeat
from node.chat.schemas.numbers import Bounds, integer_expression, number_expression
from node.chat.schemas.patterns import FORMATS, REFUSED_FORMATS, PatternError, pattern_rule

__all__ = ["Refused", "ValueRules"]

Inner = Callable[[Any, str], str]


class Refused(ValueError):
    """`keyword` cannot be honoured here."""

    def __init__(self, keyword: str, reason: str) -> None:
        super().__init__(reason)
        self.keyword = keyword


class ValueRules:
    """`inner(schema, name)` compiles a nested schema and gives the name of its rule."""

    def __init__(self, rules: Rules, schema: Mapping[str, Any], inner: Inner) -> None:
        self._rules = rules
        self._schema = schema
        self._inner = inner

    def rule(self, kind: str) -> str:
        match kind:
            case "object":
                return self._object()
            case "array":
                return self._array()
            case "string":
                return self._string()
            case "number" | "integer":
                return self._number(kind)
            case _:
                return kind

    def _object(self) -> str:
        schema = self._schema
        properties = dict(schema.get("properties", {}))
        extra = schema.get("additionalProperties", True)
        required = list(dict.fromkeys(schema.get("required", ())))
        for name in required:
            if name not in properties:
                properties[name] = extra
            if properties[name] is False:
                raise Refused("required", f"asks for {name[:64]!r}, which is not allowed")
        names = [name for name, inner in properties.items() if inner is not False]
        if not names and extra is not False:
            return self._map(extra)
        required, names = self._counted(required, names)
        pairs = {name: self._pair(name, properties[name]) for name in names}
        return self._rules.add(f'"\\x7B" ws {self._members(pairs, set(required))} "\\x7D"')

    def _counted(self, required: list[str], names: list[str]) -> tuple[list[str], list[str]]:
        """Narrowed so that `minProperties` and `maxProperties` hold whatever is chosen."""
        least = self._schema.get("minProperties", 0)
        most = self._schema.get("maxProperties", len(names))
        optional = [name for name in names if name not in required]
        required = required + optional[: max(0, least - len(required))]
        if len(required) < least:
            raise Refused("minProperties", "asks for more properties than are named")
        if len(required) > most:
            raise Refused("maxProperties", "allows fewer properties than are required")
        kept = [n for n in optional if n not in required][: most - len(required)]
        return required, [name for name in names if name in required or name in kept]

    def _pair(self, name: str, schema: Any) -> str:
        key = literal(json.dumps(name, ensure_ascii=False))
        value = self._inner(schema, f"properties.{name[:64]}")
        return self._rules.add(f'{key} ws ":" ws {value}')

    def _members(self, pairs: dict[str, str], required: set[str]) -> str:
        """Pairs in order. From the back: what may follow a pair, and what may begin the object;
        each optional pair doubles nothing, so the grammar stays as long as the schema."""
        rest, begin = "ws", "ws"
        for name, pair in reversed(pairs.items()):
            with_comma, alone = f'ws "," ws {pair} {rest}', f"{pair} {rest}"
            if name in required:
                rest, begin = self._rules.add(with_comma), self._rules.add(alone)
            else:
                rest, begin = (
                    self._rules.add(f"{with_comma} | {rest}"),
                    self._rules.add(f"{alone} | {begin}"),
                )
        return begin

    def _map(self, extra: Any) -> str:
        least = self._schema.get("minProperties", 0)
        most = self._schema.get("maxProperties")
        if least > 1:
            raise Refused("minProperties", "above 1 needs the properties named")
        if extra is True and least == 0 and most is None:
            return "object"
        value = "value" if extra is True else self._inner(extra, "additionalProperties")
        pair = self._rules.add(f'string ws ":" ws {value}')
        return self._rules.add(f'"\\x7B" ws {self._list(pair, least, most)} ws "\\x7D"')

    def _array(self) -> str:
        schema = self._schema
        prefix, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            prefix, rest = rest, schema.get("additionalItems", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and most < least:
            raise Refused("maxItems", "is below minItems")
        if schema.get("uniqueItems") and (most is None or most > 1):
            raise Refused("uniqueItems", "cannot be turned into a grammar")
        if prefix:
            return self._tuple(prefix, rest, least, most)
        if rest is False:
            if least:
                raise Refused("items", "allows none, but minItems asks for some")
            return self._rules.add('"[" ws "]"')
        if rest is True and not least and most is None:
            return "array"
        item = "value" if rest is True else self._inner(rest, "items")
        return self._rules.add(f'"[" ws {self._list(item, least, most)} ws "]"')

    def _tuple(self, prefix: list[Any], rest: Any, least: int, most: int | None) -> str:
        """All of the named items, and of the others only as many as there must be."""
        named = prefix if most is None else prefix[:most]
        items = [self._inner(schema, f"prefixItems[{i}]") for i, schema in enumerate(named)]
        missing = least - len(items)
        if missing > 0:
            if rest is False:
                raise Refused("minItems", "asks for more items than are allowed")
            items += [self._inner(rest, "items")] * missing
        inner = ' ws "," ws '.join(items)
        return self._rules.add(f'"[" ws {inner} ws "]"')

    def _list(self, item: str, least: int, most: int | None) -> str:
        """Expression for items with commas between them."""
        if most == 0:
            return '""'
        tail = self._rules.add(f'ws "," ws {item}')
        more = repeat(tail, max(0, least - 1), None if most is None else most - 1)
        if most == 1:
            more = ""
        whole = f"{item} {more}".rstrip()
        return whole if least else f"( {whole} )?"

    def _string(self) -> str:
        schema = self._schema
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if most is not None and most < least:
            raise Refused("maxLength", "is below minLength")
        pattern, named = schema.get("pattern"), schema.get("format")
        if named in REFUSED_FORMATS:
            raise Refused("format", f"{named!r} cannot be turned into a grammar")
        if not pattern and named not in FORMATS:
            if not least and most is None:
                return "string"
            return self._rules.add(f'"\\"" {repeat("char", least, most)} "\\""')
        keyword = "pattern" if pattern else "format"
        for other in ("minLength", "maxLength", "format"):
            if other in schema and other != keyword and (other != "format" or named in FORMATS):
                raise Refused(other, f"cannot be combined with {keyword}")
        try:
            return pattern_rule(pattern or FORMATS[str(named)], self._rules)
        except PatternError as error:
            raise Refused(keyword, str(error)) from error

    def _number(self, kind: str) -> str:
        schema = self._schema
        step = schema.get("multipleOf")
        if step is not None and step != 1:
            raise Refused("multipleOf", "cannot be turned into a grammar")
        bounds = _bounds(schema)
        if bounds.low is None and bounds.high is None:
            return "integer" if step else kind
        whole = kind == "integer" or step is not None
        expression = integer_expression(bounds) if whole else number_expression(bounds)
        if expression is None:
            keyword = next(
                k
                for k in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
                if k in schema
            )
            raise Refused(keyword, "leaves no number that can be written")
        return self._rules.add(expression)


def _bounds(schema: Mapping[str, Any]) -> Bounds:
    low, high = schema.get("minimum"), schema.get("maximum")
    open_low, open_high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    use_open_low = open_low is not None and (low is None or open_low >= low)
    use_open_high = open_high is not None and (high is None or open_high <= high)
    return Bounds(
        _fraction(open_low if use_open_low else low),
        _fraction(open_high if use_open_high else high),
        use_open_low,
        use_open_high,
    )


def _fraction(value: Any) -> Fraction | None:
    return None if value is None else Fraction(str(value))
