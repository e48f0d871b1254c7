"""In-memory engine, chat format and pool. What a request does is written in its prompt:

`SAY a|b` says these tokens, `HANG` says one and waits for ever, `STALL` waits without a token,
`FAIL` fails at once, `BREAK` after one token, `CRASH` as BREAK with a foreign exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from node.base import LoadedModel, ModelCard, ModelState
from node.chat import ChatModel
from node.chat.types import (
    ChatRequest,
    OutputEvent,
    PreparedChat,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from node.engine.base import GenerateRequest
from node.engine.messages import (
    Constraint,
    Delta,
    Finish,
    ModelInfo,
    Stats,
    TokenLogprob,
    Usage,
)
from node.errors import (
    Conflict,
    ContextLengthExceeded,
    EngineError,
    InvalidRequest,
    NotFound,
    Unavailable,
)

N_VOCAB = 1000
N_CTX = 4096


class FakeEngine:
    """Remembers the requests it got and the prompts whose iterators were closed early."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.purged: list[str] = []
        self.stop = asyncio.Event()
        self.says: list[str] | None = None

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            "fake", "fake", N_CTX, N_CTX, N_VOCAB, 1, 1, None, "<s>", "</s>", (), True, True, 1
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta | Finish]:
        self.requests.append(request)
        text = " ".join(map(str, request.prompt))
        if request.constraint and request.constraint.gbnf == "bad":
            raise InvalidRequest("grammar: does not compile", param="grammar")
        if len(text) > N_CTX:
            raise ContextLengthExceeded(f"{len(text)} tokens, window {N_CTX}", param="messages")
        done = False
        try:
            async for item in self._script(request, text):
                done = isinstance(item, Finish)
                yield item
        finally:
            if not done:
                self.cancelled.append(text)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [1] * add_special + [ord(char) % N_VOCAB for char in text]

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    async def stats(self) -> Stats:
        return Stats(0, 1, 2, 3, N_CTX, 100, 4, 10, 5, 5, 7, 9, 0)

    async def flush_cache(self) -> bool:
        return True

    async def purge_cache(self, namespace: str) -> bool:
        self.purged.append(namespace)
        return True

    async def _stopped(self) -> None:
        """Until the pool closes; then as an engine that is shut down under its requests."""
        await self.stop.wait()
        raise Unavailable("the node is shutting down")

    async def _script(self, request: GenerateRequest, text: str) -> AsyncIterator[Delta | Finish]:
        words = (text.partition("SAY ")[2] if "SAY " in text else "ok").split("|")
        words = words if self.says is None else self.says
        if "STALL" in text:
            await self._stopped()
        if "FAIL" in text:
            raise EngineError("the worker could not finish this request")
        for i, word in enumerate(words[: request.max_tokens]):
            yield Delta(i, word, (i,), _logprobs(word, request.top_logprobs))
            if "HANG" in text:
                await self._stopped()
            if "BREAK" in text:
                raise EngineError("the worker died three times on this request")
            if "CRASH" in text:
                raise ValueError(text)
        n_tokens = len(words[: request.max_tokens])
        reason = "stop" if n_tokens == len(words) else "length"
        usage = Usage(10, 4, 6, n_tokens, 0.001, 0.01, 0.02)
        yield Finish(0, reason, usage)


def _logprobs(word: str, n_top: int | None) -> tuple[TokenLogprob, ...]:
    if n_top is None:
        return ()
    top = ((word.encode(), -0.5), (b"\xff", float("-inf")))
    return (TokenLogprob(word.encode(), -0.5, top[:n_top]),)


class FakeParser:
    """`~think x`, `~call name` and `~args {...}` are whole deltas; the rest is text."""

    def __init__(self) -> None:
        self._calls = 0

    def feed(self, text: str) -> list[OutputEvent]:
        verb, _, rest = text.partition(" ")
        if verb == "~think":
            return [ReasoningDelta(rest)]
        if verb == "~call":
            self._calls += 1
            return [ToolCallStart(self._calls - 1, f"call_{self._calls}", rest)]
        if verb == "~args":
            return [ToolCallArguments(self._calls - 1, rest)]
        return [TextDelta(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        return []


class FakeChat:
    family = "fake"

    def prepare(self, request: ChatRequest) -> PreparedChat:
        texts = [_text(message) for message in request.messages]
        forced = request.response_format.kind != "text" or request.tool_choice == "required"
        constraint = Constraint(gbnf='root ::= "{}"') if forced else None
        return PreparedChat(tuple(texts), constraint, ("<|end|>",), False, FakeParser)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class FakePool:
    """Two models: `tiny:1b` chats, `plain/base` has no template. `local` is the first."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.loading = False
        self.busy = False
        self.kept_alive_s: list[float | None] = []
        self.chat: ChatModel | None = None

    async def models(self) -> list[ModelCard]:
        return [
            ModelCard("tiny:1b", 1700000000, 1234, N_CTX, True, "pulled"),
            ModelCard("plain/base", 1700000000, 1234, None, False, "ollama"),
        ]

    def resolve(self, name: str) -> str:
        name = "tiny:1b" if name in ("local", "auto") else name
        if name not in ("tiny:1b", "plain/base"):
            raise NotFound(f"no model {name!r}; installed: tiny:1b, plain/base")
        return name

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[LoadedModel]:
        chat: Any = (self.chat or FakeChat()) if name == "tiny:1b" else None
        yield LoadedModel(name, self.engine, chat)

    async def load(self, name: str, keep_alive_s: float | None = None) -> str:
        self.kept_alive_s.append(keep_alive_s)
        return name

    async def unload(self, name: str) -> str:
        if self.busy:
            raise Conflict(f"{name} is answering requests")
        return name

    async def states(self) -> list[ModelState]:
        stats = await self.engine.stats()
        return [ModelState("tiny:1b", "ready", 1, N_CTX, 0, 1 << 20, 0, 0.0, 1.0, 2, ("a",), stats)]

    async def flush_cache(self) -> bool:
        return await self.engine.flush_cache()

    async def purge_cache(self, namespace: str) -> bool:
        return await self.engine.purge_cache(namespace)

    async def close(self) -> None:
        self.engine.stop.set()
