"""Builds GGUF files byte by byte, right or wrong on purpose, and headers of well-known models."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from node.models import GGUFHeader, TensorInfo

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return u64(len(data)) + data


def pair(key: str | bytes, value: object) -> bytes:
    """One metadata entry; `bytes` are taken as type and value ready made."""
    if isinstance(value, bytes):
        return text(key) + value
    if isinstance(value, bool):
        return text(key) + u32(BOOL) + bytes([value])
    if isinstance(value, int):
        return text(key) + u32(U32) + u32(value)
    if isinstance(value, str):
        return text(key) + u32(STRING) + text(value)
    assert isinstance(value, list)
    if value and isinstance(value[0], str):
        return text(key) + u32(ARRAY) + u32(STRING) + u64(len(value)) + b"".join(map(text, value))
    return (
        text(key) + u32(ARRAY) + u32(I32) + u64(len(value)) + struct.pack(f"<{len(value)}i", *value)
    )


def tensor(name: str, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    dims = u32(len(shape)) + b"".join(map(u64, shape))
    return text(name) + dims + u32(kind) + u64(offset)


BASICS: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 2048,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}
TENSORS = (tensor("token_embd.weight", (64, 3)), tensor("blk.0.attn_k.weight", (64, 32), 0, 768))
DATA_BYTES = 768 + 8192


@dataclass(frozen=True, slots=True)
class GGUFBytes:
    """A file to be: `keys` and `tensors` are encoded entries, counts may lie."""

    keys: tuple[bytes, ...] = tuple(pair(k, v) for k, v in BASICS.items())
    tensors: tuple[bytes, ...] = TENSORS
    data_bytes: int = DATA_BYTES
    version: int = 3
    n_keys: int | None = None
    n_tensors: int | None = None
    magic: bytes = b"GGUF"
    alignment: int = 32

    def encode(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        head = self.magic + u32(self.version) + u64(n_tensors) + u64(n_keys)
        head += b"".join(self.keys) + b"".join(self.tensors)
        return head + bytes(-len(head) % self.alignment) + bytes(self.data_bytes)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encode())
        return path


def with_keys(**changes: object) -> tuple[bytes, ...]:
    """The basic metadata with changes; dots are written as two underscores, None leaves out."""
    merged = {**BASICS, **{key.replace("__", "."): value for key, value in changes.items()}}
    return tuple(pair(key, value) for key, value in merged.items() if value is not None)


def write_split(folder: Path, count: int = 2, total: int = 2, second: int = 1) -> Path:
    """A model in two parts, which may contradict each other; returns the first."""
    for number, part_tensor in enumerate(TENSORS[:2]):
        name = folder / f"m-{number + 1:05}-of-{count:05}.gguf"
        size = (768, 8192)[number]
        entry = part_tensor if number == 0 else tensor("blk.0.attn_k.weight", (64, 32))
        keys = with_keys(
            split__no=second if number else 0, split__count=count, split__tensors__count=total
        )
        GGUFBytes(keys=keys, tensors=(entry,), data_bytes=size).write(name)
    return folder / f"m-00001-of-{count:05}.gguf"


def known_header(
    architecture: str,
    *,
    layers: int,
    embd: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    context: int,
    bits: float = 4.85,
    experts: int = 0,
    tied: bool = False,
) -> GGUFHeader:
    """A header with the sizes of a published model at `bits` a weight."""

    def info(name: str, rows: int, columns: int) -> TensorInfo:
        return TensorInfo(name, (rows, columns), "Q4_K", 0, int(rows * columns * bits / 8))

    tensors = [info("token_embd.weight", embd, vocab)]
    if not tied:
        tensors.append(info("output.weight", embd, vocab))
    for i in range(layers):
        kv, many = kv_heads * head_dim, max(1, experts)
        ffn_name = "ffn_{}_exps.weight" if experts else "ffn_{}.weight"
        tensors += [
            info(f"blk.{i}.attn_q.weight", embd, heads * head_dim),
            info(f"blk.{i}.attn_k.weight", embd, kv),
            info(f"blk.{i}.attn_v.weight", embd, kv),
            info(f"blk.{i}.attn_output.weight", heads * head_dim, embd),
            *(
                info(f"blk.{i}.{ffn_name.format(p)}", embd, ffn * many)
                for p in ("up", "gate", "down")
            ),
        ]
    metadata: dict[str, str | int | float | bool | list[str | int | float | bool]] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": context,
        f"{architecture}.embedding_length": embd,
        f"{architecture}.feed_forward_length": ffn,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.vocab_size": vocab,
    }
    if experts:
        metadata[f"{architecture}.expert_count"] = experts
        metadata[f"{architecture}.expert_used_count"] = 4
    size = sum(t.size_bytes for t in tensors)
    return GGUFHeader(3, dict(metadata), tuple(tensors), ("model.gguf",), size)


KNOWN = {
    "smollm2-135m": known_header(
        "llama", layers=30, embd=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49_152,
        context=8192, tied=True,
    ),
    "llama-3.1-8b": known_header(
        "llama", layers=32, embd=4096, heads=32, kv_heads=8, head_dim=128, ffn=14_336,
        vocab=128_256, context=131_072,
    ),
    "qwen3-14b": known_header(
        "qwen3", layers=40, embd=5120, heads=40, kv_heads=8, head_dim=128, ffn=17_408,
        vocab=151_936, context=40_960,
    ),
    "gemma-3-12b": known_header(
        "gemma3", layers=48, embd=3840, heads=16, kv_heads=8, head_dim=256, ffn=15_360,
        vocab=262_208, context=131_072, tied=True,
    ),
    "gpt-oss-20b": known_header(
        "gpt-oss", layers=24, embd=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880,
        vocab=201_088, context=131_072, bits=4.6, experts=32,
    ),
    "qwen3-30b-a3b": known_header(
        "qwen3moe", layers=48, embd=2048, heads=32, kv_heads=4, head_dim=128, ffn=768,
        vocab=151_936, context=262_144, experts=128,
    ),
}  # fmt: skip
