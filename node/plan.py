"""Where a model would go on this machine, with this build of llama.cpp, under these settings."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace

from node.config import EngineConfig
from node.hardware import Hardware, detect_hardware
from node.models import GGUFHeader, PlacementPlan, PlacementRequest, plan_placement

__all__ = ["llama_build", "plan_here"]

_PROBE_TIMEOUT_S = 60


def plan_here(
    header: GGUFHeader, engine: EngineConfig, memory_limit_bytes: int | None = None
) -> PlacementPlan:
    """`memory_limit_bytes` replaces the setting, for a node that has used up part of it.

    Raises:
        NoSpace: nothing fits.
    """
    limit = engine.memory_limit_bytes if memory_limit_bytes is None else memory_limit_bytes
    request = PlacementRequest(
        n_ctx=engine.n_ctx,
        gpu_layers=engine.gpu_layers,
        kv_type=engine.kv_type,
        threads=engine.threads,
        n_batch=engine.n_batch,
        max_sequences=engine.max_sequences,
        memory_limit_bytes=limit,
    )
    return plan_placement(header, _usable_hardware(), request)


@functools.cache
def llama_build() -> dict[str, object]:
    """What the installed llama.cpp can do, asked in a process of its own, once; `error` if it
    does not load."""
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "node.engine.probe"],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        answer: dict[str, object] = json.loads(finished.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {"error": "llama.cpp does not load: the probe ended without an answer"}
    return answer


def _usable_hardware() -> Hardware:
    """A card counts only if llama.cpp was built for it."""
    hardware = detect_hardware()
    if hardware.gpus and not llama_build().get("gpu_offload"):
        return replace(hardware, gpus=())
    return hardware
