"""The three ways to reach the same model that `bench engine` compares.

Every arm answers two questions in seconds: how long until the first token of a prompt, and how
long for so many tokens in so many streams. Prompts are random token ids and never cached.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from node.engine.base import GenerateRequest
from node.engine.messages import Finish, Load, Sampling
from node.engine.process import worker_environment
from node.engine.supervisor import EngineSupervisor

__all__ = ["Arm", "BareArm", "HttpArm", "Stream", "WorkerArm", "decode_rate"]

PROMPT_TOKENS = 16
_TOKEN_RANGE = (100, 30_000)  # in every vocabulary of size


class Stream(NamedTuple):
    """Arrival time of every token of one stream, seconds on one clock."""

    sent: float
    tokens: Sequence[float]


class Arm(Protocol):
    name: str

    async def first_token_s(self, n_prompt: int) -> float: ...

    async def decode_tok_s(self, n_tokens: int, streams: int) -> float: ...

    async def close(self) -> None: ...


def decode_rate(streams: Sequence[Stream]) -> float:
    """Tokens a second of all streams together, while all of them were decoding."""
    begin = max(s.tokens[0] for s in streams)
    end = min(s.tokens[-1] for s in streams)
    inside = sum(sum(begin < t <= end for t in s.tokens) for s in streams)
    return inside / (end - begin)


class BareArm:
    """A decode loop in a process of its own. `spinning` leaves OpenMP at its defaults."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def start(cls, load: Load, *, name: str = "bare_loop", spinning: bool = False) -> BareArm:
        environment = dict(os.environ) if spinning else worker_environment()
        if spinning:
            environment.pop("OMP_WAIT_POLICY", None)
            environment.pop("GOMP_SPINCOUNT", None)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "node.engine.bare",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        self = cls(name, process)
        await self._ask({"load": msgspec.to_builtins(load)})
        return self

    async def first_token_s(self, n_prompt: int) -> float:
        return float((await self._ask({"prefill": n_prompt}))["first_token_s"])

    async def decode_tok_s(self, n_tokens: int, streams: int) -> float:
        answer = await self._ask({"decode": n_tokens, "streams": streams})
        return n_tokens * streams / float(answer["decode_s"])

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the bare loop ended; see its message above")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _StreamingArm:
    """Arms that deliver tokens one by one."""

    async def first_token_s(self, n_prompt: int) -> float:
        stream = await self._stream(n_prompt, 1)
        return stream.tokens[0] - stream.sent

    async def decode_tok_s(self, n_tokens: int, streams: int) -> float:
        wanted = [self._stream(PROMPT_TOKENS, n_tokens + 1) for _ in range(streams)]
        return decode_rate(await asyncio.gather(*wanted))

    async def _stream(self, n_prompt: int, n_tokens: int) -> Stream:
        raise NotImplementedError


class WorkerArm(_StreamingArm):
    """Our worker over its pipe."""

    name = "worker"

    def __init__(self, engine: EngineSupervisor) -> None:
        self._engine = engine

    @classmethod
    async def start(cls, load: Load) -> WorkerArm:
        engine = EngineSupervisor(lambda _: None, load, load_timeout_s=300)
        await engine.start()
        return cls(engine)

    async def _stream(self, n_prompt: int, n_tokens: int) -> Stream:
        request = GenerateRequest(
            tuple(_prompt(n_prompt)),
            Sampling(),
            max_tokens=n_tokens,
            ignore_eos=True,
            cache_prompt=False,
        )
        sent, times = time.perf_counter(), []
        async for event in self._engine.generate(request):
            if not isinstance(event, Finish):
                times.append(time.perf_counter())
        return Stream(sent, times)

    async def close(self) -> None:
        await self._engine.close()


class HttpArm(_StreamingArm):
    """A daemon over HTTP. The client reads raw server-sent events, so that it costs little."""

    name = "http"

    def __init__(self, port: int, model: str, key: str | None = None) -> None:
        self._port = port
        self._model = model
        self._key = key

    async def _stream(self, n_prompt: int, n_tokens: int) -> Stream:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        request = self._request(n_prompt, n_tokens)
        sent, times = time.perf_counter(), []
        writer.write(request)
        try:
            while data := await reader.readline():
                if data.startswith(b"data: {"):
                    times.append(time.perf_counter())
                    if b'"error"' in data:
                        raise RuntimeError(data.decode())
                elif data.startswith(b"HTTP/1.1 ") and b" 200 " not in data:
                    raise RuntimeError(data.decode() + (await reader.read(2000)).decode())
                elif data.startswith(b"data: [DONE]"):
                    break
        finally:
            writer.close()
        return Stream(sent, times[:n_tokens])

    def _request(self, n_prompt: int, n_tokens: int) -> bytes:
        body = {
            "model": self._model,
            "prompt": _prompt(n_prompt),
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
        payload = json.dumps(body).encode()
        head = [
            "POST /v1/completions HTTP/1.1",
            f"Host: 127.0.0.1:{self._port}",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
            "Connection: close",
        ]
        if self._key:
            head.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*head, "", ""]).encode() + payload

    async def close(self) -> None:
        return None


def _prompt(n_tokens: int) -> list[int]:
    return [random.randint(*_TOKEN_RANGE) for _ in range(n_tokens)]
