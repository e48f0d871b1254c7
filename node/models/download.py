"""Fetches one file over HTTP: resumed, counted, hashed, and only from where it may come from.

Redirects are followed by hand: never from https to http, never to an address inside the machine
or its network (unless that is the very server the user configured), and headers with a credential
go to the configured server only. Bodies are read raw and capped, so nothing is ever inflated.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import urljoin

from node.errors import NoSpace, SourceError
from node.models.address import check_foreign, check_peer, host, origin

if TYPE_CHECKING:
    import ssl

    import httpx

__all__ = [
    "OnProgress",
    "Progress",
    "RemoteFile",
    "Source",
    "file_sha256",
    "human_bytes",
    "need_space",
]

_MARGIN_BYTES = 512 * 2**20
_PROGRESS_BYTES = 256 * 2**10
_MAX_HOPS = 5
_MAX_ATTEMPTS = 4
_FIRST_WAIT_S = 0.5
_MAX_WAIT_S = 30.0
_REPORT_EVERY_S = 0.1
_CONNECT_S, _READ_S = 15.0, 60.0


class Progress(NamedTuple):
    """`what` is the file; `total_bytes` None when the server does not say."""

    what: str
    done_bytes: int
    total_bytes: int | None


OnProgress = Callable[[Progress], None]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to fetch, with what is known about it beforehand."""

    url: str
    name: str
    size_bytes: int | None = None
    sha256: str | None = None
    etag: str | None = None

    @property
    def partial_name(self) -> str:
        """The same for the same bytes, so that a partial download is found again."""
        known = self.sha256 or f"{self.url}\n{self.etag}\n{self.size_bytes}"
        return f"{hashlib.blake2b(known.encode(), digest_size=16).hexdigest()}.part"


class _BrokenOffError(Exception):
    """The connection ended early or the server is busy: worth another try."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(slots=True)
class Source:
    """A configured server. `headers` (credentials among them) are sent to its origin only.

    `explain` turns a refusing status into what the user can do about it.
    """

    endpoint: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    explain: Callable[[httpx.Response], str | None] = lambda _: None

    def head(self, url: str) -> Mapping[str, str]:
        """Headers of a HEAD; redirects are followed only inside the endpoint's origin."""
        return self._patiently(lambda client: self._head(client, url), self._unreachable)

    def read(self, url: str, limit_bytes: int, accept: str) -> tuple[bytes, str, str]:
        """A small document: body, content type, final URL."""

        def read(client: httpx.Client) -> tuple[bytes, str, str]:
            with self._follow(client, url, {"Accept": accept}) as response:
                self._check_status(response)
                body = b"".join(_capped(response, limit_bytes))
                return body, response.headers.get("content-type", ""), str(response.url)

        return self._patiently(read, self._unreachable)

    def fetch(self, file: RemoteFile, folder: Path, report: OnProgress) -> tuple[Path, str]:
        """The whole file as `folder/….part` and its sha256.

        What an earlier call left there is kept and completed, in this process or another.

        Raises:
            NoSpace: the disk cannot hold it.
            SourceError: refused, broken off too often, or wrong bytes (which are then gone).
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = folder / file.partial_name
        have = _size(partial)
        if file.size_bytes is not None:
            need_space(folder, file.size_bytes - have, file.name)
        quietly = _throttled(report)
        self._patiently(
            lambda client: self._append(client, file, partial, quietly),
            lambda reason: _broken_off(file, partial, reason),
            lambda: _size(partial),
        )
        digest = file_sha256(partial)
        if file.sha256 is not None and digest != file.sha256:
            partial.unlink()
            raise SourceError(
                f"{file.name} arrived with sha256 {digest}, expected {file.sha256}: discarded;"
                " pull again, and mistrust the server if it happens twice"
            )
        return partial, digest

    def _patiently(
        self,
        action: Callable[[httpx.Client], _T],
        give_up: Callable[[str], SourceError],
        done_bytes: Callable[[], int] = lambda: 0,
    ) -> _T:
        """Repeat an action while the network is at fault, waiting longer each time.

        The count starts again whenever a try has brought something.
        """
        import httpx

        attempt, reached = 0, done_bytes()
        with self._client() as client:
            while True:
                try:
                    return action(client)
                except httpx.InvalidURL as error:
                    raise SourceError(f"{host(self.endpoint)} sent a bad address") from error
                except (httpx.TransportError, _BrokenOffError) as error:
                    if done_bytes() >= reached + _PROGRESS_BYTES:
                        attempt, reached = 0, done_bytes()
                    attempt += 1
                    if attempt == _MAX_ATTEMPTS:
                        raise give_up(str(error) or type(error).__name__) from error
                    wait_s = getattr(error, "wait_s", None) or _FIRST_WAIT_S * 2**attempt
                    time.sleep(min(wait_s, _MAX_WAIT_S))

    def _unreachable(self, reason: str) -> SourceError:
        return SourceError(
            f"{host(self.endpoint)} cannot be reached ({reason}); is the network up?"
        )

    def _head(self, client: httpx.Client, url: str) -> Mapping[str, str]:
        for _ in range(_MAX_HOPS):
            with self._send(client, "HEAD", url, {}) as response:
                where = _target(response, url)
                if not response.is_redirect or origin(where) != origin(self.endpoint):
                    self._check_status(response, redirect_is_fine=True)
                    return response.headers
                # The hub says what a file is on the way to a storage path of its own.
                if "x-linked-etag" in response.headers:
                    return response.headers
                url = where
        raise SourceError(f"{host(self.endpoint)} redirects in a circle")

    def _append(
        self, client: httpx.Client, file: RemoteFile, partial: Path, report: OnProgress
    ) -> None:
        have = _size(partial)
        if file.size_bytes is not None and have == file.size_bytes:
            report(Progress(file.name, have, file.size_bytes))
            return
        if file.size_bytes is not None and have > file.size_bytes:
            partial.unlink()
            have = 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        if have and file.etag:
            headers["If-Range"] = f'"{file.etag}"'
        with self._follow(client, file.url, headers) as response:
            if response.status_code == 416:
                partial.unlink(missing_ok=True)
                raise _BrokenOffError("the server does not know the part that is here")
            self._check_status(response)
            resumed = response.status_code == 206 and _starts_at(response) == have
            if response.status_code == 206 and not resumed:
                partial.unlink(missing_ok=True)
                raise _BrokenOffError("the server sent another part than asked for")
            self._write(response, file, partial, have if resumed else 0, report)

    def _write(
        self,
        response: httpx.Response,
        file: RemoteFile,
        partial: Path,
        have: int,
        report: OnProgress,
    ) -> None:
        announced = response.headers.get("content-length", "")
        total = file.size_bytes
        if total is None and announced.isdecimal():
            total = have + int(announced)
            need_space(partial.parent, total - have, file.name)
        free = shutil.disk_usage(partial.parent).free - _MARGIN_BYTES
        limit = free if total is None else total - have
        with open(partial, "ab" if have else "wb") as out:
            for chunk in _capped(response, limit):
                out.write(chunk)
                have += len(chunk)
                report(Progress(file.name, have, total))
        if total is not None and have < total:
            raise _BrokenOffError("the connection ended early")

    def _client(self) -> httpx.Client:
        import httpx

        return httpx.Client(
            follow_redirects=False,
            timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
            verify=_certificates(),
            headers={"User-Agent": "inglenook", "Accept-Encoding": "identity"},
        )

    @contextmanager
    def _follow(
        self, client: httpx.Client, url: str, headers: Mapping[str, str]
    ) -> Iterator[httpx.Response]:
        for _ in range(_MAX_HOPS):
            with self._send(client, "GET", url, headers) as response:
                if not response.is_redirect:
                    yield response
                    return
                url = _target(response, url)
        raise SourceError(f"{host(self.endpoint)} redirects in a circle")

    @contextmanager
    def _send(
        self, client: httpx.Client, method: str, url: str, headers: Mapping[str, str]
    ) -> Iterator[httpx.Response]:
        own = origin(url) == origin(self.endpoint)
        if not own:
            check_foreign(url, self.endpoint)
        extra = {**headers, **(self.headers if own else {})}
        with client.stream(method, url, headers=extra) as response:
            if not own:
                check_peer(response, self.endpoint)
            yield response

    def _check_status(self, response: httpx.Response, redirect_is_fine: bool = False) -> None:
        status = response.status_code
        if response.is_success or redirect_is_fine and response.is_redirect:
            return
        if status == 429 or status >= 500:
            after = response.headers.get("retry-after", "")
            reason = f"{host(str(response.url))} answered {status}"
            raise _BrokenOffError(reason, float(after) if after.isdecimal() else None)
        told = self.explain(response)
        raise SourceError(told or f"{host(str(response.url))} refused with status {status}")


def need_space(folder: Path, n_bytes: int, what: str) -> None:
    """Raises NoSpace unless `n_bytes` fit on the folder's disk with a margin left over."""
    free = shutil.disk_usage(folder).free
    if n_bytes + _MARGIN_BYTES > free:
        raise NoSpace(
            f"{what} needs {human_bytes(n_bytes)} and a margin of {human_bytes(_MARGIN_BYTES)},"
            f" the disk has {human_bytes(free)} free: make room, or use --home on another disk"
        )


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def human_bytes(n_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _broken_off(file: RemoteFile, partial: Path, reason: str) -> SourceError:
    have = _size(partial)
    total = f" of {human_bytes(file.size_bytes)}" if file.size_bytes else ""
    return SourceError(
        f"{file.name} broke off at {human_bytes(have)}{total} ({reason});"
        " run the same command again to resume"
    )


def _capped(response: httpx.Response, limit_bytes: int) -> Iterator[bytes]:
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise SourceError(f"{host(str(response.url))} sent {encoding} data that was not asked for")
    seen = 0
    # In the pieces the network brings: a larger buffer would lose its content when it breaks off.
    for chunk in response.iter_raw():
        seen += len(chunk)
        if seen > limit_bytes:
            raise SourceError(
                f"{host(str(response.url))} sent more than the {human_bytes(limit_bytes)} expected"
            )
        yield chunk


def _starts_at(response: httpx.Response) -> int | None:
    unit, _, rest = response.headers.get("content-range", "").partition(" ")
    start = rest.partition("-")[0]
    return int(start) if unit == "bytes" and start.isdecimal() else None


def _throttled(report: OnProgress) -> OnProgress:
    last = -_REPORT_EVERY_S

    def throttled(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _REPORT_EVERY_S or progress.done_bytes == progress.total_bytes:
            last = now
            report(progress)

    return throttled


def _certificates() -> ssl.SSLContext | bool:
    import ssl

    for variable in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"):
        file = os.environ.get(variable)
        if file and os.path.isfile(file):
            return ssl.create_default_context(cafile=file)
    return True


def _target(response: httpx.Response, url: str) -> str:
    try:
        return urljoin(url, str(response.headers.get("location", "")))
    except ValueError as error:
        raise SourceError(f"{host(url)} redirects to no address at all") from error
