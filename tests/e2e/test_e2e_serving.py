"""The daemon as clients see it: the official package, many at once, clients that leave, memory."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from node.hardware import process_rss_bytes

pytestmark = pytest.mark.model

MODEL = "smollm2:135m"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(daemon: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0)


def ask(question: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0}
    return {**body, "max_tokens": 8, **more}


def test_an_agents_second_turn_reuses_the_first(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Name three birds of the garden."}]
    first = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=24, temperature=0
    )
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Which of them sings best?"},
    ]
    second = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, temperature=0
    )
    assert first.usage and second.usage and second.usage.prompt_tokens_details
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= first.usage.prompt_tokens


def test_a_streamed_tool_call_can_be_put_together(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice="required",
        stream=True,
        temperature=0,
        max_tokens=80,
    )
    name, arguments, finish = "", "", None
    for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.index == 0 and call.function
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    assert name == "get_weather"
    assert set(json.loads(arguments)) == {"city"}
    assert finish == "tool_calls"


def test_n_choices_share_one_prompt(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        **ask("Invent a name for a boat. " * 6, n=4, temperature=1.0, seed=3)
    )
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert len({c.message.content for c in reply.choices}) > 1


def test_json_schema_output_validates(client: openai.OpenAI) -> None:
    schema = {"name": "answer", "schema": WEATHER["function"]["parameters"]}
    reply = client.chat.completions.create(
        **ask(
            "Name a city as JSON.",
            response_format={"type": "json_schema", "json_schema": schema},
            max_tokens=60,
        )
    )
    assert set(json.loads(reply.choices[0].message.content or "")) == {"city"}


def test_forty_connections_at_once_all_get_an_answer(daemon: Any) -> None:
    def one(number: int) -> int:
        reply = httpx.post(
            f"{daemon.url}/v1/chat/completions", json=ask(f"Say {number}."), timeout=120
        )
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["completion_tokens"])

    with ThreadPoolExecutor(40) as threads:
        tokens = list(threads.map(one, range(40)))
    assert all(n > 0 for n in tokens)


def test_a_killed_worker_is_a_pause_not_an_error(daemon: Any) -> None:
    body = ask("Tell a long story of a fox.", max_tokens=60, stream=True, ignore_eos=True)
    whole = _stream_text(daemon, body)
    killed = _stream_text(daemon, body, at_token=10, act=lambda: _kill(daemon.worker_pid()))
    assert killed == whole


def test_a_client_that_leaves_frees_its_sequence(daemon: Any) -> None:
    body = ask("Count to a million.", max_tokens=3000, stream=True, ignore_eos=True)
    with httpx.stream("POST", f"{daemon.url}/v1/chat/completions", json=body, timeout=60) as reply:
        next(reply.iter_lines())
    with daemon.client() as client:
        for _ in range(100):
            model = client.get("/ingle/v1/status").json()["models"][0]
            if model["stats"]["running"] == 0 and model["in_use"] == 0:
                return
            time.sleep(0.05)
    raise AssertionError("the sequence is still running")


def test_prompt_beyond_the_window_is_refused_with_both_numbers(daemon: Any) -> None:
    reply = httpx.post(f"{daemon.url}/v1/chat/completions", json=ask("word " * 6000), timeout=60)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "4096" in error["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/ingle/v1/status", "/x"])
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1/?@", "localhost#evil.example"])
def test_a_foreign_host_is_refused_by_the_running_daemon(daemon: Any, path: str, host: str) -> None:
    reply = httpx.get(f"{daemon.url}{path}", headers={"Host": host})
    assert reply.status_code in (400, 403)


def test_no_process_of_the_daemon_but_the_worker_loads_llama(daemon: Any) -> None:
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("needs /proc")
    with open(f"/proc/{daemon.process.pid}/maps") as maps:
        assert "libllama" not in maps.read()
    with open(f"/proc/{daemon.worker_pid()}/maps") as maps:
        assert "libllama" in maps.read()


@pytest.mark.timeout(600)
def test_memory_does_not_grow_over_a_thousand_requests(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon("engine.n_ctx=1024")
    pids = (daemon.process.pid, daemon.worker_pid())
    body = ask("Hi", max_tokens=1)
    with httpx.Client(base_url=daemon.url, timeout=60) as client:

        def send(n: int) -> list[int]:
            for i in range(n):
                body["messages"] = [{"role": "user", "content": f"Hi {i % 50}"}]
                assert client.post("/v1/chat/completions", json=body).status_code == 200
            return [process_rss_bytes(pid) or 0 for pid in pids]

        before = send(200)
        after = send(1000)
    for first, last in zip(before, after, strict=True):
        assert last < first * 1.02, (before, after)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _stream_text(
    daemon: Any, body: dict[str, Any], at_token: int = -1, act: Callable[[], None] | None = None
) -> str:
    text, count = "", 0
    with httpx.stream("POST", f"{daemon.url}/v1/chat/completions", json=body, timeout=90) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            text += chunk["choices"][0]["delta"].get("content") or ""
            count += 1
            if count == at_token and act:
                threading.Thread(target=act).start()
    return text
