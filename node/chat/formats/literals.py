"""Reader for values in the notations that models use besides JSON: Python's, and Gemma's with
unquoted keys and a quote token of its own."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["Literals"]

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORD = re.compile(r"[A-Za-z_][\w.:/-]*")
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", re.DOTALL)
_SPACE = re.compile(r"\s*")
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_MAX_DEPTH = 64


class Literals:
    """A cursor over text. Every method raises ValueError when the text is not what it reads."""

    def __init__(self, text: str, at: int = 0, quotes: tuple[str, ...] = ()) -> None:
        self._text = text
        self._quotes = quotes
        self.at = at

    def peek(self, token: str) -> bool:
        self._skip()
        return self._text.startswith(token, self.at)

    def take(self, token: str) -> bool:
        found = self.peek(token)
        if found:
            self.at += len(token)
        return found

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise ValueError(f"{token!r} expected")

    def word(self) -> str:
        return self._match(_WORD)

    def at_end(self) -> bool:
        self._skip()
        return self.at >= len(self._text)

    def python_call(self) -> tuple[str, dict[str, Any]]:
        """`name(key=value, …)`"""
        name = self.word()
        self.expect("(")
        values: dict[str, Any] = {}
        while not self.take(")"):
            key = self.word()
            self.expect("=")
            values[key] = self.value()
            if not self.take(","):
                self.expect(")")
                break
        return name, values

    def mapping(self, depth: int = 0) -> dict[str, Any]:
        """`{key: value, …}`, keys quoted or not."""
        self.expect("{")
        values: dict[str, Any] = {}
        while not self.take("}"):
            key = self._string()
            if key is None:
                key = self._bare_key()
            self.expect(":")
            values[key] = self.value(depth + 1)
            if not self.take(","):
                self.expect("}")
                break
        return values

    def value(self, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        string = self._string()
        if string is not None:
            return string
        if self.peek("{"):
            return self.mapping(depth)
        if self.take("["):
            return self._items(depth)
        if _WORD.match(self._text, self.at):
            word = self.word().lower()
            if word not in _CONSTANTS:
                raise ValueError(f"{word!r} is no value")
            return _CONSTANTS[word]
        number = self._match(_NUMBER)
        return float(number) if re.search(r"[.eE]", number) else int(number)

    def _items(self, depth: int) -> list[Any]:
        items = []
        while not self.take("]"):
            items.append(self.value(depth + 1))
            if not self.take(","):
                self.expect("]")
                break
        return items

    def _string(self) -> str | None:
        self._skip()
        for quote in self._quotes:
            if self._text.startswith(quote, self.at):
                end = self._text.find(quote, self.at + len(quote))
                if end < 0:
                    raise ValueError("a string does not end")
                text = self._text[self.at + len(quote) : end]
                self.at = end + len(quote)
                return text
        found = _STRING.match(self._text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return _unescape(found.group())

    def _bare_key(self) -> str:
        return self._match(re.compile(r"[^\s:{}\[\],\"']+"))

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._skip()
        found = pattern.match(self._text, self.at)
        if found is None:
            raise ValueError("unexpected text")
        self.at = found.end()
        return found.group()

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self.at)
        self.at = found.end() if found else self.at


_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "\n": ""}


def _unescape(quoted: str) -> str:
    def plain(found: re.Match[str]) -> str:
        code = found[1]
        if len(code) > 1:
            return chr(int(code[1:], 16))
        return _ESCAPES.get(code, code if code in "\"'\\/" else found[0])

    text = _ESCAPE.sub(plain, quoted[1:-1])
    # Two escapes of a surrogate pair are one character.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
