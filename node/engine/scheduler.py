"""Which request runs next, and with how many tokens: continuous batching, chunked prefill.

Decoding requests get their one token first, the rest of the batch goes to prompts in order of
arrival. Admission counts unique cells and skips what does not fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from kvcache import SequencePool, common_prefix
from node.engine.request import Request, RequestStatus

__all__ = ["Pace", "Run", "Scheduler"]

_GROWTH_MARGIN_TOKENS = 64
_WORTH_WAITING_TOKENS = 32
_MIN_CHUNK_TOKENS = 16
_FULL_SPEED_CHUNK_TOKENS = 64  # kernels lose throughput on shorter and on odd chunks
_FIRST_CHUNK_TOKENS = 128  # before anything has been measured
_MAX_STEP_S = 2.0  # measured: chunks of 64, 128, 256 tokens cost a small CPU 9, 3 and 1 %
_LOOK_AHEAD = 32  # waiting requests tried a step when the first ones do not fit
_MAX_OVERTAKEN = 64  # then nobody else starts until the request fits


class Run(NamedTuple):
    """The next `n_tokens` pending tokens of a request."""

    request: Request
    n_tokens: int


class Pace:
    """Running averages of what a decode step and a prompt token cost, in seconds."""

    def __init__(self, token_gap_s: float) -> None:
        self._token_gap_s = token_gap_s
        self._decode_step_s = 0.0
        self._prefill_token_s = 0.0

    @property
    def prefill_token_s(self) -> float:
        """Seconds for a prompt token; 0 when nothing has been measured."""
        return self._prefill_token_s

    def note(self, n_decoding: int, n_prefill_tokens: int, elapsed_s: float) -> None:
        if n_prefill_tokens == 0:
            self._decode_step_s = _average(self._decode_step_s, elapsed_s)
        elif n_prefill_tokens >= _MIN_CHUNK_TOKENS:
            rest_s = elapsed_s - (self._decode_step_s if n_decoding else 0.0)
            self._prefill_token_s = _average(
                self._prefill_token_s, max(rest_s, 0.0) / n_prefill_tokens
            )

    def chunk_tokens(self, decoding: bool) -> int:
        """Prompt tokens for one step.

        Beside decoding requests as many as their gap allows. Without any, as many as keep the
        step short enough for new and cancelled requests to be noticed; on a GPU that is a whole
        batch.
        """
        if self._prefill_token_s == 0:
            return _FIRST_CHUNK_TOKENS
        if not decoding:
            blocks = int(_MAX_STEP_S / self._prefill_token_s) // _FULL_SPEED_CHUNK_TOKENS
            return max(1, blocks) * _FULL_SPEED_CHUNK_TOKENS
        gap_s = max(self._token_gap_s, 2 * self._decode_step_s)
        return max(_MIN_CHUNK_TOKENS, int((gap_s - self._decode_step_s) / self._prefill_token_s))


class Scheduler:
    """Waiting and running requests. Not thread-safe: the engine loop owns it. `fill` adds to a
    started request's sequence what the tiers below the device have of it."""

    def __init__(
        self,
        pool: SequencePool,
        n_batch: int,
        max_running: int,
        pace: Pace,
        fill: Callable[[Request], None] | None = None,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._pool = pool
        self._n_batch = n_batch
        self._max_running = min(max_running, n_batch)  # each may decode a token in every step
        self._pace = pace
        self._fill = fill

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def admit(self) -> None:
        """Start waiting requests, oldest first. One that does not fit is skipped, though not for
        ever; one whose prefix another request is just computing waits for it."""
        skipped: list[Request] = []
        for request in list(islice(self.waiting, _LOOK_AHEAD)):
            if len(self.running) >= self._max_running:
                return
            if not request.ready or self._prefix_is_coming(request):
                continue
            reserved = sum(r.n_pending for r in self.running)
            margin = reserved + _GROWTH_MARGIN_TOKENS if self.running else 0
            submit = request.submit
            opened = self._pool.open(request.tokens, margin, submit.cache_prompt, submit.tenant)
            if opened is None:
                if request.overtaken >= _MAX_OVERTAKEN:
                    return
                skipped.append(request)
                continue
            for other in skipped:
                other.overtaken += 1
            self.waiting.remove(request)
            self.running.append(request)
            request.sequence = opened.sequence
            request.status = RequestStatus.RUNNING
            if self._fill is not None:
                self._fill(request)
            request.mark("admitted")

    def next_batch(self) -> list[Run]:
        """Runs whose cells are accounted for. A decoding request whose cell cannot be had makes
        the youngest request give way; it will be computed again."""
        runs: list[Run] = []
        for request in [r for r in self.running if r.decoding]:
            if request.status is RequestStatus.RUNNING and self._extend(request, 1, runs):
                runs.append(Run(request, 1))
        budget = min(self._n_batch - len(runs), self._pace.chunk_tokens(decoding=bool(runs)))
        for request in [r for r in self.running if not r.decoding and not _in(r, runs)]:
            n = min(request.n_until_stop, budget)
            if n and request.status is RequestStatus.RUNNING and self._extend(request, n, runs):
                runs.append(Run(request, n))
                budget -= n
        return runs

    def preempt(self, request: Request) -> None:
        """Back to the front of the queue; its sequence may be evicted from now on."""
        assert request.sequence is not None
        self.running.remove(request)
        self._pool.retire(request.sequence)
        request.sequence = None
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _extend(self, request: Request, n: int, runs: list[Run]) -> bool:
        sequence = request.sequence
        assert sequence is not None
        start = sequence.n_tokens
        while not self._pool.extend(sequence, request.tokens[start : start + n]):
            victims = [r for r in self.running if r is not request and not _in(r, runs)]
            if not victims:
                return False
            self.preempt(victims[-1])
        return True

    def _prefix_is_coming(self, request: Request) -> bool:
        if not (self._pool.can_fork and request.submit.cache_prompt):
            return False
        tokens = request.tokens[:-1]
        _, matched = self._pool.match(tokens, request.submit.tenant)
        return any(
            common_prefix(r.tokens, tokens) >= matched + _WORTH_WAITING_TOKENS
            for r in self.running
            if r.submit.cache_prompt and r.submit.tenant == request.submit.tenant and not r.decoding
        )


def _in(request: Request, runs: list[Run]) -> bool:
    return any(run.request is request for run in runs)


def _average(old: float, new: float) -> float:
    return new if old == 0 else old + 0.2 * (new - old)
