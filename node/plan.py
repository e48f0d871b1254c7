"""Where a model would go on this machine, with this build of llama.cpp, under these settings."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from kvcache import DiskLimits, DiskTier, used_bytes
from node.config import EngineConfig, KVCacheConfig
from node.engine.messages import CachePlan
from node.hardware import Hardware, detect_hardware
from node.models import GGUFHeader, PlacementPlan, PlacementRequest, plan_placement
from node.paths import NodePaths

__all__ = ["DiskTier", "llama_build", "open_disk", "plan_cache", "plan_here"]

_PROBE_TIMEOUT_S = 60
_STAGING_BYTES = 256 * 2**20  # what goes to the disk and comes from it passes through memory
_SSD_BYTES = 20 * 10**9


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


def plan_cache(kvcache: KVCacheConfig, paths: NodePaths) -> CachePlan | None:
    """Sizes of the tiers below the device; None when both are switched off."""
    if not (kvcache.dram or kvcache.ssd):
        return None
    folder, limits = _disk_plan(kvcache, paths)
    dram_bytes = kvcache.dram_bytes
    if dram_bytes is None:
        dram_bytes = detect_hardware().ram_total_bytes // 4
    return CachePlan(
        dram_bytes=dram_bytes if kvcache.dram else min(dram_bytes, _STAGING_BYTES),
        ssd_path=str(folder) if kvcache.ssd else None,
        ssd_bytes=limits.max_bytes,
        ssd_free_floor_bytes=limits.free_floor_bytes,
        ssd_write_bytes_per_day=limits.write_bytes_per_day,
        flush_interval_s=kvcache.flush_interval_s,
        snapshot_blocks=kvcache.snapshot_blocks,
        ssd_read_bytes_per_s=limits.read_bytes_per_s,
        calibration_path=str(paths.calibration_file),
    )


def open_disk(kvcache: KVCacheConfig, paths: NodePaths) -> DiskTier:
    """The SSD tier, to look after it; it may be in use by workers meanwhile."""
    return DiskTier(*_disk_plan(kvcache, paths))


def _disk_plan(kvcache: KVCacheConfig, paths: NodePaths) -> tuple[Path, DiskLimits]:
    """Folder and limits of the SSD tier."""
    folder = Path(kvcache.path).expanduser() if kvcache.path else paths.kv
    max_bytes = _default_ssd_bytes(folder) if kvcache.ssd_bytes is None else kvcache.ssd_bytes
    return folder, DiskLimits(
        max_bytes,
        kvcache.ssd_free_floor_bytes,
        kvcache.ssd_write_bytes_per_day,
        kvcache.ssd_read_bytes_per_s,
    )


def _default_ssd_bytes(folder: Path) -> int:
    place = next(p for p in (folder, *folder.parents) if p.exists())
    return min(_SSD_BYTES, (shutil.disk_usage(place).free + used_bytes(folder)) // 5)


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
