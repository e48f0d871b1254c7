"""Writes a tiny model with sliding-window attention and random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from tiny_hybrid import copy_tokenizer, random_weights

__all__ = ["WINDOW", "write_tiny_window"]

WINDOW = 32
_LAYERS, _WIDTH, _FEED_FORWARD, _HEADS = 4, 128, 256, 4


def write_tiny_window(path: Path, tokenizer_from: Path, window: int = WINDOW) -> Path:
    """Architecture cohere2: three layers see a window, the fourth sees all."""
    writer = gguf.GGUFWriter(str(path), "cohere2")
    _write_metadata(writer, window)
    n_vocab = copy_tokenizer(gguf.GGUFReader(str(tokenizer_from)), writer)
    for name, shape in _shapes(n_vocab).items():
        writer.add_tensor(name, random_weights(name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: Any, window: int) -> None:
    writer.add_block_count(_LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_logit_scale(1.0)
    writer.add_rope_freq_base(10_000.0)
    writer.add_sliding_window(window)


def _shapes(n_vocab: int) -> dict[str, tuple[int, ...]]:
    square = ("attn_q", "attn_k", "attn_v", "attn_output")
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (_WIDTH,),
        "ffn_gate": (_FEED_FORWARD, _WIDTH),
        "ffn_up": (_FEED_FORWARD, _WIDTH),
        "ffn_down": (_WIDTH, _FEED_FORWARD),
        **dict.fromkeys(square, (_WIDTH, _WIDTH)),
    }
    blocks = {
        f"blk.{i}.{name}.weight": shape for i in range(_LAYERS) for name, shape in layer.items()
    }
    return {"token_embd.weight": (n_vocab, _WIDTH), "output_norm.weight": (_WIDTH,), **blocks}
