"""The engine as the rest of the daemon sees it: an async generator of deltas per request.

`Engine` is implemented by `node.engine.supervisor.EngineSupervisor` (a worker process) and by
`tests` with an in-memory fake. Neither the API nor the pool knows more than this.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from node.engine.messages import (
    Constraint,
    Delta,
    Finish,
    ModelInfo,
    Sampling,
    Stats,
)

__all__ = ["Engine", "GenerateRequest"]


class GenerateRequest(msgspec.Struct, frozen=True):
    """One sequence to generate; see `messages.Submit` for the fields."""

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


class Engine(Protocol):
    """One loaded model."""

    @property
    def info(self) -> ModelInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta | Finish]:
        """Yield deltas and, last, one Finish.

        Closing the iterator (`aclose`) cancels the request; its sequence is free within one
        batch. A worker crash is not seen here unless the same request crashes it three times.

        Raises:
            ContextLengthExceeded: prompt longer than the window; message has both numbers.
            InvalidRequest: a constraint that does not compile; `param` names the field.
            EngineError: the worker could not finish this request.
        """
        ...

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    async def detokenize(self, tokens: Sequence[int]) -> str: ...

    async def stats(self) -> Stats: ...

    async def flush_cache(self) -> bool:
        """Bring everything computed to the disk; false when that took too long."""
        ...

    async def purge_cache(self, namespace: str) -> bool:
        """Forget computed state in memory, or that of one namespace; false when a write that had
        begun did not end in time."""
        ...
