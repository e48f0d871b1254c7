"""How many requests wait for their first token, and the refusal when too many do."""

from __future__ import annotations

import math
import time

from node.errors import Overloaded

__all__ = ["Gate", "Ticket"]


class Gate:
    """Counts requests in flight. Used from the event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.waiting = 0
        self.running = 0
        self._mean_wait_s = 1.0

    def enter(self) -> Ticket:
        """Raises Overloaded when `limit` requests wait already."""
        if self.waiting >= self._limit:
            # Half the queue is gone after about one mean wait; a minute is the most we ask for.
            retry_after_s = min(60, max(1, math.ceil(self._mean_wait_s)))
            raise Overloaded(
                f"{self.waiting} requests wait already; try again in {retry_after_s} s",
                retry_after_s=retry_after_s,
            )
        self.waiting += 1
        return Ticket(self)

    def note_wait(self, wait_s: float) -> None:
        self._mean_wait_s += 0.1 * (wait_s - self._mean_wait_s)


class Ticket:
    """One request's place: waiting, then running, then gone."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._state = "waiting"
        self._entered_s = time.monotonic()

    def first_token(self) -> None:
        if self._state == "waiting":
            self._gate.waiting -= 1
            self._gate.running += 1
            self._state = "running"
            self._gate.note_wait(time.monotonic() - self._entered_s)

    def leave(self) -> None:
        if self._state == "waiting":
            self._gate.waiting -= 1
        elif self._state == "running":
            self._gate.running -= 1
        self._state = "gone"
