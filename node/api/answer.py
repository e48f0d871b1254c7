"""The life of one generating request: queue, model, choices, answer; streamed or in one piece.

Knows no wire format: `Call` says what to run and `Reply` turns what comes back into bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, cast

from msgspec.structs import replace
from starlette.types import Receive, Send

from node.api.errors import error_body, log_internal, public_error
from node.api.service import Service
from node.api.stream import DONE, EventStream, json_response, until_disconnect
from node.api.tally import Tally
from node.base import LoadedModel
from node.engine.base import Engine, GenerateRequest
from node.engine.messages import Delta, Finish
from node.errors import ContextLengthExceeded, NodeError, Overloaded, Unavailable

__all__ = ["Call", "Caller", "Reply", "answer", "merged"]

logger = logging.getLogger(__name__)

_ROUTE_HEADER = (b"x-inglenook-route", b"local")


class Caller(NamedTuple):
    """Who sent a request, as the guard saw it; see `AccessRules.tenant`."""

    request_id: str
    tenant: str


class Reply(Protocol):
    """Turns engine output into one wire format. `requests[i]` is choice i."""

    requests: Sequence[GenerateRequest]

    def take(self, index: int, item: Delta | Finish, tally: Tally) -> bytes:
        """Events to send now; empty when not streaming (the reply keeps it) or nothing is due."""
        ...

    def usage_event(self, tally: Tally) -> bytes: ...

    def result(self, tally: Tally) -> dict[str, Any]: ...


class Call(Protocol):
    """A checked request that has not met its model yet."""

    route: str
    model: str
    stream: bool
    include_usage: bool
    prompt_param: str
    choices_per_prompt: int

    async def begin(self, loaded: LoadedModel) -> Reply: ...


async def answer(
    service: Service, call: Call, caller: Caller, receive: Receive, send: Send
) -> None:
    """Write the whole response, or raise before its first byte. Cancels when the client leaves."""
    await until_disconnect(receive, _Answer(service, call, caller, send).run())


class _Answer:
    def __init__(self, service: Service, call: Call, caller: Caller, send: Send) -> None:
        self._service = service
        self._call = call
        self._caller = caller
        self._send = send
        self._tally = Tally()
        self._tally.choices_per_prompt = call.choices_per_prompt
        self._outcome = "cancelled"

    async def run(self) -> None:
        service, call = self._service, self._call
        model = service.resolve(call.model)
        try:
            self._ticket = service.gate.enter()
        except Overloaded:
            service.metrics.rejected.add(1)
            raise
        try:
            await (self._stream(model) if call.stream else self._whole(model))
        except Exception:
            self._outcome = "error"
            raise
        finally:
            self._ticket.leave()
            service.metrics.requests.add(1, model, call.route, self._outcome)
            self._tally.record(service.metrics, model)
            self._log(model)

    async def _whole(self, model: str) -> None:
        async with self._service.pool.use(model) as loaded:
            reply = await self._call.begin(loaded)
            async with aclosing(self._items(loaded, reply)) as items:
                async for index, item in items:
                    reply.take(index, item, self._tally)
        response = json_response(reply.result(self._tally))
        response.raw_headers.append(_ROUTE_HEADER)
        await response({"type": "http"}, _no_receive, self._send)
        self._outcome = "ok"

    async def _stream(self, model: str) -> None:
        stream = EventStream(self._send, self._service.config.api.keepalive_s, [_ROUTE_HEADER])
        try:
            async with self._service.pool.use(model) as loaded:
                reply = await self._call.begin(loaded)
                async with aclosing(self._items(loaded, reply)) as items:
                    async for index, item in items:
                        data = reply.take(index, item, self._tally)
                        if data:
                            await stream.write(data)
            usage = reply.usage_event(self._tally) if self._call.include_usage else b""
            await stream.finish(usage + DONE)
            self._outcome = "ok"
        except Exception as error:
            if not stream.started:
                raise
            self._outcome = "error"
            # The status cannot change any more: the error becomes an event of the stream.
            if not isinstance(error, NodeError):
                log_internal(error, self._caller.request_id)
            await stream.finish(b"data: " + error_body(public_error(error)) + b"\n\n" + DONE)
        finally:
            stream.close()

    async def _items(
        self, loaded: LoadedModel, reply: Reply
    ) -> AsyncGenerator[tuple[int, Delta | Finish], None]:
        try:
            requests = [replace(r, tenant=self._caller.tenant) for r in reply.requests]
            async with aclosing(merged(loaded.engine, requests)) as items:
                async for index, item in items:
                    if self._tally.ttft_s is None:
                        self._tally.first_item()
                        self._ticket.first_token()
                    if type(item) is Finish:
                        if item.reason == "cancelled":
                            raise Unavailable("the model was stopped; send the request again")
                        self._tally.finish(index, item)
                    yield index, item
        except ContextLengthExceeded as error:
            error.param = self._call.prompt_param
            raise

    def _log(self, model: str) -> None:
        usage, ttft_s = self._tally.usage(), self._tally.ttft_s
        logger.info(
            "request %s %s model=%s %s prompt=%d cached=%d completion=%d ttft_ms=%d",
            self._caller.request_id,
            self._call.route,
            model,
            self._outcome,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            round((ttft_s or 0.0) * 1000),
        )


async def merged(
    engine: Engine, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[tuple[int, Delta | Finish], None]:
    """Output of several requests as it comes, each with its index.

    The first failure ends all; closing this generator cancels what still runs.
    """
    if len(requests) == 1:
        async with aclosing(_generator(engine, requests[0])) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Delta | Finish | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(_generator(engine, request)) as items:
                async for item in items:
                    queue.put_nowait((index, item))
            queue.put_nowait((index, None))
        except Exception as error:  # job boundary: handed to the consumer below
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            index, news = await queue.get()
            if news is None:
                left -= 1
            elif isinstance(news, BaseException):
                raise news
            else:
                yield index, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _generator(engine: Engine, request: GenerateRequest) -> AsyncGenerator[Delta | Finish, None]:
    """An engine's iterator can be closed, by contract; its type does not say so."""
    items: AsyncIterator[Delta | Finish] = engine.generate(request)
    return cast("AsyncGenerator[Delta | Finish, None]", items)


async def _no_receive() -> Any:
    raise AssertionError("a finished response reads nothing")
