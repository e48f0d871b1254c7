"""Names of computed state: what must be equal for bytes to be interchangeable, and the hash chain.

A namespace stands for everything that changes the bytes of a KV cache; a block hash stands for all
tokens from the start of the sequence to the end of the block, inside one namespace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

__all__ = [
    "BLOCK_TOKENS",
    "BlockHash",
    "ModelIdentity",
    "Namespace",
    "chain",
    "child_hash",
    "root_hash",
    "snapshot_hash",
]

BLOCK_TOKENS = 64

Tokens = npt.NDArray[np.int32]
Namespace = NewType("Namespace", str)  # 32 hex digits: a folder name and a key
BlockHash = NewType("BlockHash", bytes)  # 16 bytes


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Everything besides the tokens that changes the bytes of the state.

    Context size, slot count, threads and port are not here: they do not change it.

    Args:
        fingerprint: hash of the model file's content.
        memory: the kinds of memory, as the engine names them (full, window, hybrid, recurrent).
        rope: base, scale and type of the rotation, as text.
        loras: (content hash, scale) of every adapter, in the order applied.
        build: version of the llama.cpp build that wrote the bytes.
        codec: version of our own framing.
    """

    fingerprint: str
    memory: str
    type_k: str
    type_v: str
    flash_attention: bool
    swa_full: bool
    rope: str
    loras: tuple[tuple[str, float], ...]
    build: str
    codec: int

    def namespace(self, tenant: str) -> Namespace:
        """`tenant` is a salt: two tenants never share a namespace, nor can one guess another's."""
        text = json.dumps([asdict(self), tenant], sort_keys=True).encode()
        return Namespace(hashlib.blake2b(text, digest_size=16).hexdigest())

    def describe(self) -> dict[str, object]:
        """For `namespace.json`; the tenant's salt is not part of it."""
        return asdict(self)


def root_hash(namespace: Namespace) -> BlockHash:
    """The parent of every first block."""
    return BlockHash(bytes.fromhex(namespace))


def child_hash(namespace: Namespace, parent: BlockHash, tokens: Tokens) -> BlockHash:
    """Name of the block that holds `tokens` behind `parent`; a tail is named the same way."""
    state = hashlib.blake2b(parent, digest_size=16, key=bytes.fromhex(namespace))
    state.update(np.ascontiguousarray(tokens, np.int32).data)
    return BlockHash(state.digest())


def snapshot_hash(namespace: Namespace, parent: BlockHash, tokens: Tokens) -> BlockHash:
    """Name of the uncuttable part of the state behind `tokens`, which follow `parent`."""
    name = child_hash(namespace, parent, tokens)
    return BlockHash(hashlib.blake2b(name, digest_size=16, person=b"snapshot").digest())


def chain(namespace: Namespace, tokens: Tokens) -> Iterator[BlockHash]:
    """Hashes of all full blocks of a sequence, first to last."""
    parent = root_hash(namespace)
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = child_hash(namespace, parent, tokens[start : start + BLOCK_TOKENS])
        yield parent
