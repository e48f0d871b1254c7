"""The outermost layer of every request: access rules, size limit, request id, error rendering.

Raw ASGI, because it also holds for paths that no route has.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from node.api.errors import BodyTooLarge, ClientGone, error_response, log_internal, public_error
from node.api.security import AccessRules, RequestHeaders
from node.errors import NodeError

__all__ = ["Guard"]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_HEADER_LIST = re.compile(rb"[A-Za-z0-9, _-]{1,2048}")


class Guard:
    """Lets a request through to `app` only if the rules allow it."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet = _Outlet(send)
        request_id = secrets.token_hex(12)
        try:
            headers = RequestHeaders(scope["headers"])
            given = headers.get(b"x-request-id")
            if given is not None and _REQUEST_ID.fullmatch(given):
                request_id = given.decode()
            outlet.headers.append((b"x-request-id", request_id.encode()))
            scope["request_id"] = request_id
            self._rules.check(scope, headers)
            scope["tenant"] = self._rules.tenant(headers)
            outlet.headers += _cors(headers)
            if self._rules.is_preflight(scope, headers):
                await _preflight(headers)(scope, receive, outlet)
                return
            await self._app(scope, _limited(receive, self._rules.max_body_bytes), outlet)
        except ClientGone:
            pass
        except Exception as error:  # request boundary: whatever happened becomes an answer
            if not isinstance(error, NodeError):
                log_internal(error, request_id)
            if not outlet.started:
                await error_response(public_error(error))(scope, receive, outlet)


class _Outlet:
    """`send` that adds our headers and knows whether the response has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.headers: list[tuple[bytes, bytes]] = [
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            message["headers"] = [*message.get("headers", ()), *self.headers]
        await self._send(message)


def _limited(receive: Receive, limit_bytes: int) -> Receive:
    """Count what really arrives: Content-Length may be absent or lie."""
    seen_bytes = 0

    async def counted() -> Any:
        nonlocal seen_bytes
        message = await receive()
        seen_bytes += len(message.get("body", b""))
        if seen_bytes > limit_bytes:
            raise BodyTooLarge(f"the body may have at most {limit_bytes} bytes")
        return message

    return counted


def _cors(headers: RequestHeaders) -> list[tuple[bytes, bytes]]:
    origin = headers.get(b"origin")
    if origin is None:
        return [(b"vary", b"Origin")]
    return [(b"vary", b"Origin"), (b"access-control-allow-origin", origin)]


def _preflight(headers: RequestHeaders) -> Response:
    wanted = headers.get(b"access-control-request-headers") or b""
    allowed = wanted if _HEADER_LIST.fullmatch(wanted) else b"authorization, content-type"
    response = Response(status_code=204)
    response.headers["access-control-allow-methods"] = "GET, POST"
    response.headers["access-control-allow-headers"] = allowed.decode()
    response.headers["access-control-max-age"] = "600"
    if headers.get(b"access-control-request-private-network") == b"true":
        response.headers["access-control-allow-private-network"] = "true"
    return response
