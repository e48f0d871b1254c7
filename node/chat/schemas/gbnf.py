"""The pieces of a GBNF grammar (llama.cpp's notation), and the rules for plain JSON."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["MAX_REPEAT", "Rules", "char_class", "literal", "repeat"]

# llama.cpp unrolls repetitions and refuses larger ones.
MAX_REPEAT = 1000

_JSON = {
    # One space, or a line break and an indent: more is a model running away.
    "ws": '( " " | "\\n" [ \\t]{0,20} )?',
    "char": (
        '[^"\\\\\\x00-\\x1F\\x7F] | "\\\\" ( ["\\\\/bfnrt]'
        ' | "u" ( [0-9a-cA-CefEF] hex hex hex | [dD] [0-7] hex hex ) )'
    ),
    "hex": "[0-9a-fA-F]",
    "string": '"\\"" char* "\\""',
    "integer": '"-"? ( "0" | [1-9] [0-9]{0,15} )',
    "number": 'integer ( "." [0-9]{1,16} )? ( [eE] [-+]? [0-9]{1,2} )?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "pair": 'string ws ":" ws value',
    "object": '"\\x7B" ws ( pair pairs* )? ws "\\x7D"',
    "pairs": 'ws "," ws pair',
    "array": '"[" ws ( value values* )? ws "]"',
    "values": 'ws "," ws value',
    "value": "object | array | string | number | boolean | null",
}


class Rules:
    """A grammar under construction. Names of plain JSON rules may simply be used."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._rules)

    def reserve(self) -> str:
        """A name whose rule comes later, so that it can be used in itself."""
        name = f"r{len(self._rules)}"
        self._rules[name] = ""
        return name

    def define(self, name: str, expression: str) -> str:
        self._rules[name] = expression
        return name

    def add(self, expression: str) -> str:
        return self.define(self.reserve(), expression)

    def text(self, root: str) -> str:
        rules = {"root": root, **self._rules, **_JSON}
        return "".join(f"{name} ::= {rule}\n" for name, rule in rules.items())


def literal(text: str) -> str:
    return '"' + "".join(map(_escaped, text)) + '"'


def char_class(ranges: Iterable[tuple[int, int]]) -> str:
    """`[…]` of code point ranges, both ends in."""
    parts = (_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges)
    return "[" + "".join(parts) + "]"


def repeat(rule: str, least: int, most: int | None) -> str:
    """`rule` has to be one symbol."""
    if (least, most) == (1, 1):
        return rule
    if (least, most) == (0, 1):
        return f"{rule}?"
    if most is None:
        return f"{rule}{{{least},}}" if least > 1 else rule + ("+" if least else "*")
    return f"{rule}{{{least},{most}}}"


def _escaped(character: str) -> str:
    # Braces too: the engine looks for repetitions in the text of the grammar.
    plain = character.isascii() and character.isprintable() and character not in '"\\{}'
    return character if plain else _code(ord(character))


def _code(point: int) -> str:
    if point < 0x80 and chr(point).isalnum():
        return chr(point)
    if point < 0x100:
        return f"\\x{point:02X}"
    return f"\\u{point:04X}" if point < 0x10000 else f"\\U{point:08X}"
