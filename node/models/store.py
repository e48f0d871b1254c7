"""The models of this machine: those pulled into our own folder, and those found elsewhere.

A pulled model is a folder with its files and `model.json`; it appears and goes by one rename. A
file of another program is used where it lies and never written to or removed.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.errors import BadModelFile, Conflict, Forbidden, NodeError, NotFound
from node.models.names import check_name, folder_name, name_from_folder
from node.paths import NodePaths

__all__ = ["InstalledModel", "ModelStore"]

logger = logging.getLogger(__name__)

_MANIFEST = "model.json"
_FORMAT = 1
_PARTIAL_AGE_S = 7 * 24 * 3600
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model that can be loaded. `source` is pulled, file, huggingface, ollama or lmstudio."""

    name: str
    path: Path
    files: tuple[Path, ...]
    size_bytes: int
    source: str
    origin: str
    sha256: str | None
    licence: str | None
    created_s: float

    @property
    def ours(self) -> bool:
        """True when `rm` may remove it (of a `file` model, the entry but not the file)."""
        return self.source in ("pulled", "file")


# Inside the class, `list` is its method.
_Models = list[InstalledModel]


class ModelStore:
    """Models under `paths.models`. The folder is the state, so any number may be open."""

    def __init__(self, paths: NodePaths, *, discover: bool = True) -> None:
        self.root = paths.models
        self._discover = discover
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"ModelStore({self.root})"

    def list(self) -> _Models:
        """All models, ours first; a name that is taken here is not looked for elsewhere."""
        ours = self._pulled()
        if not self._discover:
            return ours
        from node.models.discover import discover

        return ours + discover(taken={model.name for model in ours}, own=self._own_files(ours))

    def find(self, name: str) -> InstalledModel:
        """The model of that name, or the only one whose name without its tag it is.

        Raises:
            NotFound: none or several; the message names candidates and what to do.
        """
        models = self.list()
        exact = [model for model in models if model.name == name]
        if exact:
            return exact[0]
        untagged = [m for m in models if ":" not in name and m.name.partition(":")[0] == name]
        if len(untagged) == 1:
            return untagged[0]
        raise NotFound(_not_found(name, [m.name for m in untagged or models]), param="model")

    def add(
        self,
        name: str,
        files: Sequence[Path],
        *,
        origin: str,
        sha256: str | None = None,
        licence: str | None = None,
        in_place: bool = False,
    ) -> InstalledModel:
        """Install checked files under a name, replacing what had it.

        The files are moved here, or with `in_place` only referred to. Until the last rename the
        old model of this name stays as it is.

        Raises:
            Conflict: the old model is in use and cannot be replaced (Windows).
        """
        target, staged = self._folder(name), self.partial / f"{folder_name(name)}.new"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True, mode=0o700)
        names = [str(f.absolute()) if in_place else _plain_name(f.name) for f in files]
        size = sum(f.stat().st_size for f in files)
        manifest = {
            "format": _FORMAT,
            "name": name,
            "files": names,
            "size_bytes": size,
            "source": "file" if in_place else "pulled",
            "origin": origin,
            "sha256": sha256,
            "licence": licence,
            "created_s": time.time(),
        }
        (staged / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if not in_place:
            for file, plain in zip(files, names, strict=True):
                os.replace(file, staged / plain)
        self._swap_in(staged, target)
        return self._read(target)

    def remove(self, name: str) -> int:
        """Remove a model of ours; returns the bytes that became free.

        Raises:
            NotFound: no such model.
            Forbidden: it belongs to another program.
            Conflict: a loaded model's files cannot be removed (Windows).
        """
        model = self.find(name)
        if not model.ours:
            raise Forbidden(
                f"{model.name} belongs to another program ({model.source}); remove it there",
                param="model",
            )
        folder = self._folder(model.name)
        freed = sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
        self._swap_out(folder)
        return freed

    @property
    def partial(self) -> Path:
        """Where downloads grow and installs are put together: on the same disk as the models."""
        return self.root / ".partial"

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Keeps a second process from pulling the same model at the same time.

        Raises:
            Conflict: one does already.
        """
        self.partial.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.partial / f"{folder_name(name)}.lock", "wb") as file:
            if not _lock(file):
                raise Conflict(f"{name} is being pulled by another process; wait for it")
            yield

    def forget_old_partials(self) -> None:
        """Remove downloads that nobody came back for."""
        for partial in self.partial.glob("*.part"):
            if time.time() - partial.stat().st_mtime > _PARTIAL_AGE_S:
                partial.unlink(missing_ok=True)

    def _folder(self, name: str) -> Path:
        return self.root / folder_name(name)

    def _pulled(self) -> _Models:
        models = []
        for manifest in sorted(self.root.glob(f"*/{_MANIFEST}")):
            if manifest.parent.name.startswith("."):
                continue
            try:
                models.append(self._read(manifest.parent))
            except (OSError, ValueError, LookupError, TypeError, NodeError) as error:
                self._warn_once(manifest.parent.name, error)
        return models

    def _warn_once(self, folder: str, error: Exception) -> None:
        if folder not in self._warned:
            self._warned.add(folder)
            logger.warning("model folder %s is left out: %s", folder, error)

    def _read(self, folder: Path) -> InstalledModel:
        data = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        name = name_from_folder(folder.name)
        if data["format"] != _FORMAT or data["name"] != name:
            raise ValueError("its manifest is of another version or another model")
        source = data["source"]
        files = tuple(_file_path(folder, str(f), source) for f in data["files"])
        for file in files:
            if not file.is_file():
                raise ValueError(f"its file {file.name} is gone")
        return InstalledModel(
            name=name,
            path=files[0],
            files=files,
            size_bytes=int(data["size_bytes"]),
            source=source,
            origin=str(data["origin"]),
            sha256=_optional_text(data["sha256"]),
            licence=_optional_text(data["licence"]),
            created_s=float(data["created_s"]),
        )

    def _own_files(self, models: Sequence[InstalledModel]) -> set[Path]:
        return {file.resolve() for model in models for file in model.files}

    def _swap_in(self, staged: Path, target: Path) -> None:
        old = self._swap_aside(target)
        try:
            os.replace(staged, target)
        except OSError:
            if old is not None:
                os.replace(old, target)
            raise
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _swap_out(self, folder: Path) -> None:
        old = self._swap_aside(folder)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _swap_aside(self, folder: Path) -> Path | None:
        if not folder.exists():
            return None
        self.partial.mkdir(parents=True, exist_ok=True, mode=0o700)
        old = self.partial / f"{folder.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        try:
            os.replace(folder, old)
        except OSError as error:
            raise Conflict(
                f"{folder.name.replace('+', ':')} is in use ({error.strerror}); unload it first"
            ) from error
        return old


def _file_path(folder: Path, file: str, source: Any) -> Path:
    if source == "file":
        path = Path(file)
        if not path.is_absolute():
            raise ValueError("its manifest names a file without a full path")
        return path
    if source != "pulled":
        raise ValueError(f"its manifest has the unknown source {source!r}")
    return folder / _plain_name(file)


def _plain_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise BadModelFile(f"{name[:80]!r} is not a plain name of a GGUF file")
    return name


def _optional_text(value: Any) -> str | None:
    return None if value is None else str(value)


def _not_found(name: str, installed: Sequence[str]) -> str:
    shown = check_name(name) if _valid(name) else name[:80]
    near = difflib.get_close_matches(name, installed, n=3, cutoff=0.3) or list(installed[:5])
    there = f"installed: {', '.join(near)}" if near else "no model is installed yet"
    return f"model {shown!r} is not installed ({there}); see `ingle list`, or `ingle pull NAME`"


def _valid(name: str) -> bool:
    try:
        return bool(check_name(name))
    except NodeError:
        return False


def _lock(file: Any) -> bool:
    """Take an exclusive lock that ends with the process; False when another holds it."""
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
