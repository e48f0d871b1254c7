"""One worker process as asyncio sees it: start it, send commands, hear reports, end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping

from node.engine import frames
from node.engine.messages import Command, Report

__all__ = ["WorkerProcess", "worker_environment"]

logger = logging.getLogger(__name__)

_READ_CHUNK_BYTES = 2**18


def worker_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment a worker starts with.

    libgomp reads both variables when it loads. Threads that spin long fight with every other
    program on the machine, and lose; threads that never spin sleep between two operations and
    decode a small model at a third of the speed. 200 turns cost little either way.
    """
    base = dict(os.environ if environment is None else environment)
    return {**base, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "200"}


class WorkerProcess:
    """A started worker. `on_report` runs in the event loop for every report, in order; `on_exit`
    once, when the process is gone and all its reports have been handed over."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._stderr_tail: deque[str] = deque(maxlen=20)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls, on_report: Callable[[Report], None], on_exit: Callable[[int], None]
    ) -> WorkerProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "node.engine.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=worker_environment(),
            limit=_READ_CHUNK_BYTES,
        )
        self = cls(process)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._read_stderr()),
            loop.create_task(self._read_reports(on_report, on_exit)),
        ]
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_words(self) -> str:
        """What the worker printed last, for the error message."""
        return " | ".join(self._stderr_tail)[-500:]

    def send(self, command: Command) -> None:
        """Queue a command. One sent to a dead worker is lost; `on_exit` tells."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(frames.encode(command))

    async def stop(self, grace_s: float = 12.0) -> None:
        """End the process: close its input, then kill it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _read_reports(
        self, on_report: Callable[[Report], None], on_exit: Callable[[int], None]
    ) -> None:
        stream = self._process.stdout
        assert stream is not None
        buffer = bytearray()
        try:
            while data := await stream.read(_READ_CHUNK_BYTES):
                buffer += data
                for report in _take_frames(buffer):
                    on_report(report)
        except Exception:  # whatever it was, a worker that nobody hears must not live on
            logger.exception("worker %d is not understood", self.pid)
            self.kill()
        on_exit(await self._process.wait())

    async def _read_stderr(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        while not stream.at_eof():
            try:
                line = await stream.readline()
            except ValueError:  # longer than the limit; unread, it would block the worker
                continue
            if text := line.decode(errors="replace").rstrip():
                self._stderr_tail.append(text)
                logger.debug("worker %d: %s", self.pid, text)


def _take_frames(buffer: bytearray) -> list[Report]:
    """Cut whole frames off the front of the buffer."""
    reports: list[Report] = []
    start = 0
    while len(buffer) - start >= frames.HEADER.size:
        (size,) = frames.HEADER.unpack_from(buffer, start)
        end = start + frames.HEADER.size + size
        if end > len(buffer):
            break
        reports.append(frames.decode_report(bytes(buffer[start + frames.HEADER.size : end])))
        start = end
    del buffer[:start]
    return reports
