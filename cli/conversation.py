"""A conversation with the daemon: its messages, one streamed turn at a time, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from cli.client import DaemonClient

__all__ = ["Conversation", "Turn"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. `ttft_ms` is what this client saw; the rest is the daemon's own account."""

    model: str
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    device_tokens: int
    dram_tokens: int
    ssd_tokens: int
    computed_tokens: int
    completion_tokens: int
    ttft_ms: float
    tokens_per_s: float

    def summary(self) -> str:
        cached = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached"
        speed = f"{self.completion_tokens} tokens, {self.tokens_per_s:.1f} tokens/s"
        return f"{self.model}: {speed}, {cached}"


@dataclass(slots=True)
class Conversation:
    """Grows with every turn; a turn that fails or is interrupted leaves what was answered."""

    client: DaemonClient
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str, show: Callable[[str], None]) -> Turn:
        """Send `text`, hand every piece of the answer to `show` as it arrives.

        Reasoning is shown too, but not kept: templates drop it from earlier turns.
        """
        self.messages.append({"role": "user", "content": text})
        body = {"model": self.model, "messages": self.messages, **self.options}
        answer = _Answer()
        try:
            with closing(self.client.chat(body)) as chunks:
                for piece in answer.pieces(chunks):
                    show(piece)
        finally:
            self._keep(answer.text)
        return answer.turn()

    def _keep(self, text: str) -> None:
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()


class _Answer:
    """Gathers the chunks of one streamed completion."""

    def __init__(self) -> None:
        self.text = ""
        self._model = ""
        self._sent_s = time.perf_counter()
        self._ttft_ms = 0.0
        self._finish_reason = ""
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}

    def pieces(self, chunks: Iterator[dict[str, Any]]) -> Iterator[str]:
        for chunk in chunks:
            self._model = chunk.get("model") or self._model
            self._usage = chunk.get("usage") or self._usage
            self._timings = chunk.get("timings") or self._timings
            for choice in chunk["choices"]:
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
                delta = choice["delta"]
                content = delta.get("content") or ""
                self.text += content
                if piece := (delta.get("reasoning_content") or "") + content:
                    if not self._ttft_ms:
                        self._ttft_ms = (time.perf_counter() - self._sent_s) * 1000
                    yield piece

    def _tokens_from(self, tier: str) -> int:
        return int(self._timings.get(f"{tier}_tokens", 0))

    def turn(self) -> Turn:
        prompt_tokens = int(self._usage.get("prompt_tokens", 0))
        cached = int(self._usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))
        return Turn(
            self._model,
            self.text,
            self._finish_reason,
            prompt_tokens,
            cached,
            self._tokens_from("device"),
            self._tokens_from("dram"),
            self._tokens_from("ssd"),
            int(self._timings.get("computed_tokens", prompt_tokens - cached)),
            int(self._usage.get("completion_tokens", 0)),
            round(self._ttft_ms, 1),
            float(self._timings.get("tokens_per_s", 0.0)),
        )
