"""The incremental reading of a reply: text until a call begins, calls, text again.

A `Syntax` says where a call may begin and makes a `Matcher` that decides. What is between a
beginning and the verdict is held back; what turns out to be no call is handed over as text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from node.chat.types import OutputEvent, TextDelta, ToolCallArguments, ToolCallStart

__all__ = [
    "NO_CALL",
    "BodyParser",
    "Call",
    "Match",
    "Matcher",
    "Syntax",
    "TextParser",
    "Tools",
    "call_events",
    "held_back",
    "new_call_id",
]

# Parameters schema of each function that may be called.
Tools = Mapping[str, Mapping[str, Any]]


class Call(NamedTuple):
    """`arguments` is the JSON text of an object."""

    name: str
    arguments: str


class Match(NamedTuple):
    """`length` characters of the text are these calls; no calls: it is text after all."""

    length: int
    calls: tuple[Call, ...]


NO_CALL = Match(0, ())


class Matcher(Protocol):
    def step(self, text: str, ended: bool) -> Match | None:
        """Verdict on `text`, which begins with the marker and only grows from step to step;
        None while it is open. With `ended` there must be one."""
        ...


@dataclass(frozen=True, slots=True)
class Syntax:
    """`only_first`: a call only at the beginning of the reply or right after another call."""

    starts: tuple[str, ...]
    new: Callable[[Tools], Matcher]
    only_first: bool = False


class TextParser:
    """A reply in which nothing is looked for."""

    def feed(self, text: str) -> list[OutputEvent]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        return []


class BodyParser:
    """A reply that may hold calls of `tools` in any of the syntaxes.

    White space around calls belongs to the format: an empty line takes its place between texts.
    Calls beyond `max_calls` are
    dropped, as the client has asked for no more.
    """

    def __init__(
        self, syntaxes: Sequence[Syntax], tools: Tools, max_calls: int | None = None
    ) -> None:
        self._tools = tools
        self._max_calls = max_calls
        self._syntaxes = [(start, s) for s in syntaxes for start in s.starts]
        self._syntaxes.sort(key=lambda pair: -len(pair[0]))
        self._anywhere = _alternation(s for s, syntax in self._syntaxes if not syntax.only_first)
        self._starts = tuple(s for s, syntax in self._syntaxes if not syntax.only_first)
        self._buffer = ""
        # White space before a beginning, until the verdict on it.
        self._space = ""
        self._matcher: Matcher | None = None
        self._start = ""
        self._first = True
        self._after_call = False
        self._spoke = False
        self._n_calls = 0

    def feed(self, text: str) -> list[OutputEvent]:
        self._buffer += text
        return self._drain(ended=False)

    def finish(self) -> list[OutputEvent]:
        return self._drain(ended=True)

    def _drain(self, ended: bool) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        while self._buffer:
            if self._matcher is None and not self._find_start(events, ended):
                break
            assert self._matcher is not None
            match = self._matcher.step(self._buffer, ended)
            if match is None:
                break
            self._matcher = None
            if match.calls:
                self._take(match, events)
            else:
                length = match.length or len(self._start)
                self._say(self._buffer[:length], events)
                self._buffer = self._buffer[length:]
        return events

    def _find_start(self, events: list[OutputEvent], ended: bool) -> bool:
        """Hand over the text before the next beginning of a call, if there is one."""
        at_first = self._first_start(ended)
        if at_first is None:
            return False
        if at_first:
            return True
        found = self._anywhere.search(self._buffer) if self._anywhere else None
        if found is None:
            keep = 0 if ended else held_back(self._buffer, self._starts)
            ready = len(self._buffer) - keep
            if not ended:
                ready = len(self._buffer[:ready].rstrip())
            self._say(self._buffer[:ready], events)
            self._buffer = self._buffer[ready:]
            return False
        before = self._buffer[: found.start()]
        if before.strip():
            body = before.rstrip()
            self._say(body, events)
            self._buffer = self._buffer[len(body) :]
            return self._find_start(events, ended)
        self._space = before
        self._buffer = self._buffer[found.start() :]
        self._begin(found.group())
        return True

    def _first_start(self, ended: bool) -> bool | None:
        """Whether a syntax of `only_first` begins here; None: it cannot be told yet."""
        if not self._first:
            return False
        stripped = self._buffer.lstrip(" \t\r\n;," if self._n_calls else None)
        for start, syntax in self._syntaxes:
            if syntax.only_first:
                if stripped.startswith(start):
                    self._space = self._buffer[: len(self._buffer) - len(stripped)]
                    self._buffer = stripped
                    self._begin(start)
                    return True
                if not ended and start.startswith(stripped):
                    return None
        return False

    def _begin(self, start: str) -> None:
        self._start = start
        syntax = next(
            s for text, s in self._syntaxes if text == start and (self._first or not s.only_first)
        )
        self._matcher = syntax.new(self._tools)

    def _take(self, match: Match, events: list[OutputEvent]) -> None:
        for call in match.calls:
            if self._max_calls is None or self._n_calls < self._max_calls:
                events += call_events(self._n_calls, call)
            self._n_calls += 1
        self._buffer = self._buffer[match.length :]
        self._space = ""
        self._first = self._after_call = True

    def _say(self, text: str, events: list[OutputEvent]) -> None:
        text, self._space = self._space + text, ""
        if self._after_call:
            text = text.lstrip()
            if text and self._spoke:
                text = "\n\n" + text
        if not text:
            return
        if text.strip():
            self._first = self._after_call = False
            self._spoke = True
        events.append(TextDelta(text))


def call_events(index: int, call: Call) -> list[OutputEvent]:
    return [
        ToolCallStart(index, new_call_id(), call.name),
        ToolCallArguments(index, call.arguments),
    ]


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        tail = text[-n:]
        if any(marker.startswith(tail) for marker in markers):
            return n
    return 0


def _alternation(starts: Any) -> re.Pattern[str] | None:
    texts = sorted(starts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None
