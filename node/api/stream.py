"""Raw ASGI: reading a JSON body, server-sent events with keep-alive, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from node.api.errors import ClientGone
from node.errors import InvalidRequest, Unavailable

__all__ = ["DONE", "EventStream", "Exchange", "json_response", "read_json", "until_disconnect"]

DONE = b"data: [DONE]\n\n"

_COMMENT = b": keep-alive\n\n"
_MAX_DEPTH = 64
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
]


class Exchange(Response):
    """A response that writes itself: `run` gets the connection's `receive` and `send`."""

    def __init__(self, run: Callable[[Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(receive, send)


class EventStream:
    """Server-sent events. The response starts with the first write, or with the first comment
    line: one goes out whenever nothing was written for `keepalive_s`.
    """

    def __init__(
        self, send: Send, keepalive_s: float, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        self._send = send
        self._keepalive_s = keepalive_s
        self._headers = [*_HEADERS, *headers]
        self._loop = asyncio.get_running_loop()
        self._last_write_s = self._loop.time()
        self._comment: asyncio.Task[None] | None = None
        # One timer per period that looks at the last write, not one per token.
        self._timer = self._loop.call_later(keepalive_s, self._tick)
        self.started = False

    async def write(self, data: bytes, *, last: bool = False) -> None:
        if self._comment is not None:
            await self._comment
        await self._put(data, last)

    async def finish(self, data: bytes) -> None:
        self.close()
        await self.write(data, last=True)

    def close(self) -> None:
        self._timer.cancel()

    async def _put(self, data: bytes, last: bool = False) -> None:
        self._last_write_s = self._loop.time()
        if not self.started:
            self.started = True
            start = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    def _tick(self) -> None:
        silent_s = self._loop.time() - self._last_write_s
        wait_s = self._keepalive_s - silent_s
        if wait_s <= 0.001:
            wait_s = self._keepalive_s
            if self._comment is None:
                self._comment = self._loop.create_task(self._put(_COMMENT))
                self._comment.add_done_callback(self._comment_done)
        self._timer = self._loop.call_later(wait_s, self._tick)

    def _comment_done(self, task: asyncio.Task[None]) -> None:
        self._comment = None
        if not task.cancelled():
            task.exception()  # a client that is gone is noticed by `until_disconnect`


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it, and wait for its end, as soon as the client closes the connection.

    Raises:
        ClientGone: it did.
        Unavailable: `work` was cancelled from elsewhere, which only a shutdown does.
    """
    job = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((job, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        left = not job.done()
        if left:
            job.cancel()
        await asyncio.gather(job, gone, return_exceptions=True)
    if not job.cancelled():
        job.result()
    elif left:
        raise ClientGone
    else:
        raise Unavailable("the node is shutting down")


async def read_json(receive: Receive, *, empty_ok: bool = False) -> dict[str, Any]:
    """The request's body, which must be a JSON object; `empty_ok`: or nothing.

    Raises:
        InvalidRequest: not JSON, not an object, or nested too deeply.
        ClientGone: the connection closed before the end of the body.
    """
    body = await _read_body(receive)
    if not body and empty_ok:
        return {}
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest("the body is not valid JSON", code="invalid_json") from error
    if not isinstance(decoded, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    _check_depth(decoded)
    return decoded


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_depth(value: Any) -> None:
    """Templates, schema compilers and encoders recurse; none of them has to meet a bomb."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for box in level
            for item in (box.values() if type(box) is dict else box)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return
    raise InvalidRequest(f"the body is nested deeper than {_MAX_DEPTH} levels", code="invalid_json")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
