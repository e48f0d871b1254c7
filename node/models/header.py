"""What the header of a GGUF file says: values only, and the questions others ask of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from node.errors import BadModelFile

__all__ = ["MAX_LAYERS", "ArrayInfo", "GGUFHeader", "MetaValue", "Scalar", "TensorInfo", "brief"]

Scalar = str | int | float | bool

MAX_LAYERS = 4096


class TensorInfo(NamedTuple):
    """`offset` counts from the start of the data section of the file the tensor is in."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """A metadata array that was too long to keep."""

    type: str
    length: int


MetaValue = str | int | float | bool | list[Scalar] | ArrayInfo


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What the header says, of all parts of a split file together.

    Properties raise BadModelFile when a key they need is missing or senseless; `check_gguf` has
    read them all once, so they do not fail on a header that came from there.
    """

    version: int
    metadata: dict[str, MetaValue]
    tensors: tuple[TensorInfo, ...]
    files: tuple[str, ...]
    size_bytes: int

    @property
    def architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value):
            raise BadModelFile("the GGUF does not say which architecture it is")
        return value

    @property
    def name(self) -> str | None:
        return self.text("general.name")

    @property
    def licence(self) -> str | None:
        return self.text("general.license")

    @property
    def chat_template(self) -> str | None:
        return self.text("tokenizer.chat_template")

    @property
    def context_tokens(self) -> int:
        """The window the model was trained for."""
        return self.number("context_length", low=1, high=2**31 - 1)

    @property
    def n_layers(self) -> int:
        return self.number("block_count", low=1, high=MAX_LAYERS)

    @property
    def n_embd(self) -> int:
        return self.number("embedding_length", low=1, high=2**24)

    @property
    def n_vocab(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, ArrayInfo):
            return tokens.length
        if isinstance(tokens, list) and tokens:
            return len(tokens)
        return self.number("vocab_size", low=0, high=2**26, default=0)

    @property
    def n_heads(self) -> tuple[int, ...]:
        """Attention heads of each layer; 0 where a layer has none."""
        return self.per_layer("attention.head_count", default=0)

    @property
    def n_heads_kv(self) -> tuple[int, ...]:
        """Key/value heads of each layer; 0 where a layer keeps no KV."""
        key = "attention.head_count_kv"
        if f"{self.architecture}.{key}" not in self.metadata:
            return self.n_heads
        return self.per_layer(key, default=0)

    @property
    def key_length(self) -> int:
        return self.number("attention.key_length", low=0, high=2**20, default=self._head_dim())

    @property
    def value_length(self) -> int:
        return self.number("attention.value_length", low=0, high=2**20, default=self._head_dim())

    @property
    def n_experts(self) -> int:
        return self.number("expert_count", low=0, high=65_536, default=0)

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str, *, low: int, high: int, default: int | None = None) -> int:
        """An integer of this architecture, as in `llama.block_count`."""
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise BadModelFile(f"{full} is {brief(value)}; expected a number from {low} to {high}")
        return value

    def per_layer(self, key: str, *, default: int, high: int = 65_536) -> tuple[int, ...]:
        """A value that is one number for all layers, or an array with one for each."""
        full, n_layers = f"{self.architecture}.{key}", self.n_layers
        value = self.metadata.get(full, default)
        values = value if isinstance(value, list) else [value] * n_layers
        good = all(
            isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= high for v in values
        )
        # A model with extra prediction layers may list only the ordinary ones.
        if not good or not values or len(values) > MAX_LAYERS:
            raise BadModelFile(f"{full} is not a sane number for each layer")
        numbers = [v for v in values if isinstance(v, int)]
        return tuple((numbers + [numbers[-1]] * n_layers)[:n_layers])

    def _head_dim(self) -> int:
        heads = max(self.n_heads)
        return self.n_embd // heads if heads else 0


def brief(value: Any) -> str:
    """`repr`, cut to a length that fits an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
