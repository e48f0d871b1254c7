"""GGUF files that other programs downloaded: Hugging Face's cache, Ollama, LM Studio.

They are only looked at, used where they lie, and never changed. What a manifest of another program
says is taken as a digest of 64 hex digits or not at all, so it cannot point out of its folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from node.errors import NodeError
from node.models.gguf import split_paths
from node.models.names import check_name, name_from_file, slug
from node.models.store import InstalledModel

__all__ = ["discover"]

_DIGEST = re.compile(r"sha256[-:]([0-9a-f]{64})")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_MODEL_LAYER = "application/vnd.ollama.image.model"
_MANIFEST_LIMIT_BYTES = 2**20
_MOST_FILES = 10_000


def discover(
    *, taken: Set[str] = frozenset(), own: Set[Path] = frozenset()
) -> list[InstalledModel]:
    """Models of other programs, each with a name that nothing else has.

    Args:
        taken: names in use; a model found under such a name gets a number behind it.
        own: resolved paths that are known already and left out.
    """
    names, seen = set(taken), set(own)
    models = []
    for model in (*_hugging_face(), *_ollama(), *_lm_studio()):
        real = model.path.resolve()
        if real in seen:
            continue
        seen.add(real)
        name = _unique(model.name, names)
        names.add(name)
        models.append(_renamed(model, name))
    return models


def _hugging_face() -> Iterator[InstalledModel]:
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    root = _folder(cache) if cache else _folder(home) / "hub"
    for repo in _children(root, "models--*"):
        for snapshot in _children(repo / "snapshots", "*"):
            for path in _gguf_files(snapshot):
                # Links of a snapshot lead to blobs of the same repository, or it is not one.
                if not path.resolve().is_relative_to(repo.resolve()):
                    continue
                origin = f"hf:{repo.name.removeprefix('models--').replace('--', '/', 1)}"
                yield from _found(path, "huggingface", f"{origin}/{path.relative_to(snapshot)}")


def _lm_studio() -> Iterator[InstalledModel]:
    for root in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        folder = _folder(root)
        for path in _gguf_files(folder):
            yield from _found(path, "lmstudio", path.relative_to(folder).as_posix())


def _ollama() -> Iterator[InstalledModel]:
    configured = os.environ.get("OLLAMA_MODELS")
    roots = [configured] if configured else ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]
    for root in map(_folder, roots):
        for manifest in _files(root / "manifests"):
            digest = _ollama_digest(manifest)
            if digest is None:
                continue
            blob = root / "blobs" / f"sha256-{digest}"
            name = f"{slug(manifest.parent.name)}:{slug(manifest.name)}"
            origin = manifest.relative_to(root / "manifests").as_posix()
            yield from _found(blob, "ollama", origin, name=name, sha256=digest)


def _ollama_digest(manifest: Path) -> str | None:
    """Digest of the one layer that is the model's GGUF; None when there is none or several."""
    try:
        if manifest.stat().st_size > _MANIFEST_LIMIT_BYTES:
            return None
        layers: Any = json.loads(manifest.read_bytes())["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if len(digests) != 1 or not isinstance(digests[0], str):
        return None
    match = _DIGEST.fullmatch(digests[0])
    return match[1] if match else None


def _found(
    path: Path, source: str, origin: str, name: str | None = None, sha256: str | None = None
) -> Iterator[InstalledModel]:
    """The model that starts with this file, if it is one and all of its parts are there."""
    try:
        files = split_paths(path)
        stats = [file.stat() for file in files]
        name = check_name(name or name_from_file(path.name))
        with open(path, "rb") as opened:
            if opened.read(4) != b"GGUF":
                return
    except (OSError, NodeError):
        return
    yield InstalledModel(
        name=name,
        path=path,
        files=files,
        size_bytes=sum(stat.st_size for stat in stats),
        source=source,
        origin=origin,
        sha256=sha256,
        licence=None,
        created_s=max(stat.st_mtime for stat in stats),
    )


def _gguf_files(root: Path) -> Iterator[Path]:
    for path in _files(root):
        name = path.name.lower()
        if name.endswith(".gguf") and "mmproj" not in name and not _LATER_PART.search(name):
            yield path


def _files(root: Path) -> Iterator[Path]:
    """Files below a folder in a fixed order; links to folders are not followed."""
    count = 0
    for folder, subfolders, names in os.walk(root):
        subfolders.sort()
        for name in sorted(names):
            count += 1
            if count > _MOST_FILES:
                return
            yield Path(folder, name)


def _children(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(child for child in folder.glob(pattern) if child.is_dir())
    except OSError:
        return []


def _folder(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def _unique(name: str, taken: Set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}-{number}", number + 1
    return candidate


def _renamed(model: InstalledModel, name: str) -> InstalledModel:
    from dataclasses import replace

    return replace(model, name=name)
