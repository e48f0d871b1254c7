"""Several real models in one node: load on demand, memory, idle unload."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.base import LoadedModel
from node.config import EngineConfig, NodeConfig
from node.engine.base import GenerateRequest
from node.engine.messages import Finish, Sampling
from node.errors import Conflict, NoSpace, NotFound
from node.hardware import process_rss_bytes
from node.models import ModelStore, pull
from node.paths import node_paths
from node.pool import ModelPool

pytestmark = pytest.mark.model


@pytest.fixture
def store(tmp_path: Path, model_path: Path) -> ModelStore:
    """The same file under two names, which are two models to the node."""
    paths = node_paths(tmp_path)
    paths.create()
    store = ModelStore(paths, discover=False)
    for name in ("first:tiny", "second:tiny"):
        pull(store, f"file:{model_path}={name}")
    return store


def with_pool(
    store: ModelStore, test: Callable[[ModelPool], Coroutine[Any, Any, None]], **engine: Any
) -> None:
    config = NodeConfig(engine=replace(EngineConfig(n_ctx=512, max_sequences=4), **engine))

    async def main() -> None:
        pool = ModelPool(store, config)
        try:
            await test(pool)
        finally:
            await pool.close()

    asyncio.run(main())


async def say(loaded: LoadedModel) -> Finish:
    request = GenerateRequest(("Hello",), Sampling(), max_tokens=2)
    events = [event async for event in loaded.engine.generate(request)]
    assert isinstance(events[-1], Finish)
    return events[-1]


async def loaded_ids(pool: ModelPool) -> list[str]:
    return [state.id for state in await pool.states()]


def test_a_model_is_loaded_when_it_is_first_used(store: ModelStore) -> None:
    async def check(pool: ModelPool) -> None:
        assert await loaded_ids(pool) == []
        async with pool.use("first:tiny") as loaded:
            assert (await say(loaded)).usage.completion_tokens == 2
            assert loaded.chat is not None
        assert await loaded_ids(pool) == ["first:tiny"]
        assert [c.loaded for c in await pool.models()] == [True, False]

    with_pool(store, check)


def test_requests_that_come_while_a_model_loads_share_the_load(store: ModelStore) -> None:
    async def check(pool: ModelPool) -> None:
        async def one() -> int | None:
            async with pool.use("first:tiny") as loaded:
                await say(loaded)
                return (await pool.states())[0].pid

        assert len(set(await asyncio.gather(one(), one(), one()))) == 1

    with_pool(store, check)


def test_an_idle_model_is_unloaded_after_its_keep_alive(store: ModelStore) -> None:
    async def check(pool: ModelPool) -> None:
        await pool.load("first:tiny")
        for _ in range(100):
            if not await loaded_ids(pool):
                return
            await asyncio.sleep(0.1)
        raise AssertionError("still loaded")

    with_pool(store, check, keep_alive_s=0.3)


def test_an_unload_that_is_given_up_ends_the_worker_all_the_same(store: ModelStore) -> None:
    async def check(pool: ModelPool) -> None:
        await pool.load("first:tiny")
        pid = (await pool.states())[0].pid
        unload = asyncio.create_task(pool.unload("first:tiny"))
        await asyncio.sleep(0)
        unload.cancel()
        await pool.close()
        assert pid is not None and process_rss_bytes(pid) is None

    with_pool(store, check)


def test_the_longest_keep_alive_wins_and_zero_means_for_ever(store: ModelStore) -> None:
    async def check(pool: ModelPool) -> None:
        await pool.load("first:tiny", keep_alive_s=500)
        await pool.load("first:tiny", keep_alive_s=5)
        (state,) = await pool.states()
        assert state.expires_in_s is not None and state.expires_in_s > 400
        await pool.load("first:tiny", keep_alive_s=0)
        assert (await pool.states())[0].expires_in_s is None

    with_pool(store, check, keep_alive_s=60)


def test_two_models_fit_side_by_side(store: ModelStore) -> None:
    async def check(pool: ModelPool) -> None:
        await pool.load("first:tiny")
        await pool.load("second:tiny")
        assert await loaded_ids(pool) == ["first:tiny", "second:tiny"]

    with_pool(store, check)


def test_the_states_can_be_read_while_another_model_starts_to_load(store: ModelStore) -> None:
    async def check(pool: ModelPool) -> None:
        await pool.load("first:tiny")
        states = asyncio.create_task(pool.states())
        await asyncio.sleep(0)
        second = asyncio.create_task(pool.load("second:tiny"))
        assert [state.id for state in await states] == ["first:tiny"]
        await second

    with_pool(store, check)


async def _one_models_bytes(store: ModelStore) -> int:
    pool = ModelPool(store, NodeConfig(engine=EngineConfig(n_ctx=512, max_sequences=4)))
    return pool._plan(store.find("first:tiny")).ram_bytes


def test_memory_for_one_means_the_idle_one_goes_and_the_busy_one_stays(store: ModelStore) -> None:
    one_bytes = asyncio.run(_one_models_bytes(store))

    async def check(pool: ModelPool) -> None:
        await pool.load("first:tiny")
        await pool.load("second:tiny")
        assert await loaded_ids(pool) == ["second:tiny"]
        async with pool.use("second:tiny"):
            with pytest.raises(NoSpace):
                await pool.load("first:tiny")
        assert await loaded_ids(pool) == ["second:tiny"]

    with_pool(store, check, memory_limit_bytes=int(one_bytes * 1.5))


def test_a_busy_model_is_not_unloaded(store: ModelStore) -> None:
    async def check(pool: ModelPool) -> None:
        async with pool.use("first:tiny"):
            with pytest.raises(Conflict):
                await pool.unload("first:tiny")
        assert await pool.unload("first:tiny") == "first:tiny"
        with pytest.raises(NotFound):
            await pool.unload("first:tiny")

    with_pool(store, check)


def test_an_unknown_model_is_not_found_and_says_what_is(store: ModelStore) -> None:
    async def check(pool: ModelPool) -> None:
        with pytest.raises(NotFound, match="first:tiny|nothing like it"):
            await pool.load("frst:tiny")

    with_pool(store, check)


def test_closing_while_a_model_loads_leaves_no_process(store: ModelStore) -> None:
    async def check(pool: ModelPool) -> None:
        task = asyncio.create_task(pool.load("first:tiny"))
        while not any(state.pid for state in await pool.states()):
            await asyncio.sleep(0)
        await pool.close()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], BaseException)
        assert await loaded_ids(pool) == []

    with_pool(store, check)
