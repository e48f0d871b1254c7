"""Whether a daemon lives in a home, asked of the lock it holds; a stale file cannot mislead."""

from __future__ import annotations

import sys
from typing import IO

from node.paths import NodePaths

__all__ = ["lock_is_held"]


def lock_is_held(paths: NodePaths) -> bool:
    """Whether a daemon lives in this home. The system drops the lock however a process ends."""
    try:
        file = (paths.runtime / "daemon.lock").open("r+")
    except OSError:
        return False
    with file:
        return not _try_lock(file)


def _try_lock(file: IO[str]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
