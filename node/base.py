"""Loaded models as the API sees them. `node.pool.ModelPool` implements `Pool`; tests fake it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from node.engine.base import Engine
from node.engine.messages import Stats

if TYPE_CHECKING:
    from node.chat import ChatModel

__all__ = ["LoadedModel", "ModelCard", "ModelState", "Pool"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in use. `chat` is None when the file has no chat template."""

    id: str
    engine: Engine
    chat: ChatModel | None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One installed model. `context_tokens` is the loaded window, else what the model was made
    for; None for a file that cannot be read."""

    id: str
    created_s: int
    size_bytes: int
    context_tokens: int | None
    loaded: bool
    source: str


@dataclass(frozen=True, slots=True)
class ModelState:
    """One loaded (or loading) model with its plan in words and its counters."""

    id: str
    state: str  # loading | ready | restarting
    pid: int | None
    n_ctx: int
    gpu_layers: int
    rss_bytes: int
    in_use: int
    idle_s: float
    expires_in_s: float | None
    restarts: int
    plan: tuple[str, ...]
    stats: Stats | None


class Pool(Protocol):
    """Loads on demand, shares memory between models, unloads the idle."""

    async def models(self) -> list[ModelCard]: ...

    def resolve(self, name: str) -> str:
        """The id of an installed model; "local" and "auto" mean the default model.

        Raises:
            NotFound: no such model; the message names what is installed.
        """
        ...

    def use(self, name: str) -> AbstractAsyncContextManager[LoadedModel]:
        """Hold a model, loading it first if need be; it is not unloaded while held."""
        ...

    async def load(self, name: str, keep_alive_s: float | None = None) -> str: ...

    async def unload(self, name: str) -> str:
        """Raises Conflict when the model is busy, NotFound when it is not loaded."""
        ...

    async def states(self) -> list[ModelState]: ...

    async def flush_cache(self) -> bool:
        """Bring what all loaded models have computed to the disk; false when not all of it is."""
        ...

    async def purge_cache(self, namespace: str) -> bool:
        """Forget computed state in memory, or that of one namespace; false when not all is gone."""
        ...

    @property
    def loading(self) -> bool:
        """True while a model is being loaded and none is ready to answer."""
        ...

    async def close(self) -> None: ...
