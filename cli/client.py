"""The daemon's HTTP API from the client's side: where it listens, keys, errors, event streams.

Failures become the errors of `node.errors`, so that commands need no HTTP status.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cli.lock import lock_is_held
from node import errors
from node.config import load_config
from node.errors import NodeError, Overloaded, Unavailable
from node.paths import NodePaths

__all__ = ["DaemonClient", "DaemonFile", "read_daemon_file"]

NOT_RUNNING = "not running: start it with `ingle up`"
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
_BY_STATUS: Mapping[int, type[NodeError]] = {
    400: errors.InvalidRequest,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    413: errors.InvalidRequest,
    415: errors.InvalidRequest,
    422: errors.BadModelFile,
    502: errors.SourceError,
    503: errors.Unavailable,
    507: errors.NoSpace,
}


@dataclass(frozen=True, slots=True)
class DaemonFile:
    """What a running daemon wrote about itself."""

    pid: int
    host: str
    port: int

    @property
    def url(self) -> str:
        host = _ANY_ADDRESS.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def read_daemon_file(path: Path) -> DaemonFile | None:
    """None when no daemon is running, or died without taking the file away halfway."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        return DaemonFile(int(about["pid"]), str(about["host"]), int(about["port"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class DaemonClient:
    """One connection to the daemon of a home; a context manager.

    Raises:
        Unavailable: no daemon is running there, or it went away.
    """

    def __init__(self, paths: NodePaths) -> None:
        about = read_daemon_file(paths.daemon_file)
        if about is None or not lock_is_held(paths):
            raise Unavailable(NOT_RUNNING)
        self.about = about
        self._paths = paths
        api = load_config(paths.config_file).config.api
        key = api.key or next(iter(api.keys), None)
        self._api_headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A proxy from the environment must not see requests to this machine. No read timeout:
        # a long prompt on a slow machine is silent for as long as it takes.
        self._http = httpx.Client(
            base_url=about.url, trust_env=False, timeout=httpx.Timeout(None, connect=5)
        )

    def __enter__(self) -> DaemonClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def health(self) -> bool:
        """True when a model can answer, False while one is being loaded."""
        with _transport():
            return self._http.get("/health", timeout=5).status_code == 200

    def status(self) -> dict[str, Any]:
        return self._admin("GET", "status")

    def load(self, model: str, keep_alive_s: float | None) -> str:
        body = {"model": model, "keep_alive_s": keep_alive_s}
        return str(self._admin("POST", "models/load", body)["model"])

    def unload(self, model: str) -> str:
        return str(self._admin("POST", "models/unload", {"model": model})["model"])

    def shutdown(self) -> None:
        self._admin("POST", "shutdown", {})

    def settings(self) -> dict[str, Any]:
        """Values of all keys as the daemon uses them; secrets are blanked."""
        return {row["key"]: row["value"] for row in self._admin("GET", "config")["settings"]}

    def kv(self) -> list[dict[str, Any]]:
        """What each loaded model keeps below the device; see `Tiers.stats`."""
        models: list[dict[str, Any]] = self._admin("GET", "kv")["models"]
        return models

    def kv_flush(self) -> bool:
        return bool(self._admin("POST", "kv/flush", {})["flushed"])

    def kv_purge(self, namespace: str) -> None:
        self._admin("POST", "kv/purge", {"namespace": namespace})

    def chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed chat completion, the last one with `usage` and `timings`.

        Closing the iterator closes the connection, which frees the sequence in the daemon.
        """
        streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with (
            _transport(),
            self._http.stream(
                "POST", "/v1/chat/completions", json=streaming, headers=self._api_headers
            ) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise _error(response)
            yield from _events(response.iter_lines())

    def _admin(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            token = self._paths.admin_token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise Unavailable(NOT_RUNNING) from error
        with _transport():
            response = self._http.request(
                method,
                f"/ingle/v1/{path}",
                json=body,
                headers={"Authorization": f"Bearer {token}"},
            )
        if response.status_code != 200:
            raise _error(response)
        answer: dict[str, Any] = response.json()
        return answer


@contextmanager
def _transport() -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise Unavailable(NOT_RUNNING) from error
    except httpx.TransportError as error:
        raise Unavailable(f"the daemon broke off: {error}; `ingle logs` may say why") from error


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Payloads of a server-sent event stream; ours has one data line an event."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise _from_body(chunk["error"], 500)
        yield chunk
    raise Unavailable("the daemon broke off in the middle of the answer; see `ingle logs`")


def _error(response: httpx.Response) -> NodeError:
    try:
        body = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return NodeError(f"the daemon answered with status {response.status_code}")
    if response.status_code == 429:
        wait_s = response.headers.get("retry-after", "1")
        return Overloaded(str(body.get("message")), retry_after_s=int(wait_s))
    return _from_body(body, response.status_code)


def _from_body(body: Mapping[str, Any], status: int) -> NodeError:
    kind = _BY_STATUS.get(status, errors.EngineError)
    return kind(
        str(body.get("message", "unknown error")), param=body.get("param"), code=body.get("code")
    )
