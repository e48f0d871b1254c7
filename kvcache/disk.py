"""The SSD tier: files named by content, an index that can be lost, caps over everything in the
folder. Several processes may use one folder.

    FOLDER/<namespace>/namespace.json         what the state in it depends on
    FOLDER/<namespace>/<hh>/<hash>.kv         see kvcache/blockfile.py
    FOLDER/index.db                           see kvcache/index.py

Trouble with the disk is never raised: it is counted by reason, and the answer is "not there".
Safe to use from several threads.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import numpy.typing as npt

from kvcache import blockfile, upkeep
from kvcache.blockfile import BadFile, Entry, file_path
from kvcache.index import Index, IndexUnusable, recorded_bytes
from kvcache.keys import BlockHash, Namespace
from kvcache.policy import Admission, Piece, eviction_order

__all__ = ["DiskLimits", "DiskTier", "used_bytes"]

logger = logging.getLogger(__name__)

Blob = npt.NDArray[np.uint8]

_LOCK_S = 60.0
_INDEX_MARGIN_BYTES = 256 * 2**10  # what one change may add to the index and its journal
_HOT_SHARE = 0.8  # of the bytes a day; the rest is for state that has been used again
_ORDER_SHARE = 8  # an eviction order is used for this part of the files, then made anew
_LEAST_ORDER = 16
_DAY_S = 86_400
_INDEX = "index.db"
_TOUCH_EVERY = 64


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Bytes of all files together; bytes that stay free on the volume; bytes written in a day.
    `read_bytes_per_s` slows reads down, to try what a slower disk would do; 0 does not."""

    max_bytes: int
    free_floor_bytes: int = 0
    write_bytes_per_day: int = 10**15
    read_bytes_per_s: float = 0.0


def used_bytes(folder: Path) -> int:
    """What the files of a folder take, by its index."""
    return recorded_bytes(folder / _INDEX)


class DiskTier:
    """Args:
    clock: seconds since the epoch.
    free_bytes: of the volume that holds the folder.
    """

    def __init__(
        self,
        folder: Path,
        limits: DiskLimits,
        clock: Callable[[], float] = time.time,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.folder = folder
        self.limits = limits
        self.reasons: Counter[str] = Counter()
        self._clock = clock
        self._free_bytes = free_bytes or (lambda: shutil.disk_usage(folder).free)
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._used: list[tuple[Namespace, BlockHash]] = []
        self._order: deque[Piece] = deque()
        self._admission = Admission(limits.max_bytes // 2)
        self._index: Index | None = None
        with self._trouble("open"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open_index()

    def __repr__(self) -> str:
        return f"DiskTier({self.folder}, max_bytes={self.limits.max_bytes})"

    # Look

    def find(self, namespace: Namespace, name: BlockHash) -> Entry | None:
        with self._trouble("index"):
            return self._index.find(namespace, name) if self._index else None
        return None

    def children(self, namespace: Namespace, parent: BlockHash) -> list[Entry]:
        with self._trouble("index"):
            return self._index.children(namespace, parent) if self._index else []
        return []

    def read(self, entry: Entry) -> Blob | None:
        """The state, after its checksum and identity were verified; shape (size_bytes,). A bad
        file is deleted; None then, and when it cannot be read."""
        path = self._path(entry)
        started = time.monotonic()
        try:
            payload = blockfile.read(path, entry)
        except BadFile as error:
            logger.warning("deleted: %s", error)
            self._count("bad_file")
            self._forget(entry.namespace, entry.hash)
            return None
        except FileNotFoundError:
            self._count("file_gone")
            self._forget(entry.namespace, entry.hash)
            return None
        except OSError as error:
            self._note(error, "read")
            return None
        self._brake(started, entry.file_bytes)
        with self._lock:
            self._counters["read_bytes"] += entry.file_bytes
            self._used.append((entry.namespace, entry.hash))
            due = len(self._used) >= _TOUCH_EVERY
        if due:
            self._touch()
        return payload

    # Change

    def describe(self, namespace: Namespace, what: dict[str, object]) -> None:
        """Write `namespace.json` once."""
        path = self.folder / namespace / "namespace.json"
        if path.exists():
            return
        with self._trouble("describe"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}.tmp")
            draft.touch(mode=0o600)
            draft.write_text(json.dumps(what, indent=1))
            draft.replace(path)

    def write(
        self,
        entry: Entry,
        payload: Blob,
        supersedes: BlockHash | None = None,
        priority: float = 0.0,
    ) -> str:
        """Keep a piece of state; older state goes first where there is no room.

        Args:
            supersedes: the shorter piece that this one contains.
            priority: above 0 for what has been used again.

        Returns:
            "stored", "present", or why not: "narrow", "too_big", "no_space", "write_budget",
            "failed".
        """
        outcome = "failed"
        with self._trouble("write"):
            if self._index is None:
                return "failed"
            outcome = self._reserve(self._index, entry, priority)
            if outcome == "stored":
                self._write_reserved(self._index, entry, payload, supersedes)
        if outcome not in ("stored", "present"):
            self._count(outcome)
        return outcome

    def _reserve(self, index: Index, entry: Entry, priority: float) -> str:
        """Make room and claim it, in one transaction over all processes."""
        now_s = self._clock()
        day = int(now_s // _DAY_S)
        with self._lock, index.changing():
            if index.has(entry.namespace, entry.hash):
                return "present"
            if priority <= 0 and not self._admission.allows(entry.hash):
                return "narrow"
            budget = self.limits.write_bytes_per_day * (1.0 if priority > 0 else _HOT_SHARE)
            if index.written_on(day) + entry.file_bytes > budget:
                return "write_budget"
            index.touch(self._used, now_s)
            self._used.clear()
            room = self._make_room(index, entry.file_bytes, behind=entry.parent)
            if room:
                return room
            index.add(entry, now_s, written=False)
            index.note_written(day, entry.file_bytes)
            return "stored"

    def _make_room(self, index: Index, n_bytes: int, behind: bytes = b"") -> str:
        """Evict, and delete the files, before anything is written; the reason when it cannot be.
        What the new piece lies behind stays."""
        _, used_bytes = index.totals()
        most = self.limits.max_bytes - index.own_bytes() - _INDEX_MARGIN_BYTES
        if n_bytes > most:
            return "too_big"
        missing = max(
            used_bytes + n_bytes - most,
            n_bytes + _INDEX_MARGIN_BYTES + self.limits.free_floor_bytes - self._free_bytes(),
        )
        if missing > used_bytes:
            return "no_space"
        while missing > 0:
            piece = self._next_victim(index, behind)
            if piece is None:
                return "no_space"
            missing -= self._evict(index, piece)
        return ""

    def _next_victim(self, index: Index, behind: bytes) -> Piece | None:
        """Of an order made a while ago, so one on which something hangs by now is passed over."""
        for _ in range(2):
            while self._order:
                piece = self._order.popleft()
                namespace, name = Namespace(piece.namespace), BlockHash(piece.hash)
                if piece.hash != behind and index.is_leaf(namespace, name):
                    return piece
            order = eviction_order(index.pieces(), self._clock())
            self._order.extend(order[: max(_LEAST_ORDER, len(order) // _ORDER_SHARE)])
        return None

    def _evict(self, index: Index, piece: Piece) -> int:
        namespace, name = Namespace(piece.namespace), BlockHash(piece.hash)
        index.remove(namespace, name)
        file_path(self.folder, namespace, name).unlink(missing_ok=True)
        self._counters["evicted"] += 1
        self._counters["evicted_unread_bytes"] += 0 if piece.uses else piece.file_bytes
        self._admission.note_evicted(piece.file_bytes, unread=not piece.uses)
        return piece.file_bytes

    def _write_reserved(
        self, index: Index, entry: Entry, payload: Blob, supersedes: BlockHash | None
    ) -> None:
        try:
            blockfile.write(self.folder, entry, payload)
        except BaseException:
            with index.changing():
                index.remove(entry.namespace, entry.hash)
            raise
        with index.changing():
            if not index.set_written(entry.namespace, entry.hash):
                self._path(entry).unlink(missing_ok=True)  # purged meanwhile
                return
            if supersedes is not None:
                index.remove(entry.namespace, supersedes)
                file_path(self.folder, entry.namespace, supersedes).unlink(missing_ok=True)
        with self._lock:
            self._counters["stored"] += 1
            self._counters["written_bytes"] += entry.file_bytes

    def _forget(self, namespace: Namespace, name: BlockHash) -> None:
        with self._trouble("index"):
            file_path(self.folder, namespace, name).unlink(missing_ok=True)
            if self._index is not None:
                with self._index.changing():
                    self._index.remove(namespace, name)

    def _touch(self) -> None:
        with self._trouble("index"), self._lock:
            if self._index is not None and self._used:
                with self._index.changing():
                    self._index.touch(self._used, self._clock())
                self._used.clear()

    # Care

    def purge(self, namespace: str = "") -> int:
        """Delete all state, or that of one namespace.

        Returns:
            How many files went.
        """
        folders = [self.folder / namespace] if namespace else upkeep.namespace_folders(self.folder)
        gone = 0
        with self._trouble("purge"):
            for folder in folders:
                for path in upkeep.files(folder):
                    self._forget(Namespace(folder.name), BlockHash(bytes.fromhex(path.stem)))
                    gone += 1
                shutil.rmtree(folder, ignore_errors=True)
        return gone

    def verify(self, show: Callable[[int, int], None] | None = None) -> dict[str, int]:
        """Read every file and check it; bad ones are deleted.

        Args:
            show: told the files done and the files in all.
        """
        paths = [p for f in upkeep.namespace_folders(self.folder) for p in upkeep.files(f)]
        counts = {"files": len(paths), "good": 0, "bad": 0, "unreadable": 0}
        for i, path in enumerate(paths):
            verdict = upkeep.check(path)
            counts[verdict] += 1
            if verdict == "bad":
                with suppress(ValueError):
                    name = BlockHash(bytes.fromhex(path.stem))
                    self._forget(Namespace(path.parent.parent.name), name)
            if show is not None:
                show(i + 1, len(paths))
        return counts

    def gc(self) -> dict[str, int]:
        """Make folder and index agree: drafts of writers that died and entries without a file go,
        files without an entry are taken up, and what is over the caps is evicted."""
        counts = {"drafts": 0, "entries": 0, "found": 0, "evicted": 0}
        with self._trouble("gc"):
            if self._index is None:
                return counts
            counts["drafts"] = upkeep.remove_drafts(self.folder)
            upkeep.settle_unfinished(self.folder, self._index, self._clock())
            counts["entries"] = upkeep.remove_lost_entries(self.folder, self._index)
            counts["found"] = self._take_up_files(self._index)
            before = self._counters["evicted"]
            with self._lock, self._index.changing():
                self._make_room(self._index, 0)
            counts["evicted"] = self._counters["evicted"] - before
        return counts

    def stats(self) -> dict[str, Any]:
        """Bytes of all files, limits, counters, and why things were not kept or found."""
        files = n_bytes = today_bytes = 0
        with self._trouble("index"):
            if self._index is not None:
                files, n_bytes = self._index.totals()
                n_bytes += self._index.own_bytes()
                today_bytes = self._index.written_on(int(self._clock() // _DAY_S))
        with self._lock:
            counters = {name: self._counters[name] for name in _COUNTERS}
        return {
            "path": str(self.folder),
            "files": files,
            "bytes": n_bytes,
            "capacity_bytes": self.limits.max_bytes,
            "free_floor_bytes": self.limits.free_floor_bytes,
            "written_today_bytes": today_bytes,
            "write_bytes_per_day": self.limits.write_bytes_per_day,
            "narrow": self._admission.narrow,
            **counters,
            "reasons": dict(self.reasons),
        }

    def namespaces(self) -> list[dict[str, Any]]:
        """A row for every namespace: files, bytes, tokens, when last used, and what it is for."""
        rows: list[dict[str, Any]] = []
        with self._trouble("index"):
            if self._index is not None:
                rows = self._index.summary()
        for row in rows:
            row["identity"] = {}
            with suppress(OSError, ValueError):
                path = self.folder / row["namespace"] / "namespace.json"
                row["identity"] = json.loads(path.read_text())
        return rows

    def close(self) -> None:
        self._touch()
        if self._index is not None:
            self._index.close()

    # The index

    def _open_index(self) -> None:
        """Under a lock between processes, so that only one of them makes it anew."""
        path = self.folder / _INDEX
        with filelock.FileLock(self.folder / "index.lock", timeout=_LOCK_S, mode=0o600):
            new = not path.exists()
            try:
                self._index = Index(path)
            except IndexUnusable as error:
                logger.warning("%s: %s; it is made anew from the files", path, error)
                self._count("index_rebuilt")
                for suffix in ("", "-wal", "-shm"):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
                self._index, new = Index(path), True
            if new:
                upkeep.remove_drafts(self.folder)
                self._take_up_files(self._index)
            else:
                upkeep.settle_unfinished(self.folder, self._index, self._clock())

    def _take_up_files(self, index: Index) -> int:
        found, bad = upkeep.take_up_files(self.folder, index)
        with self._lock:
            self.reasons["bad_file"] += bad
        return found

    # Small things

    def _path(self, entry: Entry) -> Path:
        return file_path(self.folder, entry.namespace, entry.hash)

    def _brake(self, started: float, n_bytes: int) -> None:
        if self.limits.read_bytes_per_s > 0:
            took_s = time.monotonic() - started
            time.sleep(max(0.0, n_bytes / self.limits.read_bytes_per_s - took_s))

    def _count(self, reason: str) -> None:
        with self._lock:
            self.reasons[reason] += 1

    def _note(self, error: Exception, where: str) -> None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "disk_full" if full else f"{where}_failed"
        if self.reasons[reason] == 0:
            logger.warning("the KV cache on disk: %s: %s", reason, error)
        self.reasons[reason] += 1

    @contextmanager
    def _trouble(self, where: str) -> Iterator[None]:
        """What goes wrong with disk or index costs time, never a request."""
        try:
            yield
        except (OSError, sqlite3.Error, IndexUnusable) as error:
            self._note(error, where)
            damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(
                error, sqlite3.OperationalError
            )
            if damaged and where != "open":
                self._renew_index()

    def _renew_index(self) -> None:
        """The index was damaged while in use."""
        if self._index is not None:
            self._index.close()
            self._index = None
        with self._trouble("open"):
            self._open_index()


_COUNTERS = ("stored", "written_bytes", "read_bytes", "evicted", "evicted_unread_bytes")
