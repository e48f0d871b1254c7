"""Who may call: Host and Origin allow-lists, keys, and the form of path and body headers.

Everything is decided on the raw scope: the path that is checked is the one the router uses, and
no URL is ever built from the Host header. Enforcing it is `node.api.guard`'s part.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from node.api.errors import BadHost, BodyTooLarge, UnsupportedMediaType
from node.config import ApiConfig
from node.errors import ConfigError, Forbidden, InvalidRequest, Unauthorized

__all__ = ["ADMIN_PREFIX", "OPEN_PATHS", "AccessRules", "RequestHeaders", "check_bind"]

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz"})
ADMIN_PREFIX = "/ingle/v1"

_HOST = re.compile(
    rb"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?))"
    rb"(?::[0-9]{1,5})?"
)
_ODD_PATH = re.compile(r"[\x00-\x1f\x7f\\?#]|//|/\.{1,2}(?:/|$)")
_WILDCARDS = frozenset({"", "0.0.0.0", "::", "*"})
_SINGLE = (b"host", b"origin", b"authorization", b"content-type", b"content-length")


class RequestHeaders:
    """The request's headers by lower-case name, each with all its values."""

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        self._values: dict[bytes, list[bytes]] = {}
        for name, value in raw:
            self._values.setdefault(name, []).append(value)
        for name in _SINGLE:
            if len(self._values.get(name, ())) > 1:
                raise BadHost(f"more than one {name.decode()} header", code="duplicate_header")

    def get(self, name: bytes) -> bytes | None:
        values = self._values.get(name)
        return values[0] if values else None


@dataclass(frozen=True, slots=True)
class AccessRules:
    """What one node accepts; built once from its configuration."""

    hosts: frozenset[str]
    origins: frozenset[bytes]
    api_keys: tuple[bytes, ...]
    admin_token: bytes
    max_body_bytes: int

    @classmethod
    def from_config(cls, api: ApiConfig, admin_token: str) -> AccessRules:
        bound = () if api.host in _WILDCARDS else (api.host,)
        return cls(
            frozenset(name.lower().strip("[]") for name in (*api.allowed_hosts, *bound)),
            frozenset(origin.lower().rstrip("/").encode() for origin in api.allowed_origins),
            tuple(key.encode() for key in (api.key, *api.keys) if key),
            admin_token.encode(),
            api.max_body_bytes,
        )

    def check(self, scope: Any, headers: RequestHeaders) -> None:
        """Raise the error this request deserves, if any.

        The order matters: nothing but the Host and the path is looked at for a foreign Host, and
        a caller without a key learns nothing about routes or bodies.
        """
        self._check_host(headers.get(b"host"))
        path: str = scope["path"]
        if not path.startswith("/") or _ODD_PATH.search(path):
            raise InvalidRequest("the path of the URL is malformed", code="bad_path")
        self.check_origin(headers)
        if not self.is_preflight(scope, headers):
            self._check_key(path, headers.get(b"authorization"))
            self._check_body(headers)

    def is_preflight(self, scope: Any, headers: RequestHeaders) -> bool:
        return (
            scope["method"] == "OPTIONS"
            and headers.get(b"origin") is not None
            and headers.get(b"access-control-request-method") is not None
        )

    def check_origin(self, headers: RequestHeaders) -> None:
        """A browser names the page that sends the request; only pages on the list may.

        Another port of localhost is another site: only the node's own origin is let in unlisted.
        """
        origin = headers.get(b"origin")
        if origin is None:
            return
        host = headers.get(b"host") or b""
        if origin.lower() not in self.origins and origin.lower() != b"http://" + host.lower():
            raise Forbidden(
                "this origin may not use the node; add it to api.allowed_origins",
                code="origin_not_allowed",
            )

    def _check_host(self, host: bytes | None) -> None:
        match = _HOST.fullmatch(host) if host is not None else None
        if match is None:
            raise BadHost("the Host header is missing or malformed")
        name = (match["v6"] or match["name"]).decode().lower()
        if name not in self.hosts and not _is_loopback(name):
            raise Forbidden(
                "this Host is not served here; add it to api.allowed_hosts",
                code="host_not_allowed",
            )

    def _check_key(self, path: str, authorization: bytes | None) -> None:
        if path in OPEN_PATHS:
            return
        admin = path == ADMIN_PREFIX or path.startswith(ADMIN_PREFIX + "/")
        wanted = (self.admin_token,) if admin else self.api_keys
        if wanted and _matching(wanted, authorization) is None:
            name = "the node's admin token" if admin else "a valid API key"
            raise Unauthorized(f"send {name} as `Authorization: Bearer …`")

    def tenant(self, headers: RequestHeaders) -> str:
        """Whose computed state a caller may use: one name for every key, none without keys."""
        key = _matching(self.api_keys, headers.get(b"authorization"))
        return "" if key is None else hashlib.blake2b(key, digest_size=16).hexdigest()

    def _check_body(self, headers: RequestHeaders) -> None:
        length = headers.get(b"content-length")
        if length is not None and (not length.isdigit() or int(length) > self.max_body_bytes):
            raise BodyTooLarge(f"the body may have at most {self.max_body_bytes} bytes")
        if length in (None, b"0") and headers.get(b"transfer-encoding") is None:
            return
        # A page can send text/plain across sites without a preflight, JSON it cannot.
        media_type = (headers.get(b"content-type") or b"").split(b";")[0].strip().lower()
        if media_type != b"application/json":
            raise UnsupportedMediaType("send the body as Content-Type: application/json")
        if (headers.get(b"content-encoding") or b"identity").lower() != b"identity":
            raise UnsupportedMediaType("compressed bodies are not accepted")


def _matching(keys: Iterable[bytes], authorization: bytes | None) -> bytes | None:
    """The key that a caller has sent; all are compared, so that time tells nothing."""
    scheme, _, given = (authorization or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        return None
    found = [key for key in keys if hmac.compare_digest(given.strip(), key)]
    return found[0] if found else None


def check_bind(api: ApiConfig) -> None:
    """Refuse to listen where others can reach us without a key.

    Raises:
        ConfigError: `api.host` is not loopback and `api.key` is not set.
    """
    if not (api.key or api.keys) and not _is_loopback(api.host.lower().strip("[]")):
        raise ConfigError(
            f"api.host = {api.host!r} can be reached from other machines: set api.key too",
            param="api.key",
        )


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
