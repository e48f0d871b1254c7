"""What lies in the SSD tier, in SQLite: several processes may use one index at a time.

It only repeats what the files say of themselves, so it may be lost. Every thread has a
connection of its own; `changing` is a transaction that no other process can come between.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import sqlite_utils

from kvcache.blockfile import Entry
from kvcache.keys import BlockHash, Namespace
from kvcache.policy import Piece

__all__ = ["Index", "IndexUnusable", "recorded_bytes"]

_BUSY_S = 30.0
_migrations = sqlite_utils.Migrations("kvcache")
_SCHEMA_VERSION = 1
_COLUMNS = "namespace, hash, parent, kind, start, tokens, size_bytes"


class IndexUnusable(Exception):
    """Damaged, or written by a later version: to be made anew from the files."""


@_migrations()
def entries(db: sqlite_utils.Database) -> None:
    # `written` is 0 while the file is being written: its bytes count already.
    db.executescript(
        """
        CREATE TABLE entries (
            namespace TEXT NOT NULL, hash BLOB NOT NULL, parent BLOB NOT NULL,
            kind TEXT NOT NULL, start INTEGER NOT NULL, tokens BLOB NOT NULL,
            size_bytes INTEGER NOT NULL, file_bytes INTEGER NOT NULL,
            uses INTEGER NOT NULL DEFAULT 0, last_used_s REAL NOT NULL,
            written INTEGER NOT NULL DEFAULT 0,
            PRIMARY KEY (namespace, hash)
        ) WITHOUT ROWID;
        CREATE INDEX entries_parent ON entries (namespace, parent);
        CREATE TABLE totals (files INTEGER NOT NULL, bytes INTEGER NOT NULL);
        INSERT INTO totals VALUES (0, 0);
        CREATE TRIGGER entry_in AFTER INSERT ON entries BEGIN
            UPDATE totals SET files = files + 1, bytes = bytes + NEW.file_bytes;
        END;
        CREATE TRIGGER entry_out AFTER DELETE ON entries BEGIN
            UPDATE totals SET files = files - 1, bytes = bytes - OLD.file_bytes;
        END;
        CREATE TABLE days (day INTEGER PRIMARY KEY, written_bytes INTEGER NOT NULL);
        """
    )


class Index:
    """Raises `sqlite3.Error` from everything; `IndexUnusable` from the constructor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        path.touch(mode=0o600)
        try:
            self._migrate()
        except sqlite3.DatabaseError as error:
            self.close()
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                raise
            raise IndexUnusable(str(error)) from error
        except BaseException:
            self.close()
            raise

    def _migrate(self) -> None:
        db = self._db
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > _SCHEMA_VERSION:
            raise IndexUnusable(f"its version is {version}")
        if version < _SCHEMA_VERSION:
            _migrations.apply(sqlite_utils.Database(db))
            db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        db.execute("SELECT bytes FROM totals").fetchone()
        db.execute(f"SELECT {_COLUMNS}, uses, last_used_s FROM entries LIMIT 1").fetchone()

    @property
    def _db(self) -> sqlite3.Connection:
        known: sqlite3.Connection | None = getattr(self._local, "db", None)
        if known is not None:
            return known
        db = sqlite3.connect(
            self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        with self._lock:
            self._connections.append(db)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 64")  # its bytes count against the cap
        self._local.db = db
        return db

    @contextmanager
    def changing(self) -> Iterator[None]:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")

    def find(self, namespace: Namespace, name: BlockHash) -> Entry | None:
        """Only what has been written to its end."""
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM entries WHERE namespace = ? AND hash = ? AND written",
            (namespace, name),
        )
        return next(map(_entry, rows), None)

    def children(self, namespace: Namespace, parent: BlockHash) -> list[Entry]:
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM entries WHERE namespace = ? AND parent = ? AND written",
            (namespace, parent),
        )
        return [_entry(row) for row in rows]

    def has(self, namespace: Namespace, name: BlockHash) -> bool:
        """Also what is being written."""
        row = self._db.execute(
            "SELECT 1 FROM entries WHERE namespace = ? AND hash = ?", (namespace, name)
        ).fetchone()
        return row is not None

    def is_leaf(self, namespace: Namespace, name: BlockHash) -> bool:
        """Whether the entry is there and nothing hangs on it."""
        row = self._db.execute(
            "SELECT NOT EXISTS (SELECT 1 FROM entries WHERE namespace = ?1 AND parent = ?2)"
            " FROM entries WHERE namespace = ?1 AND hash = ?2",
            (namespace, name),
        ).fetchone()
        return row is not None and bool(row[0])

    def add(self, entry: Entry, now_s: float, *, written: bool) -> None:
        self._db.execute(
            f"INSERT OR IGNORE INTO entries ({_COLUMNS}, file_bytes, last_used_s, written)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                entry.namespace,
                entry.hash,
                entry.parent,
                entry.kind,
                entry.start,
                np.ascontiguousarray(entry.tokens, "<i4").tobytes(),
                entry.size_bytes,
                entry.file_bytes,
                now_s,
                written,
            ),
        )

    def set_written(self, namespace: Namespace, name: BlockHash) -> bool:
        """False when the entry is not there any more."""
        done = self._db.execute(
            "UPDATE entries SET written = 1 WHERE namespace = ? AND hash = ?", (namespace, name)
        )
        return done.rowcount == 1

    def remove(self, namespace: Namespace, name: BlockHash) -> None:
        self._db.execute("DELETE FROM entries WHERE namespace = ? AND hash = ?", (namespace, name))

    def touch(self, used: Iterable[tuple[Namespace, BlockHash]], now_s: float) -> None:
        self._db.executemany(
            "UPDATE entries SET uses = uses + 1, last_used_s = ? WHERE namespace = ? AND hash = ?",
            [(now_s, namespace, name) for namespace, name in used],
        )

    def pieces(self) -> list[Piece]:
        """All that may be evicted."""
        rows = self._db.execute(
            "SELECT namespace, hash, parent, kind, start, file_bytes, uses, last_used_s"
            " FROM entries WHERE written"
        )
        return [Piece(*row) for row in rows]

    def totals(self) -> tuple[int, int]:
        """Files, and their bytes, also of those that are being written."""
        files, n_bytes = self._db.execute("SELECT files, bytes FROM totals").fetchone()
        return files, n_bytes

    def unfinished(self, before_s: float) -> list[tuple[Namespace, BlockHash]]:
        rows = self._db.execute(
            "SELECT namespace, hash FROM entries WHERE NOT written AND last_used_s < ?",
            (before_s,),
        )
        return [(Namespace(namespace), BlockHash(name)) for namespace, name in rows]

    def summary(self) -> list[dict[str, Any]]:
        """A row for every namespace."""
        rows = self._db.execute(
            "SELECT namespace, COUNT(*), SUM(file_bytes), SUM(kind = 'snapshot'), MAX(last_used_s),"
            " SUM(length(tokens) / 4) FROM entries WHERE written GROUP BY namespace"
        )
        names = ("namespace", "files", "bytes", "snapshots", "last_used_s", "tokens")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def written_on(self, day: int) -> int:
        row = self._db.execute("SELECT written_bytes FROM days WHERE day = ?", (day,)).fetchone()
        return int(row[0]) if row else 0

    def note_written(self, day: int, n_bytes: int) -> None:
        self._db.execute(
            "INSERT INTO days VALUES (?, ?) ON CONFLICT (day)"
            " DO UPDATE SET written_bytes = written_bytes + excluded.written_bytes",
            (day, n_bytes),
        )
        self._db.execute("DELETE FROM days WHERE day < ?", (day - 30,))

    def own_bytes(self) -> int:
        """Size of the index itself, with its journal."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                total += self.path.with_name(self.path.name + suffix).stat().st_size
        return total

    def close(self) -> None:
        with self._lock:
            for db in self._connections:
                with suppress(sqlite3.Error):
                    db.close()
            self._connections.clear()


def recorded_bytes(path: Path) -> int:
    """What an index says that all files take; 0 where there is none."""
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db,
    ):
        return int(db.execute("SELECT bytes FROM totals").fetchone()[0])
    return 0


def _entry(row: tuple[Any, ...]) -> Entry:
    namespace, name, parent, kind, start, tokens, size_bytes = row
    return Entry(
        Namespace(namespace),
        BlockHash(name),
        BlockHash(parent),
        kind,
        start,
        np.frombuffer(tokens, "<i4").astype(np.int32),
        size_bytes,
    )
