"""The models of a node: loads them on demand within the machine's memory, unloads the idle.

All state belongs to the daemon's event loop. Files are `node.models`' business, tokens the
engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from node.base import LoadedModel, ModelCard, ModelState
from node.chat import ChatModel
from node.config import NodeConfig
from node.engine.messages import Load, ModelInfo
from node.engine.supervisor import EngineSupervisor
from node.errors import Conflict, NodeError, NoSpace, NotFound, Unavailable
from node.hardware import process_rss_bytes
from node.models import (
    InstalledModel,
    ModelStore,
    PlacementPlan,
    check_gguf,
    smaller,
)
from node.paths import NodePaths
from node.plan import plan_cache, plan_here
from router import decide

__all__ = ["ModelPool", "chat_model"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_LISTING_AGE_S = 10.0


class _Slot:
    """One model that is loaded or being loaded."""

    def __init__(self, model: InstalledModel, keep_alive_s: float) -> None:
        self.model = model
        self.keep_alive_s = keep_alive_s
        self.in_use = 0
        self.last_used = time.monotonic()
        self.plan: PlacementPlan | None = None
        self.engine: EngineSupervisor | None = None
        self.loaded: LoadedModel | None = None
        self.ready: asyncio.Task[None] | None = None

    @property
    def idle_s(self) -> float:
        return 0.0 if self.in_use else time.monotonic() - self.last_used

    @property
    def expires_in_s(self) -> float | None:
        if self.keep_alive_s == 0 or self.in_use or self.loaded is None:
            return None
        return max(0.0, self.keep_alive_s - self.idle_s)


class ModelPool:
    """Implements `node.base.Pool`. Without `paths` nothing is kept below the device."""

    def __init__(
        self, store: ModelStore, config: NodeConfig, paths: NodePaths | None = None
    ) -> None:
        self._store = store
        self._config = config
        self._paths = paths
        self._slots: dict[str, _Slot] = {}
        self._load_lock = asyncio.Lock()
        self._reaper: asyncio.Task[None] | None = None
        self._listing: tuple[float, dict[str, InstalledModel]] = (-_LISTING_AGE_S, {})
        self._closing = False
        self._ending: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"ModelPool({', '.join(f'{k}: {s.in_use} in use' for k, s in self._slots.items())})"

    @property
    def loading(self) -> bool:
        return bool(self._slots) and all(s.loaded is None for s in self._slots.values())

    async def models(self) -> list[ModelCard]:
        models = await asyncio.to_thread(self._store.list)
        self._listing = (time.monotonic(), {model.name: model for model in models})
        return [await self._card(model) for model in models]

    def resolve(self, name: str) -> str:
        wanted = decide(name, self._config.models.default).model
        if wanted in self._slots or wanted in self._installed():
            return wanted
        return self._store.find(wanted).name

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[LoadedModel]:
        async with self._held(self._slot(self.resolve(name))) as loaded:
            yield loaded

    async def load(self, name: str, keep_alive_s: float | None = None) -> str:
        slot = self._slot(self.resolve(name))
        if keep_alive_s is not None:
            # The longest wish wins; 0 means never to unload.
            forever = 0 in (keep_alive_s, slot.keep_alive_s)
            slot.keep_alive_s = 0 if forever else max(keep_alive_s, slot.keep_alive_s)
        async with self._held(slot) as loaded:
            return loaded.id

    async def unload(self, name: str) -> str:
        model_id = self.resolve(name)
        slot = self._slots.get(model_id)
        if slot is None:
            raise NotFound(f"model {model_id!r} is not loaded", param="model")
        if slot.in_use or slot.loaded is None:
            raise Conflict(f"model {model_id!r} is busy; try again when its requests are done")
        await self._close(slot)
        return model_id

    async def states(self) -> list[ModelState]:
        return [await self._state(model_id, slot) for model_id, slot in list(self._slots.items())]

    async def flush_cache(self) -> bool:
        return all([await engine.flush_cache() for engine in self._ready_engines()])

    async def purge_cache(self, namespace: str) -> bool:
        return all([await engine.purge_cache(namespace) for engine in self._ready_engines()])

    async def close(self) -> None:
        self._closing = True
        tasks = [s.ready for s in self._slots.values() if s.ready and not s.ready.done()]
        if self._reaper is not None:
            tasks.append(self._reaper)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._close(slot) for slot in list(self._slots.values())))
        await asyncio.gather(*self._ending)

    def _ready_engines(self) -> list[EngineSupervisor]:
        return [s.engine for s in self._slots.values() if s.loaded is not None and s.engine]

    def _installed(self) -> dict[str, InstalledModel]:
        when, models = self._listing
        if time.monotonic() - when > _LISTING_AGE_S:
            models = {model.name: model for model in self._store.list()}
            self._listing = (time.monotonic(), models)
        return models

    async def _card(self, model: InstalledModel) -> ModelCard:
        slot = self._slots.get(model.name)
        info = slot.engine.info if slot and slot.loaded and slot.engine else None
        return ModelCard(
            id=model.name,
            created_s=int(model.created_s),
            size_bytes=model.size_bytes,
            context_tokens=info.n_ctx if info else await asyncio.to_thread(_trained_for, model),
            loaded=info is not None,
            source=model.source,
        )

    async def _state(self, model_id: str, slot: _Slot) -> ModelState:
        engine, pid = slot.engine, slot.engine.pid if slot.engine else None
        stats = None
        if slot.loaded is not None and engine is not None:
            with contextlib.suppress(NodeError):  # a worker that is restarting has no counters
                stats = await engine.stats()
        return ModelState(
            id=model_id,
            state=engine.state if engine else "loading",
            pid=pid,
            n_ctx=engine.info.n_ctx if engine and slot.loaded else 0,
            gpu_layers=slot.plan.gpu_layers if slot.plan else 0,
            rss_bytes=process_rss_bytes(pid) or 0 if pid else 0,
            in_use=slot.in_use,
            idle_s=slot.idle_s,
            expires_in_s=slot.expires_in_s,
            restarts=engine.restarts if engine else 0,
            plan=slot.plan.lines if slot.plan else (),
            stats=stats,
        )

    def _slot(self, model_id: str) -> _Slot:
        if self._closing:
            raise Unavailable("the node is shutting down")
        if model_id not in self._slots:
            model = self._installed().get(model_id) or self._store.find(model_id)
            slot = _Slot(model, self._config.engine.keep_alive_s)
            self._slots[model_id] = slot
            slot.ready = asyncio.create_task(self._load(slot))
            slot.ready.add_done_callback(_note_failure)
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._unload_expired())
        return self._slots[model_id]

    @asynccontextmanager
    async def _held(self, slot: _Slot) -> AsyncIterator[LoadedModel]:
        """The model, loaded; what is held is not unloaded."""
        slot.in_use += 1
        try:
            yield await self._loaded(slot)
        finally:
            slot.in_use -= 1
            slot.last_used = time.monotonic()

    async def _loaded(self, slot: _Slot) -> LoadedModel:
        if slot.loaded is None:
            assert slot.ready is not None
            # Shielded: a client that leaves does not stop the load for the others.
            await asyncio.shield(slot.ready)
        assert slot.loaded is not None
        return slot.loaded

    async def _load(self, slot: _Slot) -> None:
        started = time.monotonic()
        try:
            async with self._load_lock:
                engine = await self._start_engine(slot)
        except BaseException:
            self._slots.pop(slot.model.name, None)
            raise
        slot.loaded = LoadedModel(slot.model.name, engine, chat_model(engine.info))
        slot.last_used = time.monotonic()
        logger.info(
            "loaded %s: %d context tokens, %d layers on the GPU, %.1f s",
            slot.model.name,
            engine.info.n_ctx,
            slot.plan.gpu_layers if slot.plan else 0,
            time.monotonic() - started,
        )

    async def _start_engine(self, slot: _Slot) -> EngineSupervisor:
        """Plan and load; while memory is short, idle models make room, oldest first."""
        while True:
            try:
                slot.plan = await asyncio.to_thread(self._plan, slot.model)
                return await self._try_plan(slot)
            except NoSpace:
                idle = [s for s in self._slots.values() if s.loaded and not s.in_use]
                if not idle:
                    raise
                await self._close(min(idle, key=lambda s: s.last_used))

    async def _try_plan(self, slot: _Slot) -> EngineSupervisor:
        def next_load(_: Load) -> Load | None:
            assert slot.plan is not None
            plan = smaller(slot.plan)
            if plan is None:
                return None
            slot.plan = plan
            return self._message(slot.model, plan)

        assert slot.plan is not None
        engine = EngineSupervisor(
            next_load,
            self._message(slot.model, slot.plan),
            self._config.engine.load_timeout_s,
            on_failure=lambda error: self._forget(slot, error),
        )
        slot.engine = engine
        await engine.start()
        return engine

    def _plan(self, model: InstalledModel) -> PlacementPlan:
        limit = self._config.engine.memory_limit_bytes
        if limit is not None:
            plans = [s.plan for s in self._slots.values() if s.plan and s.loaded]
            limit = max(0, limit - sum(plan.ram_bytes for plan in plans))
        return plan_here(check_gguf(model.path), self._config.engine, limit)

    def _message(self, model: InstalledModel, plan: PlacementPlan) -> Load:
        return Load(
            path=str(model.path),
            n_ctx=plan.n_ctx,
            n_batch=plan.n_batch,
            n_ubatch=plan.n_ubatch,
            max_sequences=plan.max_sequences,
            gpu_layers=plan.gpu_layers,
            type_k=plan.type_k,
            type_v=plan.type_v,
            threads=plan.threads,
            tensor_overrides=plan.tensor_overrides,
            use_mmap=plan.use_mmap,
            name=model.name,
            token_gap_ms=self._config.engine.token_gap_ms,
            cache=plan_cache(self._config.kvcache, self._paths) if self._paths else None,
        )

    async def _close(self, slot: _Slot) -> None:
        self._slots.pop(slot.model.name, None)
        slot.loaded = None
        if slot.engine is not None:
            # Shielded: whoever asked may leave, and the worker must end all the same.
            task = asyncio.create_task(slot.engine.close())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            await asyncio.shield(task)
            logger.info("unloaded %s", slot.model.name)

    def _forget(self, slot: _Slot, error: NodeError) -> None:
        logger.error("%s is given up: %s", slot.model.name, error.message)
        self._slots.pop(slot.model.name, None)

    async def _unload_expired(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for slot in list(self._slots.values()):
                if slot.expires_in_s == 0:
                    await self._close(slot)


def _trained_for(model: InstalledModel) -> int | None:
    """From the file's header; it is read once in the life of a daemon."""
    try:
        return check_gguf(model.path).context_tokens
    except NodeError:
        return None


def _note_failure(task: asyncio.Task[None]) -> None:
    """Marks the error as seen, in case every client left while the model was loading."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("load failed: %s", error)


def chat_model(info: ModelInfo) -> ChatModel | None:
    """None for a model without a chat template."""
    if not info.chat_template:
        return None
    return ChatModel(
        info.chat_template,
        info.bos_token,
        info.eos_token,
        info.special_tokens,
        architecture=info.architecture,
    )
