from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from node.engine.base import GenerateRequest
from node.engine.messages import Finish, Load, Sampling
from node.engine.supervisor import EngineSupervisor
from node.errors import ContextLengthExceeded, EngineError, InvalidRequest, NoSpace, Unavailable

pytestmark = pytest.mark.model

PROMPT = ("<|im_start|>user\nTell a story of a fox.<|im_end|>\n<|im_start|>assistant\n",)


def no_smaller(_: Load) -> Load | None:
    return None


@asynccontextmanager
async def engine(load: Load) -> AsyncIterator[EngineSupervisor]:
    supervisor = EngineSupervisor(no_smaller, load, load_timeout_s=60)
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.close()


def with_engine(
    make_load: Callable[..., Load], test: Callable[[EngineSupervisor], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        async with engine(make_load()) as supervisor:
            await test(supervisor)

    asyncio.run(main())


def story(n: int = 30, prompt: tuple[str, ...] = PROMPT) -> GenerateRequest:
    return GenerateRequest(prompt, Sampling(), max_tokens=n, ignore_eos=True)


async def collect(
    supervisor: EngineSupervisor, request: GenerateRequest, kill_at: tuple[int, ...] = ()
) -> tuple[str, Finish]:
    text, n_tokens = "", 0
    async with aclosing(supervisor.generate(request)) as events:
        async for event in events:
            if isinstance(event, Finish):
                return text, event
            text += event.text
            n_tokens += len(event.tokens)
            if n_tokens in kill_at and supervisor.pid:
                os.kill(supervisor.pid, signal.SIGKILL)
    raise AssertionError("no finish")


def test_a_stream_survives_the_death_of_its_worker(make_load: Callable[..., Load]) -> None:
    async def check(supervisor: EngineSupervisor) -> None:
        whole, _ = await collect(supervisor, story())
        text, finish = await collect(supervisor, story(), kill_at=(7,))
        assert text == whole
        assert finish.usage.completion_tokens == 30
        assert supervisor.restarts == 1

    with_engine(make_load, check)


def test_a_prompt_that_kills_three_times_fails_alone(make_load: Callable[..., Load]) -> None:
    async def check(supervisor: EngineSupervisor) -> None:
        other = asyncio.create_task(collect(supervisor, story(60, ("Once upon a time",))))
        with pytest.raises(EngineError, match="crashed 3 times"):
            await collect(supervisor, story(200), kill_at=(2, 4, 6, 8, 10, 12))
        _, finish = await other
        assert finish.usage.completion_tokens == 60

    with_engine(make_load, check)


def test_closing_the_stream_frees_the_sequence(make_load: Callable[..., Load]) -> None:
    async def check(supervisor: EngineSupervisor) -> None:
        events = supervisor.generate(story(1000))
        await anext(events)
        await events.aclose()
        while (await supervisor.stats()).running:
            await asyncio.sleep(0.01)
        assert (await supervisor.stats()).idle_sequences == 1

    with_engine(make_load, check)


def test_what_is_wrong_with_a_request_is_an_error_of_its_kind(
    make_load: Callable[..., Load],
) -> None:
    async def check(supervisor: EngineSupervisor) -> None:
        with pytest.raises(ContextLengthExceeded, match="2048"):
            await collect(supervisor, story(prompt=("word " * 3000,)))
        with pytest.raises(InvalidRequest) as caught:
            await collect(supervisor, GenerateRequest((), Sampling()))
        assert caught.value.param == "prompt"

    with_engine(make_load, check)


def test_a_request_that_cannot_be_sent_fails_alone(make_load: Callable[..., Load]) -> None:
    async def check(supervisor: EngineSupervisor) -> None:
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            await collect(supervisor, story(prompt=("half a pair: \ud83d",)))
        _, finish = await collect(supervisor, story(2))
        assert finish.usage.completion_tokens == 2

    with_engine(make_load, check)


def test_a_closed_engine_refuses_instead_of_waiting(make_load: Callable[..., Load]) -> None:
    async def check(supervisor: EngineSupervisor) -> None:
        await supervisor.close()
        with pytest.raises(Unavailable):
            await collect(supervisor, story())
        with pytest.raises(Unavailable):
            await supervisor.stats()

    with_engine(make_load, check)


def test_a_worker_that_cannot_be_started_is_an_error(
    make_load: Callable[..., Load], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EngineError, match="could not be started"):
        asyncio.run(EngineSupervisor(no_smaller, make_load(), load_timeout_s=60).start())


def test_text_becomes_tokens_and_text_again(make_load: Callable[..., Load]) -> None:
    async def check(supervisor: EngineSupervisor) -> None:
        tokens = await supervisor.tokenize("Grüße 😀", add_special=False, parse_special=False)
        assert await supervisor.detokenize(tokens) == "Grüße 😀"

    with_engine(make_load, check)


def test_a_load_that_fails_for_memory_is_tried_smaller(make_load: Callable[..., Load]) -> None:
    huge = msgspec.structs.replace(make_load(), n_ctx=2**24)
    plans = iter([msgspec.structs.replace(huge, n_ctx=512)])

    async def main() -> None:
        supervisor = EngineSupervisor(lambda _: next(plans, None), huge, load_timeout_s=60)
        await supervisor.start()
        assert supervisor.info.n_ctx == 512
        await supervisor.close()
        hopeless = EngineSupervisor(no_smaller, huge, load_timeout_s=60)
        with pytest.raises(NoSpace):
            await hopeless.start()

    asyncio.run(main())


def test_a_file_that_is_no_model_is_an_error(make_load: Callable[..., Load], tmp_path: Any) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    load = msgspec.structs.replace(make_load(), path=str(tmp_path / "x.gguf"))

    async def main() -> None:
        with pytest.raises(EngineError, match="could not be loaded"):
            await EngineSupervisor(no_smaller, load, load_timeout_s=60).start()

    asyncio.run(main())
