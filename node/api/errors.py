"""Errors on the wire: one shape for all of them, and what may be said about internal ones."""

from __future__ import annotations

import logging
import traceback
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from node.errors import InvalidRequest, NodeError, Overloaded, Unauthorized

__all__ = [
    "BadHost",
    "BodyTooLarge",
    "ClientGone",
    "UnsupportedMediaType",
    "error_body",
    "error_response",
    "http_exception_response",
    "log_internal",
    "public_error",
]

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class BadHost(InvalidRequest):
    code = "bad_host"


class BodyTooLarge(InvalidRequest):
    status, code = 413, "body_too_large"


class UnsupportedMediaType(InvalidRequest):
    status, code = 415, "unsupported_media_type"


class ClientGone(Exception):
    """The client closed the connection before its request was read."""


def error_body(error: NodeError) -> bytes:
    """The JSON of an error; also the payload of an error event in a stream."""
    return _body(error.status, error.message, error.code, error.param)


def error_response(error: NodeError) -> Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), error.status, headers, "application/json")


async def http_exception_response(_: Request, error: Exception) -> Response:
    """What the router raises by itself: no such route, wrong method."""
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    status = error.status_code
    messages = {404: "no such route", 405: "this route does not take this method"}
    message = messages.get(status, HTTPStatus(status).phrase)
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    body = _body(status, message, code, None)
    return Response(body, status, error.headers, "application/json")


def public_error(error: Exception) -> NodeError:
    """`error` itself when users may see it, else a message that says nothing."""
    if isinstance(error, NodeError):
        return error
    return NodeError("internal error; the daemon's log has the details")


def log_internal(error: Exception, request_id: str) -> None:
    """Type and stack only: the message of a foreign exception may quote a prompt."""
    stack = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s failed: %s\n%s", request_id, type(error).__name__, stack)


def _body(status: int, message: str, code: str, param: str | None) -> bytes:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    fields = {"message": message, "type": kind, "code": code, "param": param}
    return msgspec.json.encode({"error": fields})
