"""What a prompt must cost at least: the tokens that no earlier request had."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from node.chat import ChatRequest, NamedTool
from node.engine.messages import Load, ModelInfo
from node.engine.process import worker_environment
from node.pool import chat_model

__all__ = ["Ledger"]

Message = Mapping[str, Any]


class Ledger:
    """Renders and tokenises as the node does, in a process of its own, and remembers everything
    that was computed."""

    def __init__(self, load: Load) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "node.engine.bare"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worker_environment(),
        )
        answer = self._ask({"load": msgspec.to_builtins(load)})
        self.chat = chat_model(msgspec.convert(answer["info"], ModelInfo))
        self._seen: list[list[int]] = []

    def close(self) -> None:
        with self._process:  # its input ends, and so does it
            pass

    def fill_cache(self, folder: Path, n_blocks: int) -> None:
        """Put small blocks that no prompt has into an SSD tier."""
        self._ask({"fill": str(folder), "blocks": n_blocks})

    def forget(self) -> None:
        self._seen.clear()

    def plain(self, messages: Sequence[Message]) -> str:
        """A prompt for models without a chat format."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join([*lines, "assistant:"])

    def tokens(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), force: str = ""
    ) -> list[int]:
        if self.chat is None:
            return self.tokenize([self.plain(messages)])
        choice: Any = NamedTool(force) if force else "auto"
        prepared = self.chat.prepare(ChatRequest(messages, tools, tool_choice=choice))
        return self.tokenize([str(part) for part in prepared.prompt])

    def floor(self, tokens: Sequence[int]) -> int:
        """Of these, how many were in no earlier prompt or answer; the last one never counts as
        had, as it must be computed for its logits."""
        shared = max((_common(tokens, other) for other in self._seen), default=0)
        return len(tokens) - min(shared, len(tokens) - 1)

    def note(self, tokens: Sequence[int], answer: str, cut_short: bool) -> None:
        """A request was answered. The last token of one that was cut short is not computed."""
        said = self.tokenize([answer], add_bos=False) if answer else []
        self._seen.append([*tokens, *(said[:-1] if cut_short else said)])

    def tokenize(self, parts: Sequence[str], add_bos: bool = True) -> list[int]:
        tokens: list[int] = self._ask({"tokenize": list(parts), "add_bos": add_bos})["tokens"]
        return tokens

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the tokeniser's process ended; see its message above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
