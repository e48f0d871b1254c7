"""llama.cpp's samplers and grammars through its ctypes binding; see `llama` for the model."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import llama_cpp.llama_cpp as ffi
import numpy as np
import numpy.typing as npt

from node.engine.gbnf import GrammarError, check_gbnf
from node.engine.llama import LlamaModel, forget, reason
from node.engine.messages import Sampling

__all__ = ["Candidates", "Grammar", "GrammarError", "SamplerChain"]

Tokens = npt.NDArray[np.int32]

_DRY_BREAKERS = (b"\n", b":", b'"', b"*")
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class SamplerChain:
    """The samplers of one request that only look at logits and accepted tokens."""

    def __init__(self, model: LlamaModel, sampling: Sampling) -> None:
        self._chain: Any = ffi.llama_sampler_chain_init(ffi.llama_sampler_chain_default_params())
        for sampler in _samplers(model, sampling):
            ffi.llama_sampler_chain_add(self._chain, sampler)

    def accept(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            ffi.llama_sampler_accept(self._chain, token)

    def apply(self, candidates: Candidates) -> None:
        ffi.llama_sampler_apply(self._chain, ctypes.byref(candidates.array))

    def close(self) -> None:
        ffi.llama_sampler_free(self._chain)


class Candidates:
    """Token candidates in the layout that llama.cpp's samplers change in place."""

    def __init__(self, n: int) -> None:
        self._data = np.zeros(n, _CANDIDATE)
        self._ids = np.arange(n, dtype=np.int32)
        self._pointer: Any = self._data.ctypes.data_as(ctypes.POINTER(ffi.llama_token_data))
        self.array = ffi.llama_token_data_array()

    def fill(self, logits: npt.NDArray[np.float32]) -> None:
        self._data["id"] = self._ids
        self._data["logit"] = logits
        self._set_size(len(logits))

    def fill_one(self, token: int) -> None:
        self._data[0] = (token, 0.0, 0.0)
        self._set_size(1)

    def _set_size(self, n: int) -> None:
        self.array.data = self._pointer
        self.array.size, self.array.selected, self.array.sorted = n, -1, False

    @property
    def ids(self) -> Tokens:
        return self._data["id"][: self.array.size]

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        return self._data["logit"][: self.array.size]


class Grammar:
    """A compiled GBNF grammar and how far the output has got in it."""

    def __init__(self, model: LlamaModel, gbnf: str) -> None:
        check_gbnf(gbnf)
        forget()
        self._handle: Any = ffi.llama_sampler_init_grammar(model.vocab, gbnf.encode(), b"root")
        if not self._handle:
            raise GrammarError(reason("the grammar does not compile"))

    def mask(self, candidates: Candidates) -> None:
        """Set the logit of every candidate that the grammar forbids to -inf."""
        ffi.llama_sampler_apply(self._handle, ctypes.byref(candidates.array))

    def accept(self, token: int) -> None:
        """The token must be one that `mask` allows; llama.cpp aborts on any other."""
        ffi.llama_sampler_accept(self._handle, token)

    def close(self) -> None:
        ffi.llama_sampler_free(self._handle)


def _samplers(model: LlamaModel, s: Sampling) -> Iterable[Any]:
    if s.logit_bias:
        biases = (ffi.llama_logit_bias * len(s.logit_bias))(
            *(ffi.llama_logit_bias(token, bias) for token, bias in s.logit_bias)
        )
        yield ffi.llama_sampler_init_logit_bias(model.n_vocab, len(s.logit_bias), biases)
    if (s.repeat_penalty, s.frequency_penalty, s.presence_penalty) != (1.0, 0.0, 0.0):
        last_n = _look_back(model, s.repeat_last_n)
        yield ffi.llama_sampler_init_penalties(
            model.n_vocab, last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
        )
    if s.dry_multiplier > 0:
        breakers = (ctypes.c_char_p * len(_DRY_BREAKERS))(*_DRY_BREAKERS)
        last_n = _look_back(model, s.dry_penalty_last_n)
        yield ffi.llama_sampler_init_dry(
            model.vocab,
            s.dry_multiplier,
            s.dry_base,
            s.dry_allowed_length,
            last_n,
            breakers,
            len(_DRY_BREAKERS),
        )
    if s.temperature <= 0:
        return
    if s.top_k > 0:
        yield ffi.llama_sampler_init_top_k(s.top_k)
    if s.typical_p < 1:
        yield ffi.llama_sampler_init_typical(s.typical_p, 1)
    if s.top_p < 1:
        yield ffi.llama_sampler_init_top_p(s.top_p, 1)
    if s.min_p > 0:
        yield ffi.llama_sampler_init_min_p(s.min_p, 1)
    yield ffi.llama_sampler_init_temp(s.temperature)


def _look_back(model: LlamaModel, n_tokens: int) -> int:
    """-1 means all. Bounded, because the samplers allocate as much as they are told."""
    return min(n_tokens, model.n_ctx_train) if n_tokens >= 0 else model.n_ctx_train
