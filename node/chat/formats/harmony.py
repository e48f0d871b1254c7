"""gpt-oss: a reply is a list of messages, each with a header that names channel and recipient.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`
"""

from __future__ import annotations

import re

from node.chat.formats.base import Call, Tools, call_events, held_back
from node.chat.formats.jsontext import arguments_text
from node.chat.types import OutputEvent, ReasoningDelta, TextDelta

__all__ = ["HarmonyParser"]

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_MESSAGE = "<|message|>"
_HEADER_STARTS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "assistant", "to=")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """Analysis is reasoning, final and commentary are text, commentary to a function of `tools`
    is a call. A call whose arguments are no JSON object comes out as text."""

    def __init__(self, tools: Tools, max_calls: int | None = None) -> None:
        self._tools = tools
        self._max_calls = max_calls
        self._n_calls = 0
        self._buffer = ""
        # None while a header is read, else what the message's text is.
        self._kind: str | None = None
        self._recipient = ""
        self._spoke = False
        self._fresh = True

    def feed(self, text: str) -> list[OutputEvent]:
        self._buffer += text
        return self._drain(ended=False)

    def finish(self) -> list[OutputEvent]:
        return self._drain(ended=True)

    def _drain(self, ended: bool) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        while self._buffer:
            if self._kind is None and not self._header(ended):
                break
            if not self._content(events, ended):
                break
        return events

    def _header(self, ended: bool) -> bool:
        header, message, rest = self._buffer.partition(_MESSAGE)
        if not self._is_header(header):
            self._open("final", "", self._buffer)
            return True
        if not message:
            if ended:
                self._buffer = ""
            return False
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1] if recipient else ""
        kind = channel[1] if channel else "final"
        self._open("call" if name in self._tools else kind, name, rest)
        return True

    def _is_header(self, header: str) -> bool:
        text = header.lstrip()
        return any(text.startswith(s) or s.startswith(text) for s in _HEADER_STARTS)

    def _open(self, kind: str, recipient: str, rest: str) -> None:
        self._kind, self._recipient, self._buffer = kind, recipient, rest
        self._fresh = True

    def _content(self, events: list[OutputEvent], ended: bool) -> bool:
        found = _END.search(self._buffer)
        if found is None:
            if self._kind == "call":
                if not ended:
                    return False
                self._call(self._buffer, events)
                self._buffer = ""
                return False
            keep = 0 if ended else held_back(self._buffer, _ENDS)
            ready = len(self._buffer) - keep
            self._say(self._buffer[:ready], events)
            self._buffer = self._buffer[ready:]
            return False
        text = self._buffer[: found.start()]
        if self._kind == "call":
            self._call(text, events)
        else:
            self._say(text, events)
        self._kind = None
        at = found.start() if found.group() == "<|start|>" else found.end()
        self._buffer = self._buffer[at:]
        return True

    def _call(self, text: str, events: list[OutputEvent]) -> None:
        arguments = arguments_text(text) if text.strip() else "{}"
        if arguments is None:
            self._kind = "commentary"
            self._say(text, events)
            return
        if self._max_calls is None or self._n_calls < self._max_calls:
            events += call_events(self._n_calls, Call(self._recipient, arguments))
        self._n_calls += 1

    def _say(self, text: str, events: list[OutputEvent]) -> None:
        if not text:
            return
        if self._kind == "analysis":
            events.append(ReasoningDelta(text))
            return
        # A preamble and the answer are two messages; the client sees one.
        if self._spoke and self._fresh:
            text = "\n\n" + text
        self._spoke, self._fresh = True, False
        events.append(TextDelta(text))
