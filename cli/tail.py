"""The end of a text file that grows, and is now and then replaced by an empty one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

__all__ = ["follow", "last_lines"]

_LOOK_EVERY_S = 0.25


def last_lines(path: Path, count: int) -> list[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        return [line.rstrip("\n") for line in deque(file, maxlen=count)]


def follow(path: Path) -> Iterator[str]:
    """Lines written from now on, for ever; goes on in the new file after a rotation."""
    position = path.stat().st_size
    rest = ""
    while True:
        time.sleep(_LOOK_EVERY_S)
        if not path.exists():
            continue
        if path.stat().st_size < position:
            position, rest = 0, ""
        with path.open("rb") as file:
            file.seek(position)
            new = file.read()
        position += len(new)
        *lines, rest = (rest + new.decode("utf-8", errors="replace")).split("\n")
        yield from lines
