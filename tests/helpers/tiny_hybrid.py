"""Writes a tiny hybrid model (attention and short convolution) with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

__all__ = ["copy_tokenizer", "random_weights", "write_tiny_hybrid"]

_WIDTH, _FEED_FORWARD, _HEADS, _L_CACHE = 128, 256, 4, 3
_KV_HEADS = (0, 2, 0, 2)


def write_tiny_hybrid(path: Path, tokenizer_from: Path) -> Path:
    """Architecture lfm2, four layers; the tokenizer is copied from another GGUF."""
    reader = gguf.GGUFReader(str(tokenizer_from))
    writer = gguf.GGUFWriter(str(path), "lfm2")
    _write_metadata(writer)
    n_vocab = copy_tokenizer(reader, writer)
    for name, shape in _shapes(n_vocab).items():
        writer.add_tensor(name, random_weights(name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: Any) -> None:
    writer.add_block_count(len(_KV_HEADS))
    writer.add_context_length(4096)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(list(_KV_HEADS))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_uint32("lfm2.shortconv.l_cache", _L_CACHE)


def copy_tokenizer(reader: Any, writer: Any) -> int:
    fields = {name: f for name, f in reader.fields.items() if name.startswith("tokenizer.")}
    for name, field in fields.items():
        kinds = list(field.types)
        if kinds[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), kinds[0])
    return len(fields["tokenizer.ggml.tokens"].data)


def _shapes(n_vocab: int) -> dict[str, tuple[int, ...]]:
    head = _WIDTH // _HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, _WIDTH),
        "token_embd_norm.weight": (_WIDTH,),
    }
    for i, kv_heads in enumerate(_KV_HEADS):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (_WIDTH,),
            "ffn_norm": (_WIDTH,),
            "ffn_gate": (_FEED_FORWARD, _WIDTH),
            "ffn_up": (_FEED_FORWARD, _WIDTH),
            "ffn_down": (_WIDTH, _FEED_FORWARD),
        }
        if kv_heads:
            layer |= {
                "attn_q": (_WIDTH, _WIDTH),
                "attn_k": (kv_heads * head, _WIDTH),
                "attn_v": (kv_heads * head, _WIDTH),
                "attn_output": (_WIDTH, _WIDTH),
                "attn_q_norm": (head,),
                "attn_k_norm": (head,),
            }
        else:
            layer |= {
                "shortconv.conv": (_WIDTH, _L_CACHE),
                "shortconv.in_proj": (3 * _WIDTH, _WIDTH),
                "shortconv.out_proj": (_WIDTH, _WIDTH),
            }
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def random_weights(name: str, shape: tuple[int, ...]) -> Any:
    random = np.random.default_rng(sum(name.encode()))
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return (random.standard_normal(shape) * 0.08).astype(np.float32)
