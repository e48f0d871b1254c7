"""What can go wrong in a node, once, for the HTTP API and the command line alike.

NodeError
├── InvalidRequest            400  exit 2   the caller's input, `param` names the field
│   └── ContextLengthExceeded 400  exit 2
├── Unauthorized              401  exit 6
├── Forbidden                 403  exit 6
├── NotFound                  404  exit 4
├── Conflict                  409  exit 1
├── Overloaded                429  exit 1   `retry_after_s` says when to come back
├── NoSpace                   507  exit 5   disk, RAM or VRAM
├── Unavailable               503  exit 3   loading, shutting down, daemon not reachable
├── SourceError               502  exit 1   a model source refused, broke off or sent wrong bytes
├── BadModelFile              422  exit 1   a GGUF that must not reach llama.cpp
├── EngineError               500  exit 1   the worker failed the request
└── ConfigError               500  exit 2   a bad value in flag, environment or file
"""

from __future__ import annotations

__all__ = [
    "BadModelFile",
    "ConfigError",
    "Conflict",
    "ContextLengthExceeded",
    "EngineError",
    "Forbidden",
    "InvalidRequest",
    "NoSpace",
    "NodeError",
    "NotFound",
    "Overloaded",
    "SourceError",
    "Unauthorized",
    "Unavailable",
]


class NodeError(Exception):
    """Base of all errors a user may see. The message says what to do about it."""

    status = 500
    exit_code = 1
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(NodeError):
    status, exit_code, code = 400, 2, "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class Unauthorized(NodeError):
    status, exit_code, code = 401, 6, "invalid_api_key"


class Forbidden(NodeError):
    status, exit_code, code = 403, 6, "forbidden"


class NotFound(NodeError):
    status, exit_code, code = 404, 4, "not_found"


class Conflict(NodeError):
    status, exit_code, code = 409, 1, "conflict"


class Overloaded(NodeError):
    status, exit_code, code = 429, 1, "overloaded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoSpace(NodeError):
    status, exit_code, code = 507, 5, "no_space"


class Unavailable(NodeError):
    status, exit_code, code = 503, 3, "unavailable"


class SourceError(NodeError):
    status, exit_code, code = 502, 1, "source_error"


class BadModelFile(NodeError):
    status, exit_code, code = 422, 1, "bad_model_file"


class EngineError(NodeError):
    status, exit_code, code = 500, 1, "engine_error"


class ConfigError(NodeError):
    status, exit_code, code = 500, 2, "config_error"
