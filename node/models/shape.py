"""How many bytes the parts of a model take: weights by layer, KV by token, state by sequence.

Numbers come from the tensor table where it tells, from metadata otherwise. Nothing is decided.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from node.models.header import GGUFHeader, TensorInfo

__all__ = ["KV_TYPES", "LayerShape", "ModelShape", "model_shape"]

# Bytes of one block of 32 elements of the KV cache.
KV_TYPES = {"f16": 64, "q8_0": 34}

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERTS = re.compile(r"ffn_.*_exps\.")
_RECURRENT = ("ssm_", "shortconv", "time_mix_")
_F32 = 4


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer. `kv_elements` are those one token adds to K and V together."""

    dense_bytes: int = 0
    expert_bytes: int = 0
    kv_elements: int = 0
    state_bytes: int = 0

    def kv_bytes(self, kv_type: str) -> int:
        return -(-self.kv_elements // 32) * KV_TYPES[kv_type]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`tied_bytes` is the embedding that serves as output too: it is copied if that is on a GPU.

    `compute_*` are the largest temporaries of a step, for one token of it; `logits_bytes` is what
    one sequence's logits take in main memory.
    """

    layers: tuple[LayerShape, ...]
    input_bytes: int
    output_bytes: int
    tied_bytes: int
    largest_tensor_bytes: int
    context_tokens: int
    compute_output_bytes: int
    compute_layer_bytes: int
    logits_bytes: int

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def weight_bytes(self) -> int:
        layers = sum(layer.dense_bytes + layer.expert_bytes for layer in self.layers)
        return layers + self.input_bytes + self.output_bytes

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.expert_bytes)

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence, all layers together."""
        return sum(layer.state_bytes for layer in self.layers)

    def kv_bytes_per_token(self, kv_type: str) -> int:
        return sum(layer.kv_bytes(kv_type) for layer in self.layers)

    def compute_bytes(self, n_ubatch: int, n_ctx: int) -> int:
        """Scratch of one step: the mask lives beside a layer's temporaries, logits come last."""
        layer = n_ubatch * (self.compute_layer_bytes + n_ctx * (_F32 + 2))
        return max(layer, n_ubatch * self.compute_output_bytes)


def model_shape(header: GGUFHeader) -> ModelShape:
    by_layer: list[list[tuple[str, TensorInfo]]] = [[] for _ in range(header.n_layers)]
    rest: dict[str, TensorInfo] = {}
    for tensor in header.tensors:
        match = _LAYER.fullmatch(tensor.name)
        if match and int(match[1]) < header.n_layers:
            by_layer[int(match[1])].append((match[2], tensor))
        else:
            rest[tensor.name] = tensor
    output = sum(t.size_bytes for name, t in rest.items() if name.startswith("output"))
    embedding = rest.get("token_embd.weight")
    n_vocab = max(header.n_vocab, embedding.shape[-1] if embedding else 0)
    tied = embedding.size_bytes if embedding and "output.weight" not in rest else 0
    layers = tuple(_layer(header, index, tensors) for index, tensors in enumerate(by_layer))
    return ModelShape(
        layers=layers,
        input_bytes=sum(t.size_bytes for t in rest.values()) - output,
        output_bytes=output,
        tied_bytes=tied,
        largest_tensor_bytes=max(t.size_bytes for t in header.tensors),
        context_tokens=header.context_tokens,
        compute_output_bytes=_F32 * (n_vocab + 2 * header.n_embd),
        logits_bytes=_F32 * n_vocab,
        compute_layer_bytes=_F32 * _layer_elements(header),
    )


def _layer(header: GGUFHeader, index: int, named: Iterable[tuple[str, TensorInfo]]) -> LayerShape:
    tensors = dict(named)
    experts = sum(t.size_bytes for name, t in tensors.items() if _EXPERTS.match(name))
    total = sum(t.size_bytes for t in tensors.values())
    recurrent = any(name.startswith(_RECURRENT) for name in tensors)
    return LayerShape(
        dense_bytes=total - experts,
        expert_bytes=experts,
        kv_elements=_kv_elements(header, index, tensors, recurrent),
        state_bytes=_state_elements(header, tensors) * _F32 if recurrent else 0,
    )


def _kv_elements(
    header: GGUFHeader, index: int, tensors: dict[str, TensorInfo], recurrent: bool
) -> int:
    n_layers, heads = header.n_layers, header.n_heads_kv[index]
    shared = header.number("attention.shared_kv_layers", low=0, high=n_layers, default=0)
    key = tensors.get("attn_k.weight")
    if index >= n_layers - shared or (heads == 0 and key is None):
        return 0
    if key is not None:
        # A model without V projection uses K for both.
        value = tensors.get("attn_v.weight", key)
        return key.shape[-1] + value.shape[-1]
    if recurrent and "attn_kv_a_mqa.weight" not in tensors:
        return 0
    return heads * (header.key_length + header.value_length)


def _state_elements(header: GGUFHeader, tensors: dict[str, TensorInfo]) -> int:
    def number(key: str) -> int:
        return header.number(key, low=0, high=2**24, default=0)

    if any(name.startswith("shortconv") for name in tensors):
        return header.n_embd * max(0, number("shortconv.l_cache") - 1)
    if any(name.startswith("time_mix_") for name in tensors):
        return header.n_embd * (2 + number("wkv.head_size"))
    inner, state = number("ssm.inner_size"), number("ssm.state_size")
    convolution = max(0, number("ssm.conv_kernel") - 1) * (
        inner + 2 * number("ssm.group_count") * state
    )
    return convolution + inner * state


def _layer_elements(header: GGUFHeader) -> int:
    """Elements that one token keeps alive inside the widest layer."""
    ffn = max(header.per_layer("feed_forward_length", default=0, high=2**24))
    expert = header.number("expert_feed_forward_length", low=0, high=2**24, default=ffn)
    used = header.number("expert_used_count", low=0, high=65_536, default=0)
    wide = max(2 * ffn, used * (2 * expert + header.n_embd))
    heads = max(header.n_heads) * (header.key_length + header.value_length)
    return 3 * header.n_embd + max(wide, heads + 2 * header.n_embd)
