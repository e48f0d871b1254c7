"""What computing, moving and merely keeping state costs on this machine, measured once a model."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from node.engine.llama import LlamaContext, Tokens

__all__ = ["Calibration", "calibrate", "recall", "remember"]

logger = logging.getLogger(__name__)

_PROMPT_TOKENS = 64
_STEPS = 5
_FOREIGN_CELLS = 4096


class Calibration(msgspec.Struct, frozen=True):
    """Seconds: to compute a prompt token, to decode one in a step alone, to read a token's state
    out of the device, to write it back, and what every foreign cell adds to a step."""

    prefill_token_s: float
    decode_step_s: float
    read_token_s: float
    restore_token_s: float
    cell_step_s: float


def calibrate(context: LlamaContext) -> Calibration:
    """Measure on an empty context, and leave it empty."""
    n = min(_PROMPT_TOKENS, context.n_batch, context.n_ctx // 4)
    tokens = np.arange(1, n + 1, dtype=np.int32)

    def decode(start: int, part: Tokens) -> None:
        context.decode([(0, start, part, True)])
        context.logits(len(part) - 1)  # waits for a GPU

    prefill_s = _timed(lambda: decode(0, tokens), 1)
    blob = np.zeros(context.state_bytes(0, 0, n), np.uint8)
    read_s = _timed(lambda: context.read_state(0, 0, n, blob), 3)
    positions = iter(range(n, context.n_ctx))

    def decode_step() -> None:
        decode(next(positions), tokens[:1])

    decode_s = _timed(decode_step, _STEPS)
    copies = min(_FOREIGN_CELLS, context.n_ctx // 2) // n
    ids = range(1, min(copies + 1, context.n_sequences))
    restore_s = (
        statistics.median(
            _timed(lambda i=i: context.write_state(i, 0, n, blob), 1)  # type: ignore[misc]
            for i in ids
        )
        if ids
        else 0.0
    )
    crowded_s = _timed(decode_step, _STEPS)
    for seq_id in (0, *ids):
        context.seq_rm(seq_id)
    return Calibration(
        prefill_token_s=prefill_s / n,
        decode_step_s=decode_s,
        read_token_s=read_s / n,
        restore_token_s=restore_s / n,
        cell_step_s=max(0.0, crowded_s - decode_s) / max(1, len(ids) * n),
    )


def recall(path: Path | None, key: str) -> Calibration | None:
    if path is None:
        return None
    with contextlib.suppress(OSError, ValueError, msgspec.ValidationError):
        return msgspec.convert(json.loads(path.read_text())[key], Calibration)
    return None


def remember(path: Path | None, key: str, calibration: Calibration) -> None:
    """A file that cannot be written only means that the next load measures again."""
    if path is None:
        return
    known: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_text())
    known[key] = msgspec.to_builtins(calibration)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.write_text(json.dumps(known, indent=1))
        draft.replace(path)
    except OSError as error:
        logger.warning("%s: %s", path, error)


def _timed(action: Callable[[], object], times: int) -> float:
    """Median, seconds."""
    taken: list[float] = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
