"""What daemon and worker say to each other over the pipe, as msgspec structs.

A frame is a little-endian u32 length and one msgpack message. The daemon sends `Command`s, the
worker answers with `Report`s. A request is known by `request_id` on both sides.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "CachePlan",
    "Cancel",
    "Command",
    "Constraint",
    "Delta",
    "Detokenize",
    "Fail",
    "Finish",
    "FlushCache",
    "Load",
    "LoadFailed",
    "ModelInfo",
    "PurgeCache",
    "Ready",
    "Report",
    "Reply",
    "Resume",
    "Sampling",
    "StatsRequest",
    "Stats",
    "Step",
    "Submit",
    "TokenLogprob",
    "Tokenize",
    "Usage",
]


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is chosen. Temperature 0 is greedy. Defaults change nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """The output must match `gbnf`, whose start rule is `root`. With `after`, free text is allowed
    until that marker has been written. `param` is the field that asked for it."""

    gbnf: str
    after: str | None = None
    param: str = "response_format"


class Resume(msgspec.Struct, frozen=True, array_like=True):
    """Where a request stood when its worker died: tokens it had produced, and how much text
    of them had been handed over (the rest was held back)."""

    tokens: tuple[int, ...]
    emitted_chars: int


class CachePlan(msgspec.Struct, frozen=True, array_like=True):
    """Tiers below the device. No `ssd_path`: no disk tier. Sizes in bytes, `calibration_path` is
    the file that keeps what was measured on this machine; `ssd_read_bytes_per_s` slows the disk
    down (0 does not)."""

    dram_bytes: int
    ssd_path: str | None
    ssd_bytes: int
    ssd_free_floor_bytes: int
    ssd_write_bytes_per_day: int
    flush_interval_s: float
    snapshot_blocks: int = 8
    ssd_read_bytes_per_s: float = 0.0
    calibration_path: str | None = None


class Load(msgspec.Struct, frozen=True, tag="load"):
    """First message: which file to open and with which plan; `name` is for people."""

    path: str
    n_ctx: int
    n_batch: int
    n_ubatch: int
    max_sequences: int
    gpu_layers: int
    type_k: str
    type_v: str
    threads: int | None
    tensor_overrides: tuple[str, ...] = ()
    use_mmap: bool = True
    token_gap_ms: float = 100.0
    cache: CachePlan | None = None
    name: str = ""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """One sequence to generate.

    `prompt` is a list of text segments, each tokenised by itself with special tokens read, or
    token ids. `max_tokens` None means: until the window is full. Requests of different tenants
    never share computed state.
    """

    request_id: int
    prompt: tuple[str | int, ...]
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    constraint: Constraint | None = None
    ignore_eos: bool = False
    render_special: bool = False
    cache_prompt: bool = True
    add_bos: bool = True
    tenant: str = ""
    resume: Resume | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: int


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    call_id: int
    text: str
    add_special: bool = False
    parse_special: bool = True


class Detokenize(msgspec.Struct, frozen=True, tag="detokenize"):
    call_id: int
    tokens: tuple[int, ...]


class StatsRequest(msgspec.Struct, frozen=True, tag="stats"):
    call_id: int


class FlushCache(msgspec.Struct, frozen=True, tag="flush"):
    """Answered with a Reply when all that is computed is on the disk."""

    call_id: int


class PurgeCache(msgspec.Struct, frozen=True, tag="purge"):
    """Forget kept state, or that of one namespace; files are not touched. Answered with a Reply."""

    call_id: int
    namespace: str = ""


Command = Load | Submit | Cancel | Tokenize | Detokenize | StatsRequest | FlushCache | PurgeCache


class ModelInfo(msgspec.Struct, frozen=True):
    """What the worker learnt from the loaded model."""

    description: str
    architecture: str
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_params: int
    size_bytes: int
    chat_template: str | None
    bos_token: str
    eos_token: str
    special_tokens: tuple[str, ...]
    add_bos: bool
    can_fork: bool
    threads: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: ModelInfo


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """`kind`: memory (a smaller plan may help) or model (it will not)."""

    kind: str
    message: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """`text_bytes` is the piece of the token; `top` holds (token bytes, logprob), best first."""

    text_bytes: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one sequence by where they came from, and its times.

    cached + computed = prompt tokens; cached = device + dram + ssd. Times are seconds on the
    worker's clock.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    dram_tokens: int = 0
    ssd_tokens: int = 0

    @property
    def device_tokens(self) -> int:
        return self.cached_tokens - self.dram_tokens - self.ssd_tokens


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """New output of one sequence after a step. `text` may be empty while bytes are held back."""

    request_id: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """`reason`: stop, length or cancelled. `stop_string` is the one that ended it, if any."""

    request_id: int
    reason: str
    usage: Usage
    stop_string: str | None = None


class Fail(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended with an error. `code` and `param` as in the API's error."""

    request_id: int
    code: str
    message: str
    param: str | None = None


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Everything one engine step produced, in one frame."""

    deltas: tuple[Delta, ...] = ()
    finished: tuple[Finish, ...] = ()
    failed: tuple[Fail, ...] = ()


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Answer to Tokenize or Detokenize."""

    call_id: int
    tokens: tuple[int, ...] = ()
    text: str = ""


class Stats(msgspec.Struct, frozen=True, tag="stats_reply"):
    call_id: int
    waiting: int
    running: int
    idle_sequences: int
    cells_total: int
    cells_free: int
    threads: int
    prompt_tokens_total: int
    cached_tokens_total: int
    computed_tokens_total: int
    completion_tokens_total: int
    steps_total: int
    preemptions_total: int
    dram_tokens_total: int = 0
    ssd_tokens_total: int = 0
    demotions_total: int = 0
    cache: dict[str, Any] = {}


Report = Ready | LoadFailed | Step | Reply | Stats
