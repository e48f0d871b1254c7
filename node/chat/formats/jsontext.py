"""JSON in model output: where a value ends, and calls in the `{"name", "arguments"}` shape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from node.chat.formats.base import Call, Tools

__all__ = ["JsonEnd", "arguments_text", "calls_from_json", "dump", "is_object"]

_SPACE = re.compile(r"[ \t\r\n]*")
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_NAME_KEYS = ("name", "function", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")


class JsonEnd:
    """Finds where the object or array that begins at `start` ends, by brackets and quotes only.
    Each character is looked at once, however often `find` is called on the growing text."""

    def __init__(self, start: int = 0) -> None:
        self._at = start
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        while True:
            pattern = _INSIDE if self._in_string else _OUTSIDE
            found = pattern.search(text, self._at)
            if found is None:
                self._at = max(self._at, len(text))
                return None
            self._at = found.end()
            match found.group():
                case "\\":
                    self._at += 1
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return self._at


def calls_from_json(text: str, tools: Tools, *, bare: bool = False) -> tuple[Call, ...]:
    """The calls in an object or an array of objects; none if any is not a valid call of `tools`.

    A `bare` object, without markers around it, needs arguments to be told from other JSON.
    """
    try:
        calls = tuple(_calls(text, tools, bare))
    except (ValueError, RecursionError):
        return ()
    return calls


def arguments_text(text: str) -> str | None:
    """`text` as the strict JSON text of an object, as written if it is that already."""
    text = text.strip()
    if is_object(text):
        return text
    try:
        value = _LENIENT.decode(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, str):
        return value if is_object(value) else None
    return dump(value) if isinstance(value, dict) else None


def is_object(text: str) -> bool:
    try:
        return isinstance(_STRICT.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _calls(text: str, tools: Tools, bare: bool) -> Iterator[Call]:
    at = _skip(text, 0)
    if text[at : at + 1] != "[":
        yield _call(text, at, tools, bare)[0]
        return
    at = _skip(text, at + 1)
    while text[at : at + 1] != "]":
        call, at = _call(text, at, tools, bare)
        yield call
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)


def _call(text: str, start: int, tools: Tools, bare: bool) -> tuple[Call, int]:
    members, end = _members(text, start)
    inner = members.get("function")
    if inner is not None and text[inner[0]] == "{":
        call, _ = _call(text[slice(*inner)], 0, tools, bare)
        return call, end
    name = next((_value(text, members[k]) for k in _NAME_KEYS if k in members), None)
    span = next((members[k] for k in _ARGUMENT_KEYS if k in members), None)
    if not isinstance(name, str) or name not in tools or (bare and span is None):
        raise ValueError("not a call")
    arguments = arguments_text(text[slice(*span)]) if span else "{}"
    if arguments is None:
        raise ValueError("the arguments are not an object")
    return Call(name, arguments), end


def _members(text: str, start: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Where the value of each member of the object at `start` is, and where the object ends."""
    if text[start : start + 1] != "{":
        raise ValueError("not an object")
    members: dict[str, tuple[int, int]] = {}
    at = _skip(text, start + 1)
    while text[at : at + 1] != "}":
        key, at = _LENIENT.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise ValueError("not an object")
        begin = _skip(text, at + 1)
        _, end = _LENIENT.raw_decode(text, begin)
        members[key] = (begin, end)
        at = _skip(text, end)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "}":
            raise ValueError("not an object")
    return members, at + 1


def _value(text: str, span: tuple[int, int]) -> Any:
    return _LENIENT.decode(text[slice(*span)])


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_no_constant)
# Models write line breaks into strings; what is passed on is strict again.
_LENIENT = json.JSONDecoder(parse_constant=_no_constant, strict=False)
