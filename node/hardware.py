"""What the machine has and what its processes do: the one module that uses psutil and NVML.

Values are read when asked for and never cached. A missing driver means "no GPU", not an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

__all__ = [
    "GPU",
    "Hardware",
    "OthersLoad",
    "detect_hardware",
    "pid_alive",
    "port_owner",
    "process_rss_bytes",
]

_SHORTEST_SAMPLE_S = 0.2


@dataclass(frozen=True, slots=True)
class GPU:
    """One card as its driver reports it."""

    name: str
    total_bytes: int
    free_bytes: int
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Hardware:
    """`cpu_cores` are physical cores this process may use, `cpu_threads` logical ones."""

    cpu_cores: int
    cpu_threads: int
    ram_total_bytes: int
    ram_free_bytes: int
    gpus: tuple[GPU, ...] = ()


def detect_hardware() -> Hardware:
    memory = psutil.virtual_memory()
    threads = _usable_threads()
    return Hardware(
        cpu_cores=max(1, min(psutil.cpu_count(logical=False) or threads, threads)),
        cpu_threads=threads,
        ram_total_bytes=int(memory.total),
        ram_free_bytes=int(memory.available),
        gpus=_nvidia_gpus(),
    )


def process_rss_bytes(pid: int) -> int | None:
    """Resident memory of a process; None when it is gone or not ours to see."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def pid_alive(pid: int) -> bool:
    """True for a process that still runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.AccessDenied:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False


def port_owner(port: int) -> str | None:
    """Name and pid of the process listening on a TCP port; None when that cannot be told."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):  # macOS shows other users' sockets to root only
        return None
    for connection in connections:
        bound = getattr(connection.laddr, "port", None)
        if connection.status == psutil.CONN_LISTEN and bound == port and connection.pid:
            return _process_label(connection.pid)
    return None


class OthersLoad:
    """CPU cores kept busy by processes that are not ours. One thread uses an instance."""

    def __init__(self) -> None:
        self._when = 0.0
        self._busy_s = 0.0
        self._own_s: dict[int, float] = {}
        self._cores = 0.0

    def __repr__(self) -> str:
        return f"OthersLoad({self._cores:.2f} cores)"

    def busy_cores(self, own_pids: Sequence[int]) -> float:
        """Cores others kept busy, on average, since the previous call; 0.0 on the first call.

        Clock ticks are too coarse for less than 0.2 s: such a call repeats the last value.
        """
        now = time.monotonic()
        elapsed = now - self._when
        if elapsed < _SHORTEST_SAMPLE_S:
            return self._cores
        busy, own = _busy_cpu_s(), {pid: _process_cpu_s(pid) for pid in own_pids}
        known = own.keys() <= self._own_s.keys()
        if self._when and known:
            ours = sum(own[pid] - self._own_s[pid] for pid in own)
            self._cores = max(0.0, (busy - self._busy_s - max(0.0, ours)) / elapsed)
        # A pid seen for the first time has an unknown share of the past, so nothing is concluded.
        self._when, self._busy_s, self._own_s = now, busy, own
        return self._cores


def _usable_threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _nvidia_gpus() -> tuple[GPU, ...]:
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = _text(pynvml.nvmlDeviceGetName(handle))
            gpus.append(GPU(name, int(memory.total), int(memory.free), driver))
        return tuple(gpus)
    except pynvml.NVMLError:  # a card that fell off the bus is a card we cannot use
        return ()
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _busy_cpu_s() -> float:
    times = psutil.cpu_times()
    # Guest time is part of user time already; steal is not time any process here ran.
    busy = ("user", "nice", "system", "irq", "softirq", "interrupt", "dpc")
    return float(sum(getattr(times, field, 0.0) for field in busy))


def _process_cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _process_label(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"
