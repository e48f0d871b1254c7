"""What computed state exists, where it lives, when it moves. Knows no model library."""

from __future__ import annotations

from kvcache.cells import CellPool
from kvcache.disk import DiskLimits, DiskTier, used_bytes
from kvcache.keys import BLOCK_TOKENS, ModelIdentity
from kvcache.loads import Ticket
from kvcache.manager import KVCacheManager, Piece
from kvcache.radix import RadixTree, common_prefix
from kvcache.sequences import Device, Opened, SeqId, Sequence, SequencePool

__all__ = [
    "BLOCK_TOKENS",
    "CellPool",
    "Device",
    "DiskLimits",
    "DiskTier",
    "KVCacheManager",
    "ModelIdentity",
    "Opened",
    "Piece",
    "RadixTree",
    "SeqId",
    "Sequence",
    "SequencePool",
    "Ticket",
    "common_prefix",
    "used_bytes",
]
