"""llama.cpp through its ctypes binding: model, context, batch, state.

Only this module and `llama_sampling` import `llama_cpp`, and only worker processes load them. They
own the foreign memory and turn return codes into exceptions; they decide nothing.
"""

from __future__ import annotations

import ctypes
import re
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import llama_cpp.llama_cpp as ffi
import numpy as np
import numpy.typing as npt

from node.engine.messages import Load, ModelInfo

__all__ = ["LlamaContext", "LlamaModel", "LoadError", "NoSlot", "build_info", "forget", "reason"]

Tokens = npt.NDArray[np.int32]
Blob = npt.NDArray[np.uint8]
Memory = Literal["full", "window", "hybrid", "recurrent"]

_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "q4_0": 2}

_HEADER_TOKENS = 8  # control tokens nearer than this belong to one message header

_log: deque[str] = deque(maxlen=40)
_alive: list[Any] = []  # objects that C code keeps a pointer to


class LoadError(Exception):
    """`memory` is true when a smaller plan may help."""

    def __init__(self, message: str, *, memory: bool) -> None:
        super().__init__(message)
        self.memory = memory


class NoSlot(Exception):
    """`decode` found no free cells; nothing was computed."""


def build_info() -> dict[str, Any]:
    """Version and abilities of the installed llama.cpp."""
    import llama_cpp

    _start_backend()
    return {
        "version": llama_cpp.__version__,
        "system_info": ffi.llama_print_system_info().decode(errors="replace").strip(),
        "gpu_offload": bool(ffi.llama_supports_gpu_offload()),
        "mmap": bool(ffi.llama_supports_mmap()),
    }


class LlamaModel:
    """Weights and vocabulary. Tokenising is safe from any thread."""

    def __init__(self, load: Load) -> None:
        _start_backend()
        _log.clear()
        params = ffi.llama_model_default_params()
        params.n_gpu_layers = load.gpu_layers
        params.load_mode = ffi.LLAMA_LOAD_MODE_MMAP if load.use_mmap else ffi.LLAMA_LOAD_MODE_NONE
        overrides = _tensor_overrides(load.tensor_overrides)
        if overrides is not None:
            params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        handle = ffi.llama_model_load_from_file(load.path.encode(), params)
        if not handle:
            raise LoadError(reason("the model could not be loaded"), memory=_log_tells_of_memory())
        self.handle: Any = handle
        self.vocab: Any = ffi.llama_model_get_vocab(handle)
        self.n_vocab = int(ffi.llama_vocab_n_tokens(self.vocab))
        self.n_ctx_train = int(ffi.llama_model_n_ctx_train(handle))
        self.window_tokens = int(ffi.llama_model_n_swa(handle))
        self.can_fork = self.memory in ("full", "window")
        attributes = np.array(
            [ffi.llama_vocab_get_attr(self.vocab, t) for t in range(self.n_vocab)], np.int32
        )
        self._special = attributes & (ffi.LLAMA_TOKEN_ATTR_CONTROL | ffi.LLAMA_TOKEN_ATTR_UNKNOWN)
        self._user_defined = attributes & ffi.LLAMA_TOKEN_ATTR_USER_DEFINED
        self.eog = np.array(
            [t for t in range(self.n_vocab) if ffi.llama_vocab_is_eog(self.vocab, t)], np.int32
        )
        self._eog_set = frozenset(self.eog.tolist())
        self._pieces: dict[tuple[int, bool], bytes] = {}

    @property
    def memory(self) -> Memory:
        """What kind of state the model computes."""
        if ffi.llama_model_is_recurrent(self.handle):
            return "recurrent"
        if ffi.llama_model_is_hybrid(self.handle):
            return "hybrid"
        return "window" if self.window_tokens else "full"

    def message_starts(self, tokens: Tokens) -> list[int]:
        """Positions where a message begins: a control token that does not end one, some way
        behind the last such."""
        control = (self._special[tokens] != 0) & ~np.isin(tokens, self.eog)
        starts: list[int] = []
        for position in np.flatnonzero(control).tolist():
            if position and (not starts or position - starts[-1] >= _HEADER_TOKENS):
                starts.append(position)
        return starts

    def is_eog(self, token: int) -> bool:
        return token in self._eog_set

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        data = text.encode("utf-8", errors="replace")
        size = len(data) + 8
        out = np.empty(size, np.int32)
        pointer = out.ctypes.data_as(ffi.llama_token_p)
        n = ffi.llama_tokenize(
            self.vocab, data, len(data), pointer, size, add_special, parse_special
        )
        if n < 0:  # more tokens than bytes does not happen; kept as a check on the binding
            raise ValueError("the text could not be tokenised")
        return out[:n]

    def piece(self, token: int, *, special: bool) -> bytes:
        """Bytes of one token; empty for special tokens unless `special`."""
        key = (token, special)
        known = self._pieces.get(key)
        if known is not None:
            return known
        buffer = ctypes.create_string_buffer(64)
        n = ffi.llama_token_to_piece(self.vocab, token, buffer, 64, 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = ffi.llama_token_to_piece(self.vocab, token, buffer, -n, 0, special)
        piece = self._pieces[key] = buffer.raw[:n]
        return piece

    @property
    def adds_bos(self) -> bool:
        return bool(ffi.llama_vocab_get_add_bos(self.vocab))

    @property
    def bos(self) -> int:
        return int(ffi.llama_vocab_bos(self.vocab))

    def info(self, n_ctx: int, threads: int) -> ModelInfo:
        text = ctypes.create_string_buffer(256)
        ffi.llama_model_desc(self.handle, text, 256)
        template = ffi.llama_model_chat_template(self.handle, None)
        eos = int(ffi.llama_vocab_eos(self.vocab))
        return ModelInfo(
            description=text.value.decode(errors="replace"),
            architecture=self._metadata("general.architecture"),
            n_ctx=n_ctx,
            n_ctx_train=self.n_ctx_train,
            n_vocab=self.n_vocab,
            n_params=int(ffi.llama_model_n_params(self.handle)),
            size_bytes=int(ffi.llama_model_size(self.handle)),
            chat_template=template.decode(errors="replace") if template else None,
            bos_token=self._text(self.bos),
            eos_token=self._text(eos),
            special_tokens=self._special_texts(),
            add_bos=self.adds_bos,
            can_fork=self.can_fork,
            threads=threads,
        )

    def _special_texts(self) -> tuple[str, ...]:
        """Texts that the tokenizer would read as control tokens. User-defined tokens count when
        they look like markup; runs of spaces and the like are ordinary text."""
        control = [self._text(int(t)) for t in np.flatnonzero(self._special)]
        user = [self._text(int(t)) for t in np.flatnonzero(self._user_defined)]
        markup = [text for text in user if re.fullmatch(r"<.+>|\[.+\]", text)]
        return tuple(dict.fromkeys(text for text in control + markup if text))

    def _text(self, token: int) -> str:
        if not 0 <= token < self.n_vocab:
            return ""
        text: bytes = ffi.llama_vocab_get_text(self.vocab, token)
        return text.decode("utf-8", errors="replace")

    def _metadata(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        n = ffi.llama_model_meta_val_str(self.handle, key.encode(), buffer, 256)
        return buffer.value.decode(errors="replace") if n >= 0 else ""


class LlamaContext:
    """KV cache and compute buffers of one model, and the batch they are fed from.

    The batch's arrays are mapped with numpy once; `decode` only assigns slices.
    """

    def __init__(self, model: LlamaModel, load: Load, threads: int) -> None:
        params = ffi.llama_context_default_params()
        params.n_ctx = load.n_ctx
        params.n_batch = load.n_batch
        params.n_ubatch = min(load.n_ubatch, load.n_batch)
        params.n_seq_max = load.max_sequences + 1
        params.kv_unified = True
        params.flash_attn_type = 1
        params.swa_full = True
        params.no_perf = True
        params.type_k, params.type_v = _TYPES[load.type_k], _TYPES[load.type_v]
        params.n_threads = params.n_threads_batch = threads
        handle = ffi.llama_init_from_model(model.handle, params)
        if not handle:
            raise LoadError(reason("the context could not be created"), memory=True)
        self._handle: Any = handle
        self._memory: Any = ffi.llama_get_memory(handle)
        self._n_vocab = model.n_vocab
        self._window_tokens = model.window_tokens
        self.n_ctx = int(ffi.llama_n_ctx(handle))
        self.n_batch = int(ffi.llama_n_batch(handle))
        self.n_sequences = load.max_sequences
        self._scratch = load.max_sequences  # a sequence id nobody else uses
        self.threads = threads
        self._map_batch()

    def _map_batch(self) -> None:
        n = self.n_batch
        batch = ffi.llama_batch_init(n, 0, 1)
        self._batch = batch
        self._token = np.ctypeslib.as_array(batch.token, (n,))
        self._pos = np.ctypeslib.as_array(batch.pos, (n,))
        self._wants_logits = np.ctypeslib.as_array(batch.logits, (n,))
        np.ctypeslib.as_array(batch.n_seq_id, (n,))[:] = 1
        self._seq = np.zeros(n, np.int32)
        pointers = ctypes.cast(batch.seq_id, ctypes.POINTER(ctypes.c_size_t))
        np.ctypeslib.as_array(pointers, (n,))[:] = self._seq.ctypes.data + np.arange(n) * 4

    def set_threads(self, threads: int) -> None:
        self.threads = threads
        ffi.llama_set_n_threads(self._handle, threads, threads)

    def decode(self, runs: Sequence[tuple[int, int, Tokens, bool]]) -> None:
        """Evaluate runs of (sequence id, first position, tokens, logits of the last wanted).

        Raises:
            NoSlot: not enough free cells; the memory is as before.
            RuntimeError: llama.cpp refused the batch.
        """
        n = 0
        for seq_id, position, tokens, wants_logits in runs:
            end = n + len(tokens)
            self._token[n:end] = tokens
            self._pos[n:end] = np.arange(position, position + len(tokens), dtype=np.int32)
            self._seq[n:end] = seq_id
            self._wants_logits[n:end] = 0
            self._wants_logits[end - 1] = wants_logits
            n = end
        self._batch.n_tokens = n
        code = ffi.llama_decode(self._handle, self._batch)
        if code == 1:
            raise NoSlot
        if code != 0:
            raise RuntimeError(reason(f"llama_decode returned {code}"))

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Logits of the batch row, shape (n_vocab,); a view, valid until the next decode."""
        return np.ctypeslib.as_array(ffi.llama_get_logits_ith(self._handle, row), (self._n_vocab,))

    def seq_cp(self, source: int, target: int, end: int) -> None:
        """Share the cells of positions [0, end) with another sequence."""
        ffi.llama_memory_seq_cp(self._memory, source, target, 0, end)

    def seq_rm(self, seq_id: int, start: int = 0) -> bool:
        """Forget positions from `start` on; false where the model cannot cut there."""
        return bool(ffi.llama_memory_seq_rm(self._memory, seq_id, start, -1))

    def can_resume(self, seq_id: int, position: int) -> bool:
        """False when window cells before `position` are gone: even with `swa_full` llama.cpp gives
        a cell that only one sequence has, and that has left its window, to whoever comes next."""
        if self._window_tokens == 0:
            return True
        oldest = int(ffi.llama_memory_seq_pos_min(self._memory, seq_id))
        return oldest <= max(0, position - self._window_tokens)

    def state_bytes(self, seq_id: int, start: int, end: int) -> int:
        """Size of what `read_state` writes."""
        ffi.llama_memory_seq_cp(self._memory, seq_id, self._scratch, start, end)
        size = int(ffi.llama_state_seq_get_size_ext(self._handle, self._scratch, 0))
        self.seq_rm(self._scratch)
        return size

    def read_state(self, seq_id: int, start: int, end: int, out: Blob) -> bool:
        """Copy the state of positions [start, end); false when it does not fill `out` exactly."""
        ffi.llama_memory_seq_cp(self._memory, seq_id, self._scratch, start, end)
        n = ffi.llama_state_seq_get_data_ext(
            self._handle, _pointer(out), len(out), self._scratch, 0
        )
        self.seq_rm(self._scratch)
        return int(n) == len(out)

    def snapshot_bytes(self, seq_id: int, *, whole: bool) -> int:
        """Size of what `read_snapshot` writes."""
        flags = 0 if whole else ffi.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        return int(ffi.llama_state_seq_get_size_ext(self._handle, seq_id, flags))

    def read_snapshot(self, seq_id: int, out: Blob, *, whole: bool) -> bool:
        """Copy the part of a sequence's state that cannot be cut, or all of it."""
        flags = 0 if whole else ffi.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        n = ffi.llama_state_seq_get_data_ext(self._handle, _pointer(out), len(out), seq_id, flags)
        return int(n) == len(out)

    def write_state(self, seq_id: int, start: int, end: int, blob: Blob) -> bool:
        """Give a sequence the state of positions [start, end), which must continue it; false when
        llama.cpp refused, and then the sequence is as before.

        `set_data` empties its destination, hence the detour.
        """
        n = ffi.llama_state_seq_set_data_ext(
            self._handle, _pointer(blob), len(blob), self._scratch, 0
        )
        if n:
            ffi.llama_memory_seq_cp(self._memory, self._scratch, seq_id, start, end)
        self.seq_rm(self._scratch)
        return int(n) == len(blob)


def _pointer(blob: Blob) -> Any:
    return blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class _BufferOverride(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def _tensor_overrides(patterns: Sequence[str]) -> Any:
    """`REGEX=CPU` entries as the null-terminated array that the loader reads; None for none."""
    if not patterns:
        return None
    from llama_cpp import _ggml

    cpu_buffer = _ggml.libggml.ggml_backend_cpu_buffer_type
    cpu_buffer.restype = ctypes.c_void_p
    entries = (_BufferOverride * (len(patterns) + 1))()
    for entry, pattern in zip(entries, patterns, strict=False):
        regex, _, device = pattern.rpartition("=")
        if device != "CPU" or not regex:
            raise LoadError(f"tensor override {pattern!r} is not REGEX=CPU", memory=False)
        entry.pattern, entry.buft = regex.encode(), cpu_buffer()
    _alive.append(entries)
    return entries


def _start_backend() -> None:
    if not _alive:
        callback = ffi.llama_log_callback(_on_log)
        _alive.append(callback)
        ffi.llama_log_set(callback, ctypes.c_void_p(None))
        ffi.llama_backend_init()


def _on_log(level: int, text: bytes, _data: Any) -> None:
    if level in (3, 4):  # GGML_LOG_LEVEL_WARN, GGML_LOG_LEVEL_ERROR
        _log.append(text.decode(errors="replace").strip())


def forget() -> None:
    """What llama.cpp has said so far is nobody's reason."""
    _log.clear()


def reason(what: str) -> str:
    """`what`, with what llama.cpp has said last."""
    errors = [line for line in _log if "error" in line.lower() or "fail" in line.lower()]
    detail = "; ".join(dict.fromkeys((errors or list(_log))[-3:]))
    return f"{what}: {detail}"[:500] if detail else what


def _log_tells_of_memory() -> bool:
    text = " ".join(_log).lower()
    return any(word in text for word in ("alloc", "out of memory", "memory", "buffer"))
