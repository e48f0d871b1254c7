"""Calls that must come: how each family writes one, and the parser of such output.

A grammar has written the output, so the arguments can be handed on as they arrive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from node.chat.formats.base import Tools, new_call_id
from node.chat.formats.jsontext import JsonEnd
from node.chat.types import OutputEvent, TextDelta, ToolCallArguments, ToolCallStart

__all__ = ["CallShape", "ForcedCallParser"]


@dataclass(frozen=True, slots=True)
class CallShape:
    """A call is `before` + name + `between` + arguments as JSON + `after`."""

    before: str
    between: str
    after: str = ""


class ForcedCallParser:
    """One call of `tools` in the given shape. Text in any other shape stays text."""

    def __init__(self, shape: CallShape, tools: Tools) -> None:
        names = "|".join(map(re.escape, sorted(tools, key=len, reverse=True)))
        before, between = re.escape(shape.before), re.escape(shape.between)
        self._head = re.compile(rf"\s*{before}({names}){between}(?=\{{)")
        self._buffer = ""
        self._end: JsonEnd | None = None
        self._done = 0

    def feed(self, text: str) -> list[OutputEvent]:
        self._buffer += text
        events: list[OutputEvent] = []
        if self._end is None:
            head = self._head.match(self._buffer)
            if head is None:
                return []
            events.append(ToolCallStart(0, new_call_id(), head[1]))
            self._buffer = self._buffer[head.end() :]
            self._end = JsonEnd()
        return events + self._arguments()

    def finish(self) -> list[OutputEvent]:
        if self._end is not None or not self._buffer:
            return []
        return [TextDelta(self._buffer)]

    def _arguments(self) -> list[OutputEvent]:
        """What has come of the arguments since the last time."""
        if self._done < 0:
            return []
        assert self._end is not None
        end = self._end.find(self._buffer)
        fragment = self._buffer[self._done : end]
        self._done = len(self._buffer) if end is None else -1
        return [ToolCallArguments(0, fragment)] if fragment else []
