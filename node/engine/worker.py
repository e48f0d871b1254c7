"""The worker process: reads commands from stdin, runs the engine loop, writes reports to stdout.

Started as `python -m node.engine.worker` by the supervisor, which sets the OpenMP variables in
its environment before llama.cpp loads. It ends when stdin ends, so it never outlives the daemon.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from node.engine import frames
from node.engine.core import EngineCore
from node.engine.llama import LoadError
from node.engine.messages import (
    Cancel,
    Command,
    Detokenize,
    Fail,
    FlushCache,
    Load,
    LoadFailed,
    PurgeCache,
    Ready,
    Reply,
    Report,
    StatsRequest,
    Submit,
    Tokenize,
)
from node.engine.request import Request
from node.hardware import OthersLoad, detect_hardware

logger = logging.getLogger(__name__)

_THREADS_EVERY_S = 1.0
_FIRST_LOOK_S = 0.3
_PAUSE_S, _LONG_PAUSE_S = 0.05, 1.0
_LOOK_EVERY_S = 0.02
_FLUSH_S = 8.0  # at the end; less than the supervisor waits


class Pipe:
    """Reports out; any thread may send."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, report: Report) -> None:
        data = frames.encode(report)
        with self._lock:
            self._stream.write(data)
            self._stream.flush()


class ThreadPlan:
    """Follows the machine's load: threads = cores less those that other programs keep busy.

    More threads than free cores make every step wait for the slowest of them. The daemon's own
    work comes and goes with ours and is not counted; neither is a core that is busy by less than
    two thirds.
    """

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self._cores = max(1, detect_hardware().cpu_cores)
        self._others = OthersLoad()
        self._own_pids = (os.getpid(), os.getppid())
        self._busy_cores = 0.0
        self._next_look = 0.0

    def wake(self, idle_s: float) -> None:
        """Work begins after a pause: the load is measured anew, from now. What others did in the
        pause says nothing of now; after a long one, neither does what they did before it."""
        if self._fixed is not None or idle_s < _PAUSE_S:
            return
        if idle_s >= _LONG_PAUSE_S:
            self._busy_cores = 0.0
        self._others = OthersLoad()
        self._others.busy_cores(self._own_pids)
        self._next_look = time.monotonic() + _FIRST_LOOK_S

    def threads(self) -> int:
        if self._fixed is not None:
            return self._fixed
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _THREADS_EVERY_S
            self._busy_cores = self._others.busy_cores(self._own_pids)
        return max(1, self._cores - int(self._busy_cores + 1 / 3))


def main() -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the daemon's business
    commands, pipe = _take_over_stdio()
    body = frames.read_frame(commands)
    if body is None:
        return 0
    load = frames.decode_command(body)
    assert isinstance(load, Load), "the first command must be Load"
    plan = ThreadPlan(load.threads)
    actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    try:
        core = EngineCore(load, plan.threads(), on_loaded=lambda: actions.put(_look_again))
    except LoadError as error:
        pipe.send(LoadFailed("memory" if error.memory else "model", str(error)))
        return 1
    pipe.send(Ready(core.info))
    threading.Thread(
        target=_read_commands, args=(commands, core, pipe, actions), name="reader", daemon=True
    ).start()
    _run(core, pipe, actions, plan)
    core.close(_FLUSH_S)
    return 0


def _take_over_stdio() -> tuple[BinaryIO, Pipe]:
    """The pipe for ourselves; whatever a library prints goes to stderr."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    commands = os.fdopen(os.dup(0), "rb")
    return commands, Pipe(out)


def _run(
    core: EngineCore,
    pipe: Pipe,
    actions: queue.SimpleQueue[Callable[[], None] | None],
    plan: ThreadPlan,
) -> None:
    while True:
        # One step: drain messages, follow the load, compute, hand over, keep.
        if not core.busy:
            since = time.monotonic()
            action = actions.get()
            plan.wake(time.monotonic() - since)
            if action is None:
                return
            action()
        while not actions.empty():
            action = actions.get()
            if action is None:
                return
            action()
        threads = plan.threads()
        if threads != core.context.threads:
            core.context.set_threads(threads)
        step = core.step()
        if step.deltas or step.finished or step.failed:
            pipe.send(step)
        if not core.tidy():  # all that waits, waits for the disk
            with contextlib.suppress(queue.Empty):
                action = actions.get(timeout=_LOOK_EVERY_S)
                if action is None:
                    return
                action()


def _look_again() -> None:
    """Only wakes the loop."""


def _read_commands(
    commands: BinaryIO,
    core: EngineCore,
    pipe: Pipe,
    actions: queue.SimpleQueue[Callable[[], None] | None],
) -> None:
    """Reader thread: tokenises and compiles here, so that the engine loop does not wait."""
    try:
        while (body := frames.read_frame(commands)) is not None:
            action = _action(frames.decode_command(body), core, pipe)
            if action is not None:
                actions.put(action)
    finally:  # deaf, the worker must end: the daemon is gone, or starts another
        actions.put(None)


def _action(command: Command, core: EngineCore, pipe: Pipe) -> Callable[[], None] | None:
    match command:
        case Submit():
            prepared = _prepare(command, core)
            return lambda: core.submit(prepared)
        case Cancel(request_id):
            return lambda: core.cancel(request_id)
        case StatsRequest(call_id):
            return lambda: pipe.send(core.stats(call_id))
        case FlushCache(call_id):
            return lambda: pipe.send(Reply(call_id, (int(core.flush(_FLUSH_S)),)))
        case PurgeCache(call_id, namespace):
            return lambda: pipe.send(Reply(call_id, (int(core.purge(namespace)),)))
        case Tokenize(call_id, text, add_special, parse_special):
            tokens = core.model.tokenize(text, add_special=add_special, parse_special=parse_special)
            pipe.send(Reply(call_id, tuple(tokens.tolist())))
        case Detokenize(call_id, token_ids):
            data = b"".join(
                core.model.piece(token, special=True)
                for token in token_ids
                if 0 <= token < core.model.n_vocab
            )
            pipe.send(Reply(call_id, text=data.decode("utf-8", errors="replace")))
        case Load():
            logger.error("a second Load was ignored")
    return None


def _prepare(submit: Submit, core: EngineCore) -> Request | Fail:
    try:
        return core.prepare(submit)
    except Exception as error:  # one bad request must not end the reader for all others
        logger.exception("request %d could not be prepared", submit.request_id)
        return Fail(submit.request_id, "engine_error", f"the request was not understood: {error}")


if __name__ == "__main__":
    sys.exit(main())
