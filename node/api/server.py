"""Uvicorn as a node runs it: its settings, our signals, and a shutdown that ends every stream."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

__all__ = ["NodeServer"]

_IDLE_CONNECTION_S = 75
_LAST_WORDS_S = 5


class NodeServer(uvicorn.Server):
    """Stops accepting, lets streams finish for `grace_s`, then calls `on_deadline`, which must
    make those that are left fail; they still get to say so to their clients.

    The first signal stops gently, the second at once.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        on_started: Callable[[], None],
        on_deadline: Callable[[], Awaitable[None]],
        grace_s: float,
    ) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_IDLE_CONNECTION_S,
            timeout_graceful_shutdown=round(grace_s) + _LAST_WORDS_S,
        )
        super().__init__(config)
        self._on_started = on_started
        self._on_deadline = on_deadline
        self._grace_s = grace_s
        self.interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        deadline = asyncio.create_task(self._end_streams())
        try:
            await super().shutdown(sockets=sockets)
        finally:
            deadline.cancel()
            await asyncio.gather(deadline, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Uvicorn's own version raises the signal again afterwards, past our clean-up.
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _end_streams(self) -> None:
        await asyncio.sleep(self._grace_s)
        await self._on_deadline()

    def _stop(self, number: int, _: FrameType | None) -> None:
        self.interrupted = number == signal.SIGINT
        self.force_exit = self.should_exit
        self.should_exit = True
