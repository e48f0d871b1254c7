"""Where a model would go on this machine under the node's settings."""

from __future__ import annotations

from node.config import EngineConfig
from node.hardware import detect_hardware
from node.models import GGUFHeader, PlacementPlan, PlacementRequest, plan_placement

__all__ = ["plan_here"]


def plan_here(header: GGUFHeader, engine: EngineConfig) -> PlacementPlan:
    """Raises NoSpace when nothing fits."""
    request = PlacementRequest(
        n_ctx=engine.n_ctx,
        gpu_layers=engine.gpu_layers,
        kv_type=engine.kv_type,
        threads=engine.threads,
        n_batch=engine.n_batch,
        max_sequences=engine.max_sequences,
        memory_limit_bytes=engine.memory_limit_bytes,
    )
    return plan_placement(header, detect_hardware(), request)
