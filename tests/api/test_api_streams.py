"""Clients that leave, long silences, and too many requests."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import ExitStack

import httpx
import pytest
from server_api import Node, run_node

from node.api.stream import EventStream
from node.config import ApiConfig


def body(text: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "local", "messages": messages, **fields}).encode()


def leave_after_first_line(node: Node, text: str, n: int) -> None:
    content = body(text, stream=True, n=n)
    headers = {"content-type": "application/json"}
    url = "/v1/chat/completions"
    with node.client.stream("POST", url, content=content, headers=headers) as response:
        next(response.iter_lines())


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_while_decoding_cancels_every_choice(node: Node, n: int) -> None:
    text = f"HANG decoding {n} SAY a|b"
    leave_after_first_line(node, text, n)
    node.until(lambda: node.pool.engine.cancelled.count(text) == n)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_cancels(node: Node, stream: bool) -> None:
    text = f"STALL reading {stream}"
    with pytest.raises(httpx.ReadTimeout):
        messages = [{"role": "user", "content": text}]
        request = {"messages": messages, "stream": stream}
        timeout = httpx.Timeout(0.05)
        node.client.post("/v1/chat/completions", json=request, timeout=timeout)
    node.until(lambda: text in node.pool.engine.cancelled)


def test_one_failing_choice_cancels_the_others(node: Node) -> None:
    before = len(node.pool.engine.cancelled)
    assert node.chat("BREAK SAY a|b", n=3).status_code == 500
    node.until(lambda: len(node.pool.engine.cancelled) == before + 3)


def test_a_silent_stream_sends_comment_lines(node: Node) -> None:
    content = body("STALL keep-alive", stream=True)
    headers = {"content-type": "application/json"}
    url = "/v1/chat/completions"
    with node.client.stream("POST", url, content=content, headers=headers) as response:
        lines = response.iter_lines()
        assert response.status_code == 200
        assert [next(lines) for _ in range(3)] == [": keep-alive", "", ": keep-alive"]


def test_comments_stop_with_the_stream_and_never_split_an_event() -> None:
    async def play() -> list[bytes]:
        sent: list[bytes] = []

        async def send(message: object) -> None:
            assert isinstance(message, dict)
            await asyncio.sleep(0)
            sent.append(message.get("body", b"start"))

        stream = EventStream(send, 0.01)
        await asyncio.sleep(0.05)
        await stream.write(b"a")
        await stream.finish(b"b")
        await asyncio.sleep(0.03)
        return sent

    sent = asyncio.run(play())
    assert sent[:2] == [b"start", b": keep-alive\n\n"] and sent[-2:] == [b"a", b"b"]


def test_over_the_queue_limit_new_requests_get_429(node: Node) -> None:
    url, headers = "/v1/chat/completions", {"content-type": "application/json"}
    with ExitStack() as waiting:
        client = waiting.enter_context(httpx.Client(base_url=node.url, trust_env=False))
        for _ in range(8):
            content = body("STALL queue", stream=True)
            waiting.enter_context(client.stream("POST", url, content=content, headers=headers))
        refused = node.chat("SAY a")
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    # The places are free again as soon as the clients have left.
    node.until(lambda: node.chat("SAY a").status_code == 200)


def test_forty_connections_are_all_answered(keyed_node: Node) -> None:
    answers: list[int] = []

    def ask() -> None:
        headers = {"authorization": "Bearer sesame"}
        with httpx.Client(base_url=keyed_node.url, headers=headers, verify=False) as client:
            messages = [{"role": "user", "content": "SAY a|b|c"}]
            answers.append(
                client.post("/v1/chat/completions", json={"messages": messages}).status_code
            )

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 40


def test_a_body_that_never_ends_up_complete_is_dropped_quietly(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
    with pytest.raises(TimeoutError):
        node.raw(head + b"Content-Type: application/json\r\n\r\n{", timeout_s=0.05)
    assert node.chat("SAY a").status_code == 200 and "failed" not in caplog.text


def test_a_shutdown_ends_what_is_left_with_an_error() -> None:
    answers: dict[bool, str] = {}

    def ask(url: str, stream: bool) -> None:
        request = {"messages": [{"role": "user", "content": "HANG SAY a"}], "stream": stream}
        answers[stream] = httpx.post(url + "/v1/chat/completions", json=request).text

    with run_node(ApiConfig()) as node:
        asking = [threading.Thread(target=ask, args=(node.url, s)) for s in (False, True)]
        for thread in asking:
            thread.start()
        node.until(lambda: len(node.pool.engine.requests) == 2)
    for thread in asking:
        thread.join()
    assert answers[True].endswith("data: [DONE]\n\n")
    assert all("shutting down" in answer for answer in answers.values())
