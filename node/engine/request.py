"""One request inside a worker: its tokens, its sampler, and how far it has got."""

from __future__ import annotations

import bisect
import enum
import time

import numpy as np
import numpy.typing as npt

from kvcache import Sequence, Ticket
from node.engine.messages import Submit, Usage
from node.engine.sampling import TokenSampler
from node.engine.text import TextStream

__all__ = ["Request", "RequestStatus"]

Tokens = npt.NDArray[np.int32]


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """`tokens` is prompt + output; those not yet in `sequence` are pending. With one pending
    token after the prompt the request decodes, with more it prefills."""

    def __init__(self, submit: Submit, prompt: Tokens, sampler: TokenSampler) -> None:
        self.id = submit.request_id
        self.submit = submit
        self.sampler = sampler
        self.status = RequestStatus.WAITING
        self.sequence: Sequence | None = None
        self.n_prompt = len(prompt)
        self.evaluated_prompt_tokens = 0
        self.ticket: Ticket | None = None  # what it waits for from the lower tiers
        self.stops: list[int] = []  # positions at which a step must end, in order
        self.dram_tokens = 0
        self.ssd_tokens = 0
        self.overtaken = 0  # later requests that were started while this one did not fit
        self.times = {"submitted": time.monotonic()}
        self._tokens = np.resize(prompt, len(prompt) + 256)
        self._n_tokens = len(prompt)
        resume = submit.resume
        self.text = TextStream(submit.stop, resume.emitted_chars if resume else 0)
        self.regained_text = ""
        if resume:
            self._take_up(resume.tokens)

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.status.name}, {self.n_prompt}+{self.n_output} tokens)"

    @property
    def tokens(self) -> Tokens:
        return self._tokens[: self._n_tokens]

    @property
    def n_output(self) -> int:
        return self._n_tokens - self.n_prompt

    @property
    def n_pending(self) -> int:
        return self._n_tokens - (self.sequence.n_tokens if self.sequence else 0)

    @property
    def n_until_stop(self) -> int:
        """Pending tokens that may be computed in one step."""
        at = self.sequence.n_tokens if self.sequence else 0
        i = bisect.bisect(self.stops, at)
        return min(self.n_pending, self.stops[i] - at) if i < len(self.stops) else self.n_pending

    @property
    def ready(self) -> bool:
        """Nothing of it is still on its way from the disk."""
        return self.ticket is None or self.ticket.ready

    @property
    def decoding(self) -> bool:
        return self.n_output > 0 and self.n_pending == 1

    @property
    def at_limit(self) -> bool:
        limit = self.submit.max_tokens
        return limit is not None and self.n_output >= limit

    def note_evaluated(self, n_tokens: int) -> None:
        """The last n tokens of the sequence have been computed."""
        assert self.sequence is not None
        start = self.sequence.n_tokens - n_tokens
        self.evaluated_prompt_tokens += max(0, min(self.sequence.n_tokens, self.n_prompt) - start)

    def note_restored(self, start: int, end: int, from_ssd: int) -> None:
        """Positions [start, end) came from the lower tiers, so many of them from the disk. What
        comes back after the request gave way counts as before."""
        if "admitted" in self.times:
            return
        self.ssd_tokens += min(from_ssd, max(0, self.n_prompt - start))
        self.dram_tokens += max(0, min(end, self.n_prompt) - start) - from_ssd

    def forget_restored(self) -> None:
        """It has to be computed after all."""
        if "admitted" not in self.times:
            self.ssd_tokens = self.dram_tokens = 0

    def append(self, token: int) -> None:
        if self._n_tokens == len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * len(self._tokens))
        self._tokens[self._n_tokens] = token
        self._n_tokens += 1

    def mark(self, event: str) -> None:
        """Remember when something happened for the first time."""
        self.times.setdefault(event, time.monotonic())

    def usage(self) -> Usage:
        now = time.monotonic()
        admitted = self.times.get("admitted", now)
        first = self.times.get("first_token", now)
        computed = min(self.evaluated_prompt_tokens, self.n_prompt)  # more after a preemption
        cached = self.n_prompt - computed
        ssd = min(self.ssd_tokens, cached)
        return Usage(
            prompt_tokens=self.n_prompt,
            cached_tokens=cached,
            computed_tokens=computed,
            completion_tokens=self.n_output,
            queued_s=admitted - self.times["submitted"],
            prefill_s=first - admitted,
            decode_s=now - first,
            dram_tokens=min(self.dram_tokens, cached - ssd),
            ssd_tokens=ssd,
        )

    def _take_up(self, output: tuple[int, ...]) -> None:
        """Go on behind output that an earlier worker produced."""
        self.sampler.accept(output)
        for token in output:
            self.append(token)
            self.regained_text += self.text.feed(self.sampler.piece(token))
