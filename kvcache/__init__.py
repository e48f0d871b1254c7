"""What computed state exists, where it lives, when it moves. Knows no model library."""

from __future__ import annotations

from kvcache.cells import CellPool
from kvcache.sequences import Device, Opened, SeqId, Sequence, SequencePool, common_prefix

__all__ = ["CellPool", "Device", "Opened", "SeqId", "Sequence", "SequencePool", "common_prefix"]
