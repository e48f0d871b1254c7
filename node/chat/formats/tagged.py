"""Calls as JSON: after a marker (Hermes, Qwen, Granite, Phi, Llama 3), bare, or in a fence."""

from __future__ import annotations

import re
from functools import partial

from node.chat.formats.base import NO_CALL, Match, Syntax, Tools
from node.chat.formats.jsontext import JsonEnd, calls_from_json
from node.chat.formats.xmlish import FunctionTags

__all__ = ["bare_json", "fenced_json", "tagged_json"]

# White space taken out, the first key of a call stands within so many characters.
_KEY = re.compile(r'\[?\{"(name|function|tool_name|type|id|arguments|parameters)"')
_KEY_WITHIN = 16


def tagged_json(open_marker: str, close_marker: str | None) -> Syntax:
    """An object or array after a marker. The closing marker may be missing, as models forget it."""
    return Syntax((open_marker,), partial(_Json, open_marker, close_marker))


def bare_json(*starts: str) -> Syntax:
    """An object or array that is the whole reply."""
    return Syntax(starts, partial(_Json, "", None), only_first=True)


def fenced_json(*languages: str) -> Syntax:
    """A Markdown code block that holds a call and nothing else."""
    return Syntax(tuple(f"```{name}\n" for name in languages), _Fenced)


class _Json:
    def __init__(self, open_marker: str, close_marker: str | None, tools: Tools) -> None:
        self._open = open_marker
        self._close = close_marker
        self._tools = tools
        self._end: JsonEnd | None = None
        self._json_end: int | None = None
        self._json_start = 0
        self._hopeful = False
        self._tags: FunctionTags | None = None

    def step(self, text: str, ended: bool) -> Match | None:
        if self._end is None:
            rest = text[len(self._open) :].lstrip()
            if not rest:
                return NO_CALL if ended else None
            if self._open == "<tool_call>" and "<function=".startswith(rest[:10]):
                return self._function_tags(text, rest, ended)
            if rest[0] not in "{[":
                return NO_CALL
            self._json_start = len(text) - len(rest)
            self._end = JsonEnd(self._json_start)
        if self._hopeless(text):
            return NO_CALL
        if self._json_end is None:
            self._json_end = self._end.find(text)
        if self._json_end is None:
            return NO_CALL if ended else None
        end = self._closed(text, self._json_end, ended)
        if end is None:
            return None
        value = text[self._json_start : self._json_end]
        bare = not self._open or self._open.startswith("```")
        calls = calls_from_json(value, self._tools, bare=bare)
        return Match(end, calls) if calls else NO_CALL

    def _function_tags(self, text: str, rest: str, ended: bool) -> Match | None:
        """The marker of Hermes around the notation of Qwen3-Coder."""
        if len(rest) < len("<function="):
            return NO_CALL if ended else None
        if self._tags is None:
            self._tags = FunctionTags(self._tools)
        return self._tags.step(text, ended)

    def _hopeless(self, text: str) -> bool:
        """JSON without a marker of calls that is none is not held back to its end."""
        if self._hopeful or (self._open and not self._open.startswith("```")):
            return False
        head = "".join(text[self._json_start :].split())
        self._hopeful = _KEY.match(head) is not None
        return not self._hopeful and len(head) > _KEY_WITHIN

    def _closed(self, text: str, at: int, ended: bool) -> int | None:
        """Where the block ends; None while it cannot be told."""
        if self._close is None:
            return at
        rest = text[at:].lstrip()
        if rest.startswith(self._close):
            return len(text) - len(rest) + len(self._close)
        return None if not ended and self._close.startswith(rest) else at


class _Fenced:
    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._json: _Json | None = None

    def step(self, text: str, ended: bool) -> Match | None:
        if self._json is None:
            self._json = _Json(text[: text.index("\n") + 1], "```", self._tools)
        return self._json.step(text, ended)
