"""A small model hub and package index on a real socket, with the faults a real network has."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Seen(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(slots=True)
class Served:
    """One file. `cuts` are bodies' lengths after which the connection breaks, one a request."""

    body: bytes
    kind: str = "application/octet-stream"
    sha256: str | None = None
    size: int | None = None
    cuts: list[int] = field(default_factory=list)
    redirect: str | None = None
    status: int = 200
    error_code: str = ""
    gzipped: bool = False
    ignore_range: bool = False


@dataclass(slots=True)
class FakeHub:
    url: str
    files: dict[str, Served] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)

    def put(self, path: str, body: bytes, **more: object) -> Served:
        self.files[path] = Served(body, **more)  # type: ignore[arg-type]
        return self.files[path]

    def put_model(self, repo: str, name: str, body: bytes, **more: object) -> Served:
        more.setdefault("sha256", hashlib.sha256(body).hexdigest())
        return self.put(f"/{repo}/resolve/main/{name}", body, **more)

    def put_wheel(self, name: str, body: bytes, project: str, **more: object) -> Served:
        digest = more.pop("sha256", None) or hashlib.sha256(body).hexdigest()
        entry = {"filename": name, "url": f"../../files/{name}", "hashes": {"sha256": digest}}
        page = json.dumps({"files": [{**entry, "size": len(body)}]}).encode()
        self.put(f"/simple/{project}/", page, kind="application/vnd.pypi.simple.v1+json")
        return self.put(f"/files/{name}", body, **more)

    def asked(self, method: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.method == method]


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        return

    def _answer(self, with_body: bool) -> None:
        hub: FakeHub = self.server.hub  # type: ignore[attr-defined]
        headers = {key.lower(): value for key, value in self.headers.items()}
        hub.seen.append(Seen(self.command, self.path, headers))
        served = hub.files.get(self.path, Served(b"", status=404, error_code="EntryNotFound"))
        if served.status != 200:
            self._start(served.status, {"X-Error-Code": served.error_code, "Content-Length": "0"})
        elif served.redirect is not None and with_body:
            self._start(302, {"Location": served.redirect, "Content-Length": "0"})
        else:
            self._send(served, headers.get("range"), with_body)

    def _send(self, served: Served, wanted: str | None, with_body: bool) -> None:
        body = gzip.compress(served.body) if served.gzipped else served.body
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if served.ignore_range:
            start = 0
        size = len(body) if served.size is None else served.size
        headers = {"Content-Length": str(size - start), "Content-Type": served.kind}
        if served.sha256:
            headers |= {"X-Linked-Etag": f'"{served.sha256}"', "X-Linked-Size": str(size)}
        if served.gzipped:
            headers["Content-Encoding"] = "gzip"
        if start:
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        self._start(206 if start else 200, headers)
        if not with_body:
            return
        cut = served.cuts.pop(0) if served.cuts else len(body)
        self.wfile.write(body[start : max(start, cut)])
        self.close_connection = self.close_connection or cut < len(body) or size != len(body)

    def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
