"""The engine loop of one model: submit, cancel, and one short `step`.

Owns the llama.cpp context; everything here runs on one thread, except `prepare`, which may run
on another while a step computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache import SequencePool
from node.engine.llama import LlamaContext, LlamaModel, NoSlot
from node.engine.llama_sampling import Candidates, GrammarError
from node.engine.messages import (
    Delta,
    Fail,
    Finish,
    Load,
    ModelInfo,
    Stats,
    Step,
    Submit,
)
from node.engine.request import Request
from node.engine.sampling import TokenSampler, token_logprob
from node.engine.scheduler import Pace, Run, Scheduler
from node.engine.tiers import open_tiers

__all__ = ["EngineCore"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Totals:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    dram_tokens: int = 0
    ssd_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0


@dataclass(slots=True)
class _Output:
    """What a step has to say, until it is sent."""

    deltas: list[Delta] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    failed: list[Fail] = field(default_factory=list)

    def take(self) -> Step:
        step = Step(tuple(self.deltas), tuple(self.finished), tuple(self.failed))
        self.deltas, self.finished, self.failed = [], [], []
        return step


class EngineCore:
    """One loaded model. Raises LoadError from the constructor.

    `on_loaded` is called on another thread when a waiting request can go on.
    """

    def __init__(
        self, load: Load, threads: int, on_loaded: Callable[[], None] = lambda: None
    ) -> None:
        self.model = LlamaModel(load)
        self.context = LlamaContext(self.model, load, threads)
        self.pool = SequencePool(
            self.context.n_ctx, load.max_sequences, self.model.can_fork, self.context
        )
        self.pace = Pace(load.token_gap_ms / 1000)
        self.tiers = open_tiers(load, self.model, self.context, self.pool, on_loaded)
        self.scheduler = Scheduler(
            self.pool,
            self.context.n_batch,
            load.max_sequences,
            self.pace,
            self.tiers.fill if self.tiers else None,
        )
        self._scratch = Candidates(self.model.n_vocab)
        self._requests: dict[int, Request] = {}
        self._output = _Output()
        self._totals = _Totals()
        self._stepped = False

    @property
    def info(self) -> ModelInfo:
        return self.model.info(self.context.n_ctx, self.context.threads)

    @property
    def busy(self) -> bool:
        unsaid = self._output.failed or self._output.finished
        return bool(self._requests or unsaid or (self.tiers and self.tiers.busy))

    def prepare(self, submit: Submit) -> Request | Fail:
        """Tokenise and compile; what is wrong with the request comes back as Fail."""
        prompt = self._tokenize(submit)
        if (refusal := self._refusal(submit, prompt)) is not None:
            return refusal
        try:
            sampler = TokenSampler(
                self.model,
                submit.sampling,
                prompt.tolist(),
                submit.constraint,
                submit.ignore_eos,
                submit.render_special,
                self._scratch,
            )
        except GrammarError as error:
            param = submit.constraint.param if submit.constraint else None
            return Fail(submit.request_id, "invalid_request", str(error), param)
        return Request(submit, prompt, sampler)

    def submit(self, prepared: Request | Fail) -> None:
        if isinstance(prepared, Fail):
            self._output.failed.append(prepared)
            return
        self._requests[prepared.id] = prepared
        # The window may have become smaller since: a restart tries smaller plans.
        ended = self._reason_to_end(prepared) if prepared.submit.resume else None
        if ended:
            self._end(prepared, ended)
            return
        if self.tiers is not None:
            self.tiers.queued(prepared, self.pace.prefill_token_s)
        self.scheduler.add(prepared)

    def cancel(self, request_id: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._output.finished.append(Finish(request_id, "cancelled", request.usage()))
            self._release(request)

    def step(self) -> Step:
        """Admit, decode one batch, sample. Empty when there was nothing to do."""
        self.scheduler.admit()
        runs = self.scheduler.next_batch()
        self._stepped = bool(runs)
        if runs and self._decode(runs):
            self._sample(runs)
        return self._output.take()

    def tidy(self) -> bool:
        """After a step's output is out: keep what was computed. False when neither this nor the
        step had anything to do."""
        if self.tiers is None:
            return self._stepped
        busy = self.tiers.busy or self._stepped
        running = [r.sequence for r in self.scheduler.running if r.sequence is not None]
        self.tiers.work(running, self._stepped)
        return busy

    def flush(self, timeout_s: float) -> bool:
        """Bring everything computed to the disk; false when the time was not enough."""
        if self.tiers is None:
            return True
        self.tiers.settle()
        return self.tiers.manager.flush(timeout_s)

    def purge(self, namespace: str) -> bool:
        """Forget what is kept, or that of one namespace; what runs goes on."""
        if self.tiers is None:
            self.pool.evict_idle()
            return True
        return self.tiers.purge(namespace)

    def close(self, timeout_s: float) -> None:
        if self.tiers is not None:
            self.tiers.close(timeout_s)

    def stats(self, call_id: int) -> Stats:
        return Stats(
            call_id=call_id,
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            idle_sequences=self.pool.n_idle,
            cells_total=self.pool.cells.total,
            cells_free=self.pool.cells.free,
            threads=self.context.threads,
            prompt_tokens_total=self._totals.prompt_tokens,
            cached_tokens_total=self._totals.cached_tokens,
            computed_tokens_total=self._totals.computed_tokens,
            completion_tokens_total=self._totals.completion_tokens,
            steps_total=self._totals.steps,
            preemptions_total=self.scheduler.preemptions,
            dram_tokens_total=self._totals.dram_tokens,
            ssd_tokens_total=self._totals.ssd_tokens,
            cache=self.tiers.stats() if self.tiers else {},
        )

    def _tokenize(self, submit: Submit) -> npt.NDArray[np.int32]:
        prompt = submit.prompt
        if not prompt or isinstance(prompt[0], int):
            return np.array(prompt, np.int32)
        parts = [
            self.model.tokenize(str(text), add_special=False, parse_special=True) for text in prompt
        ]
        tokens = np.concatenate(parts)
        if submit.add_bos and self.model.adds_bos:
            bos = self.model.bos
            if len(tokens) == 0 or tokens[0] != bos:
                tokens = np.insert(tokens, 0, bos).astype(np.int32)
        return tokens

    def _refusal(self, submit: Submit, prompt: npt.NDArray[np.int32]) -> Fail | None:
        n_ctx, n = self.context.n_ctx, len(prompt)
        if n == 0:
            return Fail(submit.request_id, "invalid_request", "the prompt is empty", "prompt")
        if prompt.min() < 0 or prompt.max() >= self.model.n_vocab:
            message = f"token ids must be between 0 and {self.model.n_vocab - 1}"
            return Fail(submit.request_id, "invalid_request", message, "prompt")
        if n > n_ctx:
            message = f"the prompt has {n} tokens, the context window of this model is {n_ctx}"
            return Fail(submit.request_id, "context_length_exceeded", message, "messages")
        biased = [token for token, _ in submit.sampling.logit_bias]
        if biased and not 0 <= min(biased) <= max(biased) < self.model.n_vocab:
            message = f"token ids must be between 0 and {self.model.n_vocab - 1}"
            return Fail(submit.request_id, "invalid_request", message, "logit_bias")
        return None

    def _decode(self, runs: list[Run]) -> bool:
        started = time.monotonic()
        try:
            self.context.decode([self._row(run) for run in runs])
        except NoSlot:
            self._no_slot(runs)
            return False
        except RuntimeError as error:
            logger.error("decode failed: %s", error)
            for run in runs:
                self._fail(run.request, f"the model could not compute this request: {error}")
            return False
        n_decoding = sum(run.n_tokens == 1 for run in runs)
        n_tokens = sum(run.n_tokens for run in runs)
        self.pace.note(n_decoding, n_tokens - n_decoding, time.monotonic() - started)
        self._totals.steps += 1
        for run in runs:
            self._totals.computed_tokens += run.n_tokens
            run.request.note_evaluated(run.n_tokens)
            if self.tiers is not None:
                self.tiers.computed(run.request)
        return True

    def _row(self, run: Run) -> tuple[int, int, npt.NDArray[np.int32], bool]:
        request, sequence = run.request, run.request.sequence
        assert sequence is not None
        start = sequence.n_tokens - run.n_tokens
        tokens = request.tokens[start : sequence.n_tokens]
        return sequence.seq_id, start, tokens, request.n_pending == 0

    def _no_slot(self, runs: list[Run]) -> None:
        """The ledger promised cells that llama.cpp does not have: give back and make room."""
        logger.warning("llama.cpp found no free cells, though %r", self.pool)
        for run in runs:
            sequence = run.request.sequence
            assert sequence is not None
            self.pool.truncate(sequence, sequence.n_tokens - run.n_tokens)
        if self.pool.n_idle:
            self.pool.evict_idle()
        elif len(self.scheduler.running) > 1:
            self.scheduler.preempt(self.scheduler.running[-1])
        else:
            self._fail(runs[0].request, "no free cells in the KV cache")

    def _sample(self, runs: list[Run]) -> None:
        row = -1
        for request, n_tokens in runs:
            row += n_tokens
            if request.n_pending > 0:
                continue
            if request.at_limit:
                self._end(request, "length")
                continue
            try:
                self._next_token(request, row)
            except GrammarError as error:
                self._fail(request, str(error))

    def _next_token(self, request: Request, row: int) -> None:
        logits = self.context.logits(row)
        token = request.sampler.sample(logits)
        request.mark("first_token")
        if self.model.is_eog(token):  # with `ignore_eos` only where a grammar ends
            self._end(request, "stop")
            return
        n_top = request.submit.top_logprobs
        logprobs = () if n_top is None else (token_logprob(self.model, logits, token, n_top),)
        request.sampler.accept((token,))
        request.append(token)
        self._totals.completion_tokens += 1
        text = request.regained_text + request.text.feed(request.sampler.piece(token))
        request.regained_text = ""
        ended = self._reason_to_end(request)
        if ended == "length":
            text += request.text.finish()
        self._output.deltas.append(Delta(request.id, text, (token,), logprobs))
        if ended:
            self._end(request, ended)

    def _reason_to_end(self, request: Request) -> str | None:
        if request.text.stopped_by is not None:
            return "stop"
        if request.at_limit or len(request.tokens) > self.context.n_ctx:
            return "length"
        return None

    def _end(self, request: Request, reason: str) -> None:
        rest = request.regained_text + request.text.finish()
        if rest:
            self._output.deltas.append(Delta(request.id, rest, ()))
        usage = request.usage()
        self._totals.prompt_tokens += usage.prompt_tokens
        self._totals.cached_tokens += usage.cached_tokens
        self._totals.dram_tokens += usage.dram_tokens
        self._totals.ssd_tokens += usage.ssd_tokens
        self._output.finished.append(Finish(request.id, reason, usage, request.text.stopped_by))
        self._release(request)

    def _fail(self, request: Request, message: str) -> None:
        self._output.failed.append(Fail(request.id, "engine_error", message))
        sequence, request.sequence = request.sequence, None
        self._release(request)
        if sequence is not None:
            self.pool.spoil(sequence)

    def _release(self, request: Request) -> None:
        """Take the request out; what it computed stays as prefix cache."""
        self.scheduler.remove(request)
        request.sampler.close()
        del self._requests[request.id]
        if self.tiers is not None:
            self.tiers.leave(request)
        sequence, request.sequence = request.sequence, None
        if sequence is None:
            return
        if sequence.keep and sequence.n_tokens:
            self.pool.retire(sequence)
            if self.tiers is not None:
                self.tiers.finished(sequence)
            # Idle cells slow every step of the others, so they may not fill the pool.
            self.pool.evict_idle(keep_cells=self.pool.cells.total // 2)
        else:
            self.pool.drop(sequence)
