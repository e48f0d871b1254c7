"""Makes the folder of the SSD tier and its index agree again, after a crash or a loss.

Raises from everything: OSError, sqlite3.Error.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path

from kvcache import blockfile
from kvcache.blockfile import BadFile, file_path
from kvcache.index import Index
from kvcache.keys import BlockHash, Namespace

__all__ = [
    "check",
    "files",
    "namespace_folders",
    "remove_drafts",
    "remove_lost_entries",
    "settle_unfinished",
    "take_up_files",
]

logger = logging.getLogger(__name__)

_STALE_S = 60.0  # no write takes so long


def namespace_folders(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [p for p in folder.iterdir() if len(p.name) == 32 and p.is_dir()]
    return []


def files(namespace_folder: Path) -> list[Path]:
    return list(namespace_folder.glob(f"*/*{blockfile.SUFFIX}"))


def check(path: Path) -> str:
    """ "good", "unreadable", or "bad"; then it was deleted."""
    try:
        blockfile.read(path, blockfile.read_entry(path))
    except BadFile as error:
        logger.warning("deleted: %s", error)
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return "bad"
    except OSError:
        return "unreadable"
    return "good"


def settle_unfinished(folder: Path, index: Index, now_s: float) -> None:
    """Entries whose writer died: the file is there in full, or not at all."""
    for namespace, name in index.unfinished(now_s - _STALE_S):
        whole = file_path(folder, namespace, name).exists()
        with index.changing():
            if whole:
                index.set_written(namespace, name)
            else:
                index.remove(namespace, name)


def take_up_files(folder: Path, index: Index) -> tuple[int, int]:
    """Enter files that the index does not know, delete bad ones; returns how many of each."""
    found = bad = 0
    for namespace_folder in namespace_folders(folder):
        with index.changing():
            for path in files(namespace_folder):
                try:
                    found += _take_up(index, path)
                except BadFile as error:
                    logger.warning("deleted: %s", error)
                    path.unlink(missing_ok=True)
                    bad += 1
    return found, bad


def _take_up(index: Index, path: Path) -> bool:
    entry = blockfile.read_entry(path)
    if entry.namespace != path.parent.parent.name:
        raise BadFile(f"{path}: it belongs to another namespace")
    if index.find(entry.namespace, entry.hash) is not None:
        return False
    index.remove(entry.namespace, entry.hash)
    index.add(entry, path.stat().st_mtime, written=True)
    return True


def remove_lost_entries(folder: Path, index: Index) -> int:
    """Entries whose file is gone."""
    lost = [
        (Namespace(piece.namespace), BlockHash(piece.hash))
        for piece in index.pieces()
        if not file_path(folder, Namespace(piece.namespace), BlockHash(piece.hash)).exists()
    ]
    with index.changing():
        for namespace, name in lost:
            index.remove(namespace, name)
    return len(lost)


def remove_drafts(folder: Path) -> int:
    """What writers left that died in the middle of a file."""
    n, now_s = 0, time.time()
    for path in [*folder.glob("*/*/*.tmp"), *folder.glob("*/*.tmp")]:
        with suppress(OSError):
            if now_s - path.stat().st_mtime > _STALE_S:
                path.unlink()
                n += 1
    return n
