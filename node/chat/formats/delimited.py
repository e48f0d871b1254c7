"""Calls between two markers in notations of their own: DeepSeek, Mistral, LFM2, Gemma."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

from node.chat.formats.base import NO_CALL, Call, Match, Syntax, Tools
from node.chat.formats.jsontext import JsonEnd, arguments_text, calls_from_json, dump
from node.chat.formats.literals import Literals

__all__ = ["deepseek", "function_gemma", "gemma4", "lfm2", "mistral", "tool_code"]

_Read = Callable[[str, Tools], Iterator[Call]]


def deepseek() -> tuple[Syntax, ...]:
    """A list of calls, or one call without the list around it."""
    calls, call = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
    ends = {calls: "<｜tool▁calls▁end｜>", call: "<｜tool▁call▁end｜>"}
    return tuple(Syntax((m,), partial(_Delimited, m, end, _deepseek)) for m, end in ends.items())


def lfm2() -> Syntax:
    marker = "<|tool_call_start|>"
    return Syntax((marker,), partial(_Delimited, marker, "<|tool_call_end|>", _python_or_json))


def tool_code() -> Syntax:
    """Gemma's habit: a fenced block with a Python call."""
    marker = "```tool_code\n"
    return Syntax((marker,), partial(_Delimited, marker, "```", _python_or_json))


def gemma4() -> Syntax:
    marker = "<|tool_call>"
    return Syntax((marker,), partial(_Delimited, marker, "<tool_call|>", _gemma))


def function_gemma() -> Syntax:
    marker = "<start_function_call>"
    return Syntax((marker,), partial(_Delimited, marker, "<end_function_call>", _gemma))


def mistral() -> Syntax:
    return Syntax(("[TOOL_CALLS]",), _Mistral)


class _Delimited:
    """Reads all that is between the markers; the end of the reply counts as the second one."""

    def __init__(self, open_marker: str, close_marker: str, read: _Read, tools: Tools) -> None:
        self._open = open_marker
        self._close = close_marker
        self._read = read
        self._tools = tools
        self._from = len(open_marker)

    def step(self, text: str, ended: bool) -> Match | None:
        at = text.find(self._close, self._from)
        if at < 0 and not ended:
            self._from = max(self._from, len(text) - len(self._close))
            return None
        end = at + len(self._close) if at >= 0 else len(text)
        try:
            inner = text[len(self._open) : at if at >= 0 else len(text)]
            calls = tuple(self._read(inner, self._tools))
        except ValueError:
            return NO_CALL
        return Match(end, calls) if calls else NO_CALL


_DEEPSEEK_CALL = re.compile(
    r"\s*(?:<｜tool▁call▁begin｜>)?\s*(?:function\s*<｜tool▁sep｜>)?\s*"
    r"(?P<name>[^\s<｜`{]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*(?=\{)"
)
_DEEPSEEK_END = re.compile(r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*")


def _deepseek(text: str, tools: Tools) -> Iterator[Call]:
    at = 0
    while at < len(text):
        head = _DEEPSEEK_CALL.match(text, at)
        end = JsonEnd(head.end()).find(text) if head else None
        if head is None or end is None:
            raise ValueError("not a call")
        yield _checked(head["name"], text[head.end() : end], tools)
        tail = _DEEPSEEK_END.match(text, end)
        at = tail.end() if tail else end


def _python_or_json(text: str, tools: Tools) -> Iterator[Call]:
    calls = calls_from_json(text, tools)
    if calls:
        yield from calls
        return
    reader = Literals(text)
    in_list = reader.take("[")
    while not reader.at_end() and not (in_list and reader.take("]")):
        name, values = reader.python_call()
        yield _checked(name, dump(values), tools)
        if not (reader.take(",") or reader.take(";")) and in_list:
            reader.expect("]")
            break
    if not reader.at_end():
        raise ValueError("more than calls")


def _gemma(text: str, tools: Tools) -> Iterator[Call]:
    reader = Literals(text, quotes=('<|"|>', "<escape>"))
    while not reader.at_end():
        reader.expect("call:")
        name = reader.word()
        yield _checked(name, dump(reader.mapping()), tools)


def _checked(name: str, arguments: str, tools: Tools) -> Call:
    text = arguments_text(arguments)
    if name not in tools or text is None:
        raise ValueError("not a call")
    return Call(name, text)


_MISTRAL_CALL = re.compile(
    r"\s*(?P<name>[A-Za-z0-9_.:/-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)"
)
_MISTRAL_HEAD = re.compile(r"\s*[A-Za-z0-9_.:/-]*\s*(\[[A-Z_\]]*\w*\s*(\[[A-Z]*\]?)?\s*)?\Z")


class _Mistral:
    """`[TOOL_CALLS]` and then an array of objects, or `name[ARGS]{…}`."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._name = ""
        self._end: JsonEnd | None = None
        self._start = 0

    def step(self, text: str, ended: bool) -> Match | None:
        if self._end is None and not self._begin(text):
            hopeful = _MISTRAL_HEAD.match(text, len("[TOOL_CALLS]"))
            return None if hopeful and not ended else NO_CALL
        assert self._end is not None
        end = self._end.find(text)
        if end is None:
            return NO_CALL if ended else None
        value = text[self._start : end]
        if not self._name:
            return Match(end, calls_from_json(value, self._tools))
        arguments = arguments_text(value)
        if arguments is None or self._name not in self._tools:
            return NO_CALL
        return Match(end, (Call(self._name, arguments),))

    def _begin(self, text: str) -> bool:
        at = len("[TOOL_CALLS]")
        head = _MISTRAL_CALL.match(text, at)
        if head is not None:
            self._name, self._start = head["name"], head.end()
        else:
            rest = text[at:].lstrip()
            if not re.match(r"\[\s*[{\]]|\{", rest):
                return False
            self._start = len(text) - len(rest)
        self._end = JsonEnd(self._start)
        return True
