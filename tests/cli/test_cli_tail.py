"""The end of a log that grows and is rotated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from cli.tail import follow, last_lines


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def next_after(lines: Iterator[str], path: Path, text: str) -> str:
    """`follow` looks where the file ends when it is first asked, so the text comes later."""
    timer = threading.Timer(0.1, append, (path, text))
    timer.start()
    line = next(lines)
    timer.join()
    return line


def test_the_last_lines_are_those_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("one\ntwo\nthree\n")
    assert last_lines(log, 2) == ["two", "three"]
    assert last_lines(log, 0) == []


def test_a_log_is_followed_line_by_line_and_over_a_rotation(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("one\n")
    lines = follow(log)
    assert next_after(lines, log, "two\nhal") == "two"
    assert next_after(lines, log, "f\n") == "half"
    log.write_text("new\n")
    assert next(lines) == "new"
