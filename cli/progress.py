"""Progress of downloads on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cli.output import say, size

if TYPE_CHECKING:
    from node.models import Progress

__all__ = ["download_bar"]

_LINE_EVERY_S = 5.0


@contextmanager
def download_bar() -> Iterator[Callable[[Progress], None]]:
    """Yields what `node.models.pull` calls with its progress."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich import progress
    from rich.console import Console

    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bars:
        tasks: dict[str, progress.TaskID] = {}

        def show(step: Progress) -> None:
            if step.what not in tasks:
                tasks[step.what] = bars.add_task(step.what, total=step.total_bytes)
            bars.update(tasks[step.what], completed=step.done_bytes, total=step.total_bytes)

        yield show


class _Lines:
    """One line at the start of each thing, then every few seconds."""

    def __init__(self) -> None:
        self._what = ""
        self._next_s = 0.0

    def __call__(self, step: Progress) -> None:
        if step.what == self._what and time.monotonic() < self._next_s:
            return
        self._what, self._next_s = step.what, time.monotonic() + _LINE_EVERY_S
        total = f" of {size(step.total_bytes)}" if step.total_bytes else ""
        say(f"{step.what}: {size(step.done_bytes)}{total}")
