"""How far a prompt is kept below the device, and in which pieces: DRAM first, then the disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache import codec
from kvcache.blockfile import Entry
from kvcache.disk import DiskTier
from kvcache.dram import Block, DramTier
from kvcache.keys import BLOCK_TOKENS, BlockHash, Namespace, chain, child_hash, root_hash
from kvcache.radix import common_prefix

__all__ = ["Lookup", "Step", "Way", "parents_of", "pieces_on"]

Tokens = npt.NDArray[np.int32]


class Step(NamedTuple):
    """A piece on the way along a prompt, and how many of its tokens are wanted."""

    piece: Block | Entry
    n_tokens: int


class Way(NamedTuple):
    """Pieces of the positions [0, end), and the snapshot at `end` where the model needs one."""

    steps: list[Step]
    snapshot: Block | Entry | None
    end: int


class Lookup:
    """Not thread-safe as far as DRAM goes: the caller holds its lock."""

    def __init__(self, dram: DramTier, disk: DiskTier | None, memory: codec.Memory) -> None:
        self._dram = dram
        self._disk = disk
        self._has_blocks = codec.has_blocks(memory)
        self._has_snapshots = codec.has_snapshots(memory)

    def way(self, namespace: Namespace, tokens: Tokens, least: int, *, also_disk: bool) -> Way:
        """The longest one; empty when it would not lead beyond the first `least` tokens."""
        disk = self._disk if also_disk else None
        steps = self._steps(namespace, tokens, disk) if self._has_blocks else []
        end = sum(step.n_tokens for step in steps) if self._has_blocks else len(tokens)
        snapshot = None
        if self._has_snapshots:
            snapshot = self._snapshot(namespace, tokens[:end], least, disk)
            end = snapshot.end if snapshot else 0
        if end <= least:
            return Way([], None, 0)
        wanted = [Step(piece, min(n, end - piece.start)) for piece, n in steps if piece.start < end]
        return Way(wanted, snapshot, end)

    def _steps(self, namespace: Namespace, tokens: Tokens, disk: DiskTier | None) -> list[Step]:
        steps: list[Step] = []
        parent, at = root_hash(namespace), 0
        while at < len(tokens):
            rest = tokens[at : at + BLOCK_TOKENS]
            if len(rest) == BLOCK_TOKENS:
                name = child_hash(namespace, parent, rest)
                block = self._dram.find(name) or (disk and disk.find(namespace, name))
                if block and np.array_equal(block.tokens, rest):
                    steps.append(Step(block, BLOCK_TOKENS))
                    parent, at = name, at + BLOCK_TOKENS
                    continue
            near = [p for p in self._children(namespace, parent, disk) if p.kind != "snapshot"]
            shared = [Step(piece, common_prefix(piece.tokens, rest)) for piece in near]
            best = max(shared, key=lambda step: step.n_tokens, default=None)
            if best is not None and best.n_tokens:
                steps.append(best)
            break
        return steps

    def _snapshot(
        self, namespace: Namespace, tokens: Tokens, least: int, disk: DiskTier | None
    ) -> Block | Entry | None:
        """The last one at or before the end of `tokens`."""
        parents = parents_of(namespace, tokens)
        for i in range(len(parents) - 1, -1, -1):
            at = i * BLOCK_TOKENS
            if at + BLOCK_TOKENS <= least:
                break
            rest = tokens[at : at + BLOCK_TOKENS]
            fitting = [
                piece
                for piece in self._children(namespace, parents[i], disk)
                if piece.kind == "snapshot"
                and np.array_equal(piece.tokens, rest[: len(piece.tokens)])
            ]
            if fitting:
                return max(fitting, key=lambda piece: piece.end)
        return None

    def _children(
        self, namespace: Namespace, parent: BlockHash, disk: DiskTier | None
    ) -> list[Block | Entry]:
        found: list[Block | Entry] = [*self._dram.children(parent)]
        if disk is not None:
            known = {piece.hash for piece in found}
            found += [e for e in disk.children(namespace, parent) if e.hash not in known]
        return found


def pieces_on(way: Way) -> list[Block | Entry]:
    pieces = [step.piece for step in way.steps]
    return pieces if way.snapshot is None else [*pieces, way.snapshot]


def parents_of(namespace: Namespace, tokens: Tokens) -> Sequence[BlockHash]:
    """Entry i is the parent of the block that begins at i blocks."""
    return [root_hash(namespace), *chain(namespace, tokens)]
