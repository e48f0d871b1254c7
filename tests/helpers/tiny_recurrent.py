"""Writes a tiny recurrent model (selective state space) with random weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tiny_hybrid import copy_tokenizer, random_weights

__all__ = ["write_tiny_recurrent"]

_WIDTH, _INNER, _STATE, _CONV, _RANK, _LAYERS = 128, 256, 16, 4, 8, 3


def write_tiny_recurrent(path: Path, tokenizer_from: Path) -> Path:
    """Architecture mamba, three layers; the tokenizer is copied from another GGUF."""
    writer = gguf.GGUFWriter(str(path), "mamba")
    writer.add_context_length(4096)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(_LAYERS)
    writer.add_ssm_conv_kernel(_CONV)
    writer.add_ssm_inner_size(_INNER)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(_RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    n_vocab = copy_tokenizer(gguf.GGUFReader(str(tokenizer_from)), writer)
    for name, shape in _shapes(n_vocab).items():
        weights = random_weights(name, shape)
        if name.endswith("ssm_a"):  # it must make the state decay
            weights = -np.exp(weights)
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(n_vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, _WIDTH),
        "output_norm.weight": (_WIDTH,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (_WIDTH,),
        "ssm_in.weight": (2 * _INNER, _WIDTH),
        "ssm_conv1d.weight": (_INNER, _CONV),
        "ssm_conv1d.bias": (_INNER,),
        "ssm_x.weight": (_RANK + 2 * _STATE, _INNER),
        "ssm_dt.weight": (_INNER, _RANK),
        "ssm_dt.bias": (_INNER,),
        "ssm_a": (_INNER, _STATE),
        "ssm_d": (_INNER,),
        "ssm_out.weight": (_WIDTH, _INNER),
    }
    for i in range(_LAYERS):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes
