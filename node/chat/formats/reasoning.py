"""Splits a reply into reasoning and what follows it."""

from __future__ import annotations

from typing import NamedTuple

from node.chat.formats.base import held_back
from node.chat.types import OutputEvent, OutputParser, ReasoningDelta

__all__ = ["Markers", "ReasoningParser"]


class Markers(NamedTuple):
    """Texts around the reasoning of a family."""

    open: str
    close: str


class ReasoningParser:
    """Reasoning can only be at the beginning: after the opening marker, or at once when the
    prompt has ended with it (`opened`). White space at its edges is not part of it.

    Three states: before (it may still begin), in it, and behind it, where `body` reads on.
    """

    def __init__(self, markers: Markers, body: OutputParser, *, opened: bool) -> None:
        self._markers = markers
        self._body = body
        self._state = "begin" if opened else "before"
        self._buffer = ""

    def feed(self, text: str) -> list[OutputEvent]:
        if self._state == "behind":
            return self._body.feed(text)
        self._buffer += text
        return self._drain(ended=False)

    def finish(self) -> list[OutputEvent]:
        events = self._drain(ended=True) if self._state != "behind" else []
        return events + self._body.finish()

    def _drain(self, ended: bool) -> list[OutputEvent]:
        if self._state in ("before", "begin") and not self._enter(ended):
            return []
        if self._state == "in":
            return self._reason(ended)
        if self._state == "after":
            self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return []
        self._state = "behind"
        text, self._buffer = self._buffer, ""
        return self._body.feed(text)

    def _enter(self, ended: bool) -> bool:
        """Settle whether reasoning begins. A model may open again what the prompt has opened."""
        stripped = self._buffer.lstrip()
        marker = self._markers.open
        if not ended and len(stripped) < len(marker) and marker.startswith(stripped):
            return False
        if stripped.startswith(marker):
            self._buffer, self._state = stripped[len(marker) :].lstrip(), "in"
        elif self._state == "begin":
            self._buffer, self._state = stripped, "in"
        else:
            self._state = "behind"
        return True

    def _reason(self, ended: bool) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        reasoning, close, rest = self._buffer.partition(self._markers.close)
        if close:
            self._say(reasoning.rstrip(), events)
            self._buffer, self._state = rest, "after"
            return events + self._drain(ended)
        ready = len(self._buffer)
        if not ended:
            ready -= held_back(self._buffer, (self._markers.close,))
            ready = len(self._buffer[:ready].rstrip())
        self._say(self._buffer[:ready], events)
        self._buffer = self._buffer[ready:]
        return events

    def _say(self, text: str, events: list[OutputEvent]) -> None:
        if not self._spoke:
            text = text.lstrip()
        if text:
            self._spoke = True
            events.append(ReasoningDelta(text))

    _spoke = False
