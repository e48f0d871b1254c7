"""Moves state between the device pool and the tiers below it, between the steps of the engine.

The engine loop owns it. What is computed is read out into DRAM soon after (the manager sees to
the disk), a waiting request's state is fetched while it queues, and an idle sequence leaves the
device once its cells have cost the others as much as bringing it back will.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcache import (
    BLOCK_TOKENS,
    DiskLimits,
    DiskTier,
    KVCacheManager,
    Piece,
    Sequence,
    SequencePool,
    codec,
)
from node.engine.calibration import Calibration, calibrate, recall, remember
from node.engine.identity import identify
from node.engine.llama import LlamaContext, LlamaModel
from node.engine.messages import CachePlan, Load
from node.engine.request import Request

__all__ = ["Tiers", "open_tiers"]

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int32]
Blob = npt.NDArray[np.uint8]

_RUN_TOKENS = 8 * BLOCK_TOKENS
_PROBE_TOKENS = 3


def open_tiers(
    load: Load,
    model: LlamaModel,
    context: LlamaContext,
    pool: SequencePool,
    on_loaded: Callable[[], None],
) -> Tiers | None:
    """None without a plan for the cache."""
    plan = load.cache
    if plan is None:
        return None
    memory: codec.Memory = model.memory if _codec_knows(context, model) else "unknown"
    identity = identify(load, memory)
    key = f"{identity.fingerprint} {identity.type_k} {load.gpu_layers}"
    path = Path(plan.calibration_path) if plan.calibration_path else None
    costs = recall(path, key)
    if costs is None:
        costs = calibrate(context)
        remember(path, key, costs)
        logger.info("measured %s", costs)
    disk = None
    if plan.ssd_path is not None:
        limits = DiskLimits(
            plan.ssd_bytes,
            plan.ssd_free_floor_bytes,
            plan.ssd_write_bytes_per_day,
            plan.ssd_read_bytes_per_s,
        )
        disk = DiskTier(Path(plan.ssd_path), limits)
    window = model.window_tokens or _RUN_TOKENS
    manager = KVCacheManager(
        identity,
        memory,
        plan.dram_bytes,
        disk,
        on_loaded,
        min(_RUN_TOKENS, window),
        model=load.name or Path(load.path).name,
    )
    return Tiers(model, context, memory, pool, manager, costs, plan)


def _codec_knows(context: LlamaContext, model: LlamaModel) -> bool:
    """Read a few computed positions and parse them: the layout belongs to the installed build."""
    n = _PROBE_TOKENS
    context.decode([(0, 0, np.arange(1, n + 1, dtype=np.int32), True)])
    blob = np.zeros(context.state_bytes(0, 0, n), np.uint8)
    try:
        context.read_state(0, 0, n, blob)
        known = True
        if codec.has_blocks(model.memory):
            known = codec.attention_span(blob, model.memory) == (0, n)
        if codec.has_snapshots(model.memory):
            known = known and codec.recurrent_position(blob, model.memory) == n - 1
        return known
    except codec.CodecError as error:
        logger.warning("the state of this model is not understood, so kept whole: %s", error)
        return False
    finally:
        context.seq_rm(0)


@dataclass(slots=True)
class _Source:
    """One sequence as the manager reads it."""

    context: LlamaContext
    sequence: Sequence
    memory: codec.Memory

    def state_bytes(self, start: int, end: int) -> int:
        n_bytes = self.context.state_bytes(self.sequence.seq_id, start, end)
        if codec.has_snapshots(self.memory):
            n_bytes -= codec.recurrent_bytes(self.snapshot_bytes())
        return n_bytes

    def read_state(self, start: int, end: int, out: Blob) -> bool:
        if codec.has_snapshots(self.memory):
            return self._read_cut(start, end, out)
        if not self.context.read_state(self.sequence.seq_id, start, end, out):
            return False
        try:  # cells that have left a sliding window may be somebody else's by now
            return codec.attention_span(out, self.memory) == (start, end)
        except codec.CodecError:
            return False

    def _read_cut(self, start: int, end: int, out: Blob) -> bool:
        """Without the recurrent state that comes with it."""
        blob = np.empty(len(out) + codec.recurrent_bytes(self.snapshot_bytes()), np.uint8)
        if not self.context.read_state(self.sequence.seq_id, start, end, blob):
            return False
        out[:] = codec.cut(blob, self.memory, start, end)
        return True

    def snapshot_bytes(self) -> int:
        return self.context.snapshot_bytes(self.sequence.seq_id, whole=self._whole)

    def read_snapshot(self, out: Blob) -> bool:
        return self.context.read_snapshot(self.sequence.seq_id, out, whole=self._whole)

    @property
    def _whole(self) -> bool:
        return not codec.has_blocks(self.memory)


class Tiers:
    """See the module. `pool.on_drop` is set to rescue what is about to leave the device."""

    def __init__(
        self,
        model: LlamaModel,
        context: LlamaContext,
        memory: codec.Memory,
        pool: SequencePool,
        manager: KVCacheManager,
        costs: Calibration,
        plan: CachePlan,
    ) -> None:
        self.manager = manager
        self.costs = costs
        self.demotions = 0
        self._model = model
        self._context = context
        self._memory = memory
        self._pool = pool
        self._flush_interval_s = plan.flush_interval_s
        self._snapshot_tokens = plan.snapshot_blocks * BLOCK_TOKENS
        self._next_flush_s = 0.0
        self._due: deque[Sequence] = deque()
        pool.on_drop = self._rescue

    @property
    def busy(self) -> bool:
        """Whether `work` has something to do."""
        return bool(self._due)

    def queued(self, request: Request, compute_token_s: float) -> None:
        """A request waits: fetch what it will need."""
        if not request.submit.cache_prompt:
            return
        if self.manager.has_snapshots:
            request.stops = self._stops(request)
        tokens = request.tokens[:-1]
        _, n_resident = self._pool.match(tokens, request.submit.tenant)
        if n_resident == len(tokens):
            return
        request.ticket = self.manager.prefetch(
            self.manager.namespace(request.submit.tenant),
            tokens,
            n_resident,
            compute_token_s or self.costs.prefill_token_s,
        )

    def fill(self, request: Request) -> None:
        """A request has its sequence, which holds what the device had: add what DRAM has."""
        sequence, ticket = request.sequence, request.ticket
        assert sequence is not None
        if not sequence.keep:
            return
        tokens = request.tokens[:-1]
        namespace = self.manager.namespace(request.submit.tenant)
        with self.manager.taken(namespace, tokens, sequence.n_tokens) as pieces:
            if not self._give(sequence, tokens, pieces) and self.manager.has_snapshots:
                self._pool.truncate(sequence, 0)  # the parts it has do not fit together
                request.forget_restored()
            for start, end, _ in pieces:
                n_ssd = ticket.ssd_tokens(start, end) if ticket else 0
                if end <= sequence.n_tokens:
                    request.note_restored(start, end, n_ssd)
        self.leave(request)

    def _give(self, sequence: Sequence, tokens: Tokens, pieces: Iterable[Piece]) -> bool:
        """False when the device did not take all of them."""
        for start, end, blob in pieces:
            assert start == sequence.n_tokens
            if not self._pool.extend(sequence, tokens[start:end]):
                return False
            if not self._context.write_state(sequence.seq_id, start, end, blob):
                self._pool.truncate(sequence, start)
                self.manager.reasons["device_refused"] += 1
                return False
            sequence.n_stored = end
        return True

    def computed(self, request: Request) -> None:
        """A step has computed tokens of this request; its last one has been evaluated."""
        sequence = request.sequence
        if sequence is None or not (self.manager.has_snapshots and sequence.keep):
            return
        n = sequence.n_tokens
        periodic = self._cuttable and n % self._snapshot_tokens == 0
        if periodic or (n <= request.n_prompt and n in request.stops):
            self._snapshot(sequence)

    def _stops(self, request: Request) -> list[int]:
        """Where snapshots of the prompt are taken: at messages, before its last token (so that
        the same prompt again, and what follows it, can go on from there), now and then."""
        n = request.n_prompt
        stops = {n - 1, *self._model.message_starts(request.tokens[:n])}
        if self._cuttable:
            stops.update(range(self._snapshot_tokens, n, self._snapshot_tokens))
        return sorted(stops - {0})

    @property
    def _cuttable(self) -> bool:
        """A whole state of unknown layout is too large to be kept now and then."""
        return self._memory != "unknown"

    def _snapshot(self, sequence: Sequence) -> None:
        self.manager.store_snapshot(
            self.manager.namespace(sequence.tenant), sequence.tokens, self._source(sequence)
        )

    def _source(self, sequence: Sequence) -> _Source:
        return _Source(self._context, sequence, self._memory)

    def leave(self, request: Request) -> None:
        """The request waits no longer."""
        if request.ticket is not None:
            self.manager.release(request.ticket)
            request.ticket = None

    def finished(self, sequence: Sequence) -> None:
        """Its request is done: keep all of it, the end of the answer too."""
        self._snapshot(sequence)
        if sequence.n_stored < sequence.n_tokens:
            self._due.append(sequence)

    def work(self, running: Iterable[Sequence], stepped: bool) -> None:
        """Between two steps: one run of positions at most, so that no token waits for long."""
        now_s = time.monotonic()
        if now_s >= self._next_flush_s:
            self._next_flush_s = now_s + self._flush_interval_s / 2
            self._due.extend(s for s in running if s.keep and _full_blocks(s) > s.n_stored)
        if self._due:
            sequence = self._due[0]
            end = sequence.n_tokens if not sequence.live else _full_blocks(sequence)
            if self._pool.has(sequence) and sequence.n_stored < end:
                self._store(sequence, end)
            else:
                self._due.popleft()
        if stepped:
            self._demote()

    def purge(self, namespace: str) -> bool:
        """Forget idle sequences and what DRAM holds; an empty namespace stands for all."""
        for sequence in [s for s in self._pool if not s.live]:
            if namespace in ("", self.manager.namespace(sequence.tenant)):
                self._pool.spoil(sequence)
        return self.manager.purge(namespace)

    def settle(self) -> None:
        """Read out everything that is not kept yet."""
        for sequence in list(self._pool):
            self._rescue(sequence)
        self._due.clear()

    def stats(self) -> dict[str, Any]:
        """For people and metrics; see `KVCacheManager.stats`."""
        costs = msgspec.to_builtins(self.costs)
        return {**self.manager.stats(), "demotions": self.demotions, "calibration": costs}

    def close(self, timeout_s: float) -> None:
        self.settle()
        if not self.manager.flush(timeout_s):
            logger.warning("not all computed state reached the disk in %g s", timeout_s)
        self.manager.close()

    def _store(self, sequence: Sequence, end: int) -> None:
        start = sequence.n_stored // BLOCK_TOKENS * BLOCK_TOKENS
        end = min(end, start + _RUN_TOKENS)
        self.manager.store(
            self.manager.namespace(sequence.tenant),
            sequence.tokens,
            start,
            end,
            self._source(sequence),
        )
        sequence.n_stored = end

    def _rescue(self, sequence: Sequence) -> None:
        if sequence.keep:
            self._snapshot(sequence)
        while sequence.keep and sequence.n_stored < sequence.n_tokens:
            self._store(sequence, sequence.n_tokens)

    def _demote(self) -> None:
        """An idle sequence pays for the cells that others walk over, up to what its return
        costs: nobody ever pays more than twice the best that could be done."""
        for sequence in [s for s in self._pool if not s.live]:
            cells = self._pool.cells.exclusive(sequence.cells)
            sequence.idle_cost_s += cells * self.costs.cell_step_s
            if sequence.idle_cost_s > cells * self.costs.restore_token_s:
                self._pool.drop(sequence)
                self.demotions += 1


def _full_blocks(sequence: Sequence) -> int:
    return sequence.n_tokens // BLOCK_TOKENS * BLOCK_TOKENS
