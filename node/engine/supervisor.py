"""Keeps one model's worker alive and hides its crashes from the requests it serves.

A worker that dies is started again with back-off; its requests are submitted again behind the
tokens they had reached. A request that was in two crashes is then run alone; if the worker dies
once more, that request fails and the others go on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from node.engine.base import GenerateRequest
from node.engine.messages import (
    Cancel,
    Command,
    Delta,
    Detokenize,
    Fail,
    Finish,
    FlushCache,
    Load,
    LoadFailed,
    ModelInfo,
    PurgeCache,
    Ready,
    Reply,
    Report,
    Resume,
    Stats,
    StatsRequest,
    Step,
    Submit,
    Tokenize,
)
from node.engine.process import WorkerProcess
from node.errors import (
    ContextLengthExceeded,
    EngineError,
    InvalidRequest,
    NodeError,
    NoSpace,
    Unavailable,
)

__all__ = ["EngineSupervisor"]

logger = logging.getLogger(__name__)

_MAX_CRASHES = 3
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)
_STABLE_AFTER_S = 60.0
_MAX_FAILED_STARTS = 5


class _Active:
    """A request in flight, with what is needed to submit it again."""

    def __init__(self, request_id: int, request: GenerateRequest) -> None:
        self.id = request_id
        self.request = request
        self.events: asyncio.Queue[Delta | Finish | NodeError] = asyncio.Queue()
        self.tokens: list[int] = []
        self.emitted_chars = 0
        self.crashes = 0
        self.submitted = False

    def submit(self) -> Submit:
        self.submitted = True
        resume = Resume(tuple(self.tokens), self.emitted_chars) if self.tokens else None
        fields = {name: getattr(self.request, name) for name in self.request.__struct_fields__}
        return Submit(request_id=self.id, resume=resume, **fields)


class EngineSupervisor:
    """Implements `node.engine.base.Engine` over a worker process.

    All state belongs to the event loop it was started on.

    Args:
        plans: the load messages to try in turn when memory does not suffice.
        load_timeout_s: longest time one attempt may take.
        on_failure: called when the worker cannot be brought back; the engine is then dead.
    """

    def __init__(
        self,
        plans: Callable[[Load], Load | None],
        load: Load,
        load_timeout_s: float,
        on_failure: Callable[[NodeError], None] | None = None,
    ) -> None:
        self._smaller = plans
        self.load = load
        self._load_timeout_s = load_timeout_s
        self._on_failure = on_failure
        self._worker: WorkerProcess | None = None
        self._info: ModelInfo | None = None
        self._started: asyncio.Future[Ready | LoadFailed] | None = None
        self._active: dict[int, _Active] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._closing = False
        self._dead: NodeError | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._ready_at = 0.0
        self._recent_crashes = 0
        self.restarts = 0

    def __repr__(self) -> str:
        return f"EngineSupervisor(pid={self.pid}, active={len(self._active)}, {self.state})"

    @property
    def state(self) -> str:
        """ready, restarting, loading or dead."""
        if self._dead is not None:
            return "dead"
        if self._worker is not None and self._ready:
            return "ready"
        return "restarting" if self._info is not None else "loading"

    @property
    def pid(self) -> int | None:
        return self._worker.pid if self._worker is not None else None

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "the engine has not been started"
        return self._info

    async def start(self) -> None:
        """Load the model, with ever smaller plans while memory does not suffice.

        Raises:
            NoSpace: no plan fits. EngineError: the model cannot be loaded.
        """
        while True:
            outcome = await self._start_worker()
            if isinstance(outcome, Ready):
                self._info = outcome.info
                return
            smaller = self._smaller(self.load) if outcome.kind == "memory" else None
            if smaller is None:
                if outcome.kind == "memory":
                    raise NoSpace(f"not enough memory for this model: {outcome.message}")
                raise EngineError(f"the model could not be loaded: {outcome.message}")
            logger.warning("load failed (%s); trying a smaller plan", outcome.message)
            self.load = smaller

    async def close(self) -> None:
        """Stop the worker; requests still in flight fail."""
        self._closing = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        self._dead = self._dead or Unavailable("the model is being unloaded")
        self._fail_all(self._dead)
        if self._worker is not None:
            await self._worker.stop()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta | Finish, None]:
        """See `Engine.generate`."""
        if self._dead is not None:
            raise self._dead
        active = _Active(next(self._ids), request)
        self._active[active.id] = active
        try:
            self._submit_waiting()
            while True:
                event = await active.events.get()
                if isinstance(event, NodeError):
                    raise event
                yield event
                if isinstance(event, Finish):
                    return
        finally:
            if self._active.pop(active.id, None) is not None:
                self._cancel(active)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        reply = await self._call(
            lambda call_id: Tokenize(call_id, text, add_special, parse_special)
        )
        return list(reply.tokens)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        reply = await self._call(lambda call_id: Detokenize(call_id, tuple(tokens)))
        return str(reply.text)

    async def stats(self) -> Stats:
        stats = await self._call(StatsRequest)
        assert isinstance(stats, Stats)
        return stats

    async def flush_cache(self) -> bool:
        """Bring everything computed to the disk; false when that took too long."""
        reply: Reply = await self._call(FlushCache)
        return bool(reply.tokens[0])

    async def purge_cache(self, namespace: str) -> bool:
        """Forget computed state in memory, or that of one namespace; false as `flush_cache`."""
        reply: Reply = await self._call(lambda call_id: PurgeCache(call_id, namespace))
        return bool(reply.tokens[0])

    async def _call(self, command: Callable[[int], Command]) -> Any:
        if self._dead is not None:
            raise self._dead
        if self._worker is None or not self._ready:
            raise Unavailable("the model is being restarted; try again in a moment")
        call_id = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._worker.send(command(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    @property
    def _ready(self) -> bool:
        return self._started is not None and self._started.done()

    async def _start_worker(self) -> Ready | LoadFailed:
        loop = asyncio.get_running_loop()
        started: asyncio.Future[Ready | LoadFailed] = loop.create_future()
        self._started = started
        try:
            worker = await WorkerProcess.start(self._on_report, self._on_exit)
        except OSError as error:
            raise EngineError(f"the engine's process could not be started: {error}") from error
        self._worker = worker
        worker.send(self.load)
        try:
            outcome = await asyncio.wait_for(asyncio.shield(started), self._load_timeout_s)
        except TimeoutError:
            outcome = LoadFailed("model", f"loading took longer than {self._load_timeout_s:g} s")
        except asyncio.CancelledError:
            worker.kill()
            await worker.stop()
            raise
        if isinstance(outcome, LoadFailed):
            self._worker = None
            await worker.stop()
        else:
            self._ready_at = time.monotonic()
        return outcome

    def _on_report(self, report: Report) -> None:
        match report:
            case Step(deltas, finished, failed):
                for delta in deltas:
                    self._on_delta(delta)
                for finish in finished:
                    self._end(finish.request_id, finish)
                for fail in failed:
                    self._end(fail.request_id, _error(fail))
            case Reply(call_id) | Stats(call_id):
                future = self._calls.get(call_id)
                if future is not None and not future.done():
                    future.set_result(report)
            case Ready() | LoadFailed():
                assert self._started is not None
                if not self._started.done():
                    self._started.set_result(report)

    def _on_delta(self, delta: Delta) -> None:
        active = self._active.get(delta.request_id)
        if active is not None:
            active.tokens.extend(delta.tokens)
            active.emitted_chars += len(delta.text)
            active.events.put_nowait(delta)

    def _end(self, request_id: int, event: Finish | NodeError) -> None:
        active = self._active.pop(request_id, None)
        if active is not None:
            active.events.put_nowait(event)
            self._submit_waiting()

    def _cancel(self, active: _Active) -> None:
        if active.submitted and self._worker is not None:
            self._worker.send(Cancel(active.id))
        self._submit_waiting()

    def _submit_waiting(self) -> None:
        """Hand over what the worker does not have yet. While suspects are about, only the first
        of them, so that the next crash has one author."""
        if self._worker is None or not self._ready or self._closing:
            return
        suspects = [a for a in self._active.values() if a.crashes >= _MAX_CRASHES - 1]
        turn = suspects[:1] if suspects else list(self._active.values())
        if suspects and any(a.submitted for a in self._active.values()):
            return
        for active in turn:
            if not active.submitted:
                self._hand_over(active, self._worker)

    def _hand_over(self, active: _Active, worker: WorkerProcess) -> None:
        try:
            worker.send(active.submit())
        except (UnicodeEncodeError, OverflowError) as error:  # half a surrogate pair, a huge id
            self._active.pop(active.id, None)
            message = f"the request holds what cannot be sent to the engine: {error}"
            active.events.put_nowait(InvalidRequest(message))

    def _on_exit(self, code: int) -> None:
        if self._started is not None and not self._started.done():
            words = self._worker.last_words if self._worker else ""
            message = f"the worker ended with code {code} while loading. {words}".strip()
            # -9: killed for memory. CUDA and GGML abort when an allocation fails, and say so.
            memory = code == -9 or "memory" in words.lower() or "alloc" in words.lower()
            self._started.set_result(LoadFailed("memory" if memory else "model", message))
            return
        if self._closing or self._worker is None:
            return
        logger.error("worker %d ended with code %d: %s", self.pid, code, self._worker.last_words)
        self._worker = None
        for future in self._calls.values():
            if not future.done():
                future.set_exception(Unavailable("the model's worker ended; try again"))
        self._blame()
        stable = time.monotonic() - self._ready_at > _STABLE_AFTER_S
        self._recent_crashes = 1 if stable else self._recent_crashes + 1
        self._restarting = asyncio.get_running_loop().create_task(self._restart())

    def _blame(self) -> None:
        """Count the crash against the requests that the worker had; three, the last of them
        alone, and the request fails."""
        involved = [a for a in self._active.values() if a.submitted]
        for active in involved:
            active.crashes += 1
            active.submitted = False
        if len(involved) == 1 and involved[0].crashes >= _MAX_CRASHES:
            message = f"the engine crashed {involved[0].crashes} times on this request"
            self._active.pop(involved[0].id)
            involved[0].events.put_nowait(EngineError(message, code="engine_crashed"))

    async def _restart(self) -> None:
        for attempt in range(_MAX_FAILED_STARTS):
            await asyncio.sleep(_BACKOFF_S[min(self._recent_crashes - 1, len(_BACKOFF_S) - 1)])
            try:
                await self.start()
            except NodeError as error:
                logger.error("restart %d failed: %s", attempt + 1, error.message)
                self._recent_crashes += 1
                failure = error
                continue
            self.restarts += 1
            self._submit_waiting()
            return
        self._dead = failure
        self._fail_all(failure)
        if self._on_failure is not None:
            self._on_failure(failure)

    def _fail_all(self, error: NodeError) -> None:
        for active in self._active.values():
            active.events.put_nowait(error)
        self._active.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)


def _error(fail: Fail) -> NodeError:
    if fail.code == "context_length_exceeded":
        return ContextLengthExceeded(fail.message, param=fail.param)
    if fail.code == "invalid_request":
        return InvalidRequest(fail.message, param=fail.param)
    return EngineError(fail.message, param=fail.param)
