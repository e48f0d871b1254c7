"""Threads that move state to and from the disk: loads before stores, stores may be dropped."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["IOPool"]

logger = logging.getLogger(__name__)

_NICENESS = 10  # below the threads that compute


class IOPool:
    """Args:
    n_threads: how many jobs run at once.
    max_store_bytes: stores that wait beyond this are refused.
    """

    def __init__(self, n_threads: int, max_store_bytes: int) -> None:
        self._max_store_bytes = max_store_bytes
        self._loads: deque[Callable[[], None]] = deque()
        self._stores: deque[tuple[Callable[[], None], int]] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False
        self.waiting_store_bytes = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-io-{i}", daemon=True)
            for i in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._loads.append(job)
            self._changed.notify()

    def store(self, job: Callable[[], None], n_bytes: int) -> bool:
        """False when too much is waiting already; the job will not run."""
        with self._changed:
            if self._closed or self.waiting_store_bytes + n_bytes > self._max_store_bytes:
                return False
            self._stores.append((job, n_bytes))
            self.waiting_store_bytes += n_bytes
            self._changed.notify()
            return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing waits or runs; false when the time was not enough."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._loads or self._stores or self._running),
                max(0.0, deadline - time.monotonic()),
            )

    def close(self) -> None:
        """Ends the threads after the jobs they are at; what still waits is dropped."""
        with self._changed:
            self._closed = True
            self._loads.clear()
            self._stores.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._loads or self._stores or self._closed)
                if self._closed:
                    return
                if self._loads:
                    job, n_bytes = self._loads.popleft(), 0
                else:
                    job, n_bytes = self._stores.popleft()
                self._running += 1
            try:
                job()
            except Exception:  # a cache fault never ends the thread that others need
                logger.exception("a KV cache job failed")
            with self._changed:
                self._running -= 1
                self.waiting_store_bytes -= n_bytes
                self._changed.notify_all()
