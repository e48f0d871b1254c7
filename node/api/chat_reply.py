"""The answer of /v1/chat/completions: engine deltas to chunks, or to one completion."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from node.api.logprobs import chat_logprobs
from node.api.service import FINGERPRINT
from node.api.tally import Tally
from node.chat.types import (
    OutputEvent,
    PreparedChat,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
)
from node.engine.base import GenerateRequest
from node.engine.messages import Delta, Finish, TokenLogprob

__all__ = ["ChatReply"]

_encode = msgspec.json.encode


class ChatReply:
    """The chunks, or the one completion, of a chat call."""

    def __init__(
        self,
        model: str,
        requests: Sequence[GenerateRequest],
        prepared: PreparedChat,
        *,
        stream: bool,
        include_usage: bool,
    ) -> None:
        self.requests = requests
        self._head = {
            "id": "chatcmpl-" + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._streaming = stream
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._choices = [_Choice(prepared) for _ in requests]
        # The constant bytes of every chunk are made once; a token costs one small encode.
        head = _encode({**self._head, "object": "chat.completion.chunk"})[:-1]
        self._prefixes = [
            b'data: %b,"choices":[{"index":%d,"delta":' % (head, i) for i in range(len(requests))
        ]
        self._plain_suffix = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._opened = False

    def take(self, index: int, item: Delta | Finish, tally: Tally) -> bytes:
        choice = self._choices[index]
        if type(item) is Finish:
            events = choice.finish(item)
        else:
            assert type(item) is Delta
            events = choice.feed(item, tally)
        if not self._streaming:
            choice.keep(events)
            return b""
        chunks = [] if self._opened else self._opening()
        chunks += [self._chunk(index, event) for event in events]
        if type(item) is Finish:
            chunks.append(self._last_chunk(index, choice.finish_reason))
        return b"".join(chunks)

    def usage_event(self, tally: Tally) -> bytes:
        usage = {"choices": [], "usage": tally.usage(), "timings": tally.timings()}
        chunk = {**self._head, "object": "chat.completion.chunk", **usage}
        return b"data: " + _encode(chunk) + b"\n\n"

    def result(self, tally: Tally) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice.result(i) for i, choice in enumerate(self._choices)],
            "usage": tally.usage(),
            "timings": tally.timings(),
        }

    def _opening(self) -> list[bytes]:
        self._opened = True
        delta = b'{"role":"assistant","content":""}'
        return [prefix + delta + self._plain_suffix for prefix in self._prefixes]

    def _chunk(self, index: int, event: OutputEvent) -> bytes:
        if type(event) is TextDelta:
            delta = b'{"content":%b}' % _encode(event.text)
        else:
            delta = _encode(_delta(event))
        return self._prefixes[index] + delta + self._suffix(index, None)

    def _last_chunk(self, index: int, reason: str) -> bytes:
        return self._prefixes[index] + b"{}" + self._suffix(index, reason)

    def _suffix(self, index: int, reason: str | None) -> bytes:
        logprobs = self._choices[index].take_logprobs()
        if not logprobs and reason is None:
            return self._plain_suffix
        content = {"content": chat_logprobs(logprobs), "refusal": None} if logprobs else None
        return b',"logprobs":%b,"finish_reason":%b}]%b' % (
            _encode(content),
            _encode(reason),
            self._tail,
        )


class _Choice:
    """Parser and state of one choice; gathers the message when not streaming."""

    def __init__(self, prepared: PreparedChat) -> None:
        self._parser = prepared.new_parser()
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[TokenLogprob] = []
        self._held_tokens = 0
        self._called = False
        self.finish_reason = "stop"

    def feed(self, delta: Delta, tally: Tally) -> list[OutputEvent]:
        if delta.logprobs:
            self._logprobs += delta.logprobs
        self._held_tokens += len(delta.tokens)
        if not delta.text:
            return []
        events = self._parser.feed(delta.text)
        if events:
            if type(events[0]) is ReasoningDelta:
                tally.reasoning_tokens += self._held_tokens
            self._held_tokens = 0
            self._note_calls(events)
        return events

    def finish(self, finish: Finish) -> list[OutputEvent]:
        events = self._parser.finish()
        self._note_calls(events)
        self.finish_reason = finish.reason
        if self._called and finish.reason == "stop":
            self.finish_reason = "tool_calls"
        return events

    def keep(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            if isinstance(event, TextDelta):
                self._text.append(event.text)
            elif isinstance(event, ReasoningDelta):
                self._reasoning.append(event.text)
            elif isinstance(event, ToolCallStart):
                function = {"name": event.name, "arguments": ""}
                self._calls.append({"id": event.id, "type": "function", "function": function})
            else:
                self._calls[event.index]["function"]["arguments"] += event.fragment

    def take_logprobs(self) -> list[TokenLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def result(self, index: int) -> dict[str, Any]:
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message |= {"content": text or None, "tool_calls": self._calls}
        logprobs = self.take_logprobs()
        content = {"content": chat_logprobs(logprobs), "refusal": None} if logprobs else None
        return {
            "index": index,
            "message": message,
            "logprobs": content,
            "finish_reason": self.finish_reason,
        }

    def _note_calls(self, events: Sequence[OutputEvent]) -> None:
        if not self._called:
            self._called = any(type(event) is ToolCallStart for event in events)


def _delta(event: OutputEvent) -> dict[str, Any]:
    if isinstance(event, TextDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    call: dict[str, Any] = {"index": event.index}
    if isinstance(event, ToolCallStart):
        call |= {"id": event.id, "type": "function"}
        call["function"] = {"name": event.name, "arguments": ""}
    else:
        call["function"] = {"arguments": event.fragment}
    return {"tool_calls": [call]}
