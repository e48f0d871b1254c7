"""`ingle bench engine`: what worker and HTTP cost on top of a bare decode loop, and a busy core."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from cli.bench.arms import Arm, BareArm, HttpArm, WorkerArm
from cli.bench.private import PrivateNode
from cli.bench.report import Report, machine
from node import __version__
from node.engine.messages import Load
from node.hardware import detect_hardware
from node.models import InstalledModel

__all__ = ["run"]

PREFILL_TOKENS = 512
TTFT_TOKENS = 16
DECODE_TOKENS = 64
SPINNING_TOKENS = 8
_N_CTX = 4096
_SETTLE_S = 3.5
_SETTINGS = {"engine.n_ctx": _N_CTX, "engine.n_batch": 512, "engine.max_sequences": 16}

Say = Callable[[str], None]


async def run(model: InstalledModel, runs: int, say: Say) -> Report:
    """Measure all scenarios; arms are interleaved, and every value is the median of `runs`."""
    hardware = detect_hardware()
    threads = max(1, hardware.cpu_cores)
    load = _load(model, threads)
    report = Report(
        "engine",
        __version__,
        model.name,
        {"engine.n_ctx": _N_CTX, "engine.n_batch": load.n_batch, "threads": threads},
        machine(hardware.gpus[0].name if hardware.gpus else None, hardware.ram_total_bytes),
        round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
    )
    async with _arms(model, load, say) as arms:
        await _compare(report, arms, runs, say)
        await _busy_core(report, arms[-1], load, runs, say)
    return report


async def _compare(report: Report, arms: Sequence[Arm], runs: int, say: Say) -> None:
    bare = arms[0].name
    for arm in arms:  # warm-up: page in the weights, fill the connection and compile caches
        await arm.decode_tok_s(8, 1)
    for scenario, metric, unit, measure in _SCENARIOS:
        values: dict[str, list[float]] = {arm.name: [] for arm in arms}
        for i in range(runs):
            say(f"{scenario}: run {i + 1} of {runs}")
            for arm in arms:
                values[arm.name].append(await measure(arm))
        for arm in arms:
            report.add(scenario, arm.name, metric, unit, values[arm.name])
        for arm in arms[1:]:
            pairs = list(zip(values[arm.name], values[bare], strict=True))
            if metric == "ttft_ms":
                report.add(scenario, arm.name, "ttft_over_bare_ms", "ms", [a - b for a, b in pairs])
            else:
                report.add(scenario, arm.name, "ratio_to_bare", "ratio", [a / b for a, b in pairs])


async def _busy_core(report: Report, arm: Arm, load: Load, runs: int, say: Say) -> None:
    """Decode alone, with one core held by another program, and so with OpenMP's defaults."""
    if (os.cpu_count() or 1) < 2:
        report.add_missing("busy_core", "busy", "decode_tok_s", "the machine has one core")
        return
    idle, busy = [], []
    for i in range(runs):
        say(f"busy_core: run {i + 1} of {runs}")
        idle.append(await arm.decode_tok_s(DECODE_TOKENS, 1))
        with _held_core():
            await _settle(arm)
            busy.append(await arm.decode_tok_s(DECODE_TOKENS, 1))
        await _settle(arm)
    report.add("busy_core", "idle", "decode_tok_s", "tok/s", idle)
    report.add("busy_core", "busy", "decode_tok_s", "tok/s", busy)
    ratios = [b / a for a, b in zip(idle, busy, strict=True)]
    report.add("busy_core", "busy", "ratio_to_idle", "ratio", ratios)
    spinning = await BareArm.start(load, name="openmp_defaults", spinning=True)
    try:
        with _held_core():
            value = await spinning.decode_tok_s(SPINNING_TOKENS, 1)
    finally:
        await spinning.close()
    report.add("busy_core", "openmp_defaults", "decode_tok_s", "tok/s", [value])


async def _settle(arm: Arm) -> None:
    """Let the worker see the change of load: it looks about once a second while it works."""
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        await arm.decode_tok_s(4, 1)


async def _prefill(arm: Arm) -> float:
    return PREFILL_TOKENS / await arm.first_token_s(PREFILL_TOKENS)


async def _decode_1(arm: Arm) -> float:
    return await arm.decode_tok_s(DECODE_TOKENS, 1)


async def _decode_8(arm: Arm) -> float:
    return await arm.decode_tok_s(DECODE_TOKENS, 8)


async def _ttft_16(arm: Arm) -> float:
    return 1000 * await arm.first_token_s(TTFT_TOKENS)


_SCENARIOS = (
    ("prefill", "prefill_tok_s", "tok/s", _prefill),
    ("decode_1", "decode_tok_s", "tok/s", _decode_1),
    ("decode_8", "decode_tok_s", "tok/s", _decode_8),
    ("ttft_16", "ttft_ms", "ms", _ttft_16),
)


def _load(model: InstalledModel, threads: int) -> Load:
    return Load(
        path=str(model.path),
        n_ctx=_N_CTX,
        n_batch=512,
        n_ubatch=512,
        max_sequences=16,
        gpu_layers=0,
        type_k="f16",
        type_v="f16",
        threads=threads,
    )


@asynccontextmanager
async def _arms(model: InstalledModel, load: Load, say: Say) -> AsyncIterator[Sequence[Arm]]:
    with PrivateNode(model) as node:
        say("loading the model three times")
        await asyncio.to_thread(node.start, _SETTINGS)
        arms: list[Arm] = [await BareArm.start(load), await WorkerArm.start(load)]
        arms.append(HttpArm(node.port, model.name))
        try:
            yield arms
        finally:
            for arm in arms:
                await arm.close()


@contextlib.contextmanager
def _held_core() -> Iterator[None]:
    """Another program that computes all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
