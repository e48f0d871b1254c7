"""What makes two loaded models interchangeable for the KV cache."""

from __future__ import annotations

import hashlib
import re
from importlib.metadata import version
from pathlib import Path

from kvcache import ModelIdentity, codec
from node.engine.messages import Load

__all__ = ["fingerprint", "identify"]

_HEAD_BYTES = 8 * 2**20
_SAMPLES, _SAMPLE_BYTES = 256, 16 * 2**10
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def identify(load: Load, memory: codec.Memory) -> ModelIdentity:
    """RoPE settings are those of the file, which the fingerprint covers."""
    return ModelIdentity(
        fingerprint=fingerprint(Path(load.path)),
        memory=memory,
        type_k=load.type_k,
        type_v=load.type_v,
        flash_attention=True,
        swa_full=True,
        rope="file",
        loras=(),
        build=f"llama-cpp-python {version('llama-cpp-python')}",
        codec=codec.CODEC_VERSION,
    )


def fingerprint(path: Path) -> str:
    """Hash of a model file's size, its first megabytes (all metadata, most of the vocabulary) and
    256 samples spread over the weights; of all parts of a split file."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(path):
        size = part.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with part.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for i in range(_SAMPLES):
                file.seek(size * i // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _parts(path: Path) -> list[Path]:
    match = _PART.search(path.name)
    if match is None:
        return [path]
    stem = path.name[: match.start()]
    names = [f"{stem}-{i:05}-of-{match[2]}.gguf" for i in range(1, int(match[2]) + 1)]
    return [path.with_name(name) for name in names if path.with_name(name).exists()]
