"""Chat completions over a real socket: shapes, streaming, choices, errors in mid-stream."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI
from server_api import Node


def events(response: httpx.Response) -> list[Any]:
    """The payloads of a stream; the last one must be [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def choice_text(chunks: list[Any], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["delta"].get("content") or "" for c in choices if c["index"] == index)


def test_a_completion_has_message_usage_and_timings(node: Node) -> None:
    body = node.chat("SAY Hello| there").json()
    assert body["object"] == "chat.completion" and body["model"] == "tiny:1b"
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello there", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        10,
        2,
        12,
    )
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert body["timings"]["computed_tokens"] == 6 and body["timings"]["prefill_ms"] == 10


def test_a_stream_starts_with_the_role_and_ends_with_the_reason(node: Node) -> None:
    response = node.chat('SAY Hé"llo|\n there', stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-inglenook-route"] == "local"
    chunks = events(response)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert choice_text(chunks, 0) == 'Hé"llo\n there'
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert len({chunk["id"] for chunk in chunks}) == 1 and "usage" not in chunks[0]


def test_the_usage_chunk_comes_only_when_asked(node: Node) -> None:
    chunks = events(node.chat("SAY a|b", stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert "ttft_ms" in chunks[-1]["timings"]


def test_choices_are_streamed_by_index_and_the_prompt_is_counted_once(node: Node) -> None:
    chunks = events(
        node.chat("SAY a|b|c", n=3, seed=7, stream=True, stream_options={"include_usage": True})
    )
    assert [choice_text(chunks, i) for i in range(3)] == ["abc"] * 3
    assert chunks[-1]["usage"]["prompt_tokens"] == 10
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert [r.sampling.seed for r in node.pool.engine.requests[-3:]] == [7, 8, 9]


def test_no_tokens_asked_means_an_empty_answer_cut_by_length(node: Node) -> None:
    for limit in ({"max_tokens": 0}, {"max_completion_tokens": 0, "max_tokens": 5}):
        choice = node.chat("SAY a|b", **limit).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


def test_the_official_client_rebuilds_parallel_tool_calls(node: Node) -> None:
    client = OpenAI(base_url=node.url + "/v1", api_key="none", max_retries=0)
    script = 'SAY ~call add|~args {"a":|~args 1}|~call mul|~args {}'
    tools: Any = [{"type": "function", "function": {"name": n}} for n in ("add", "mul")]
    with client.chat.completions.stream(
        model="local", messages=[{"role": "user", "content": script}], tools=tools
    ) as stream:
        final = stream.get_final_completion().choices[0]
    client.close()
    calls = final.message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        ("add", '{"a":1}'),
        ("mul", "{}"),
    ]
    assert final.finish_reason == "tool_calls"


def test_the_first_delta_of_a_call_has_index_id_type_and_name(node: Node) -> None:
    chunks = events(node.chat("SAY ~call add|~args {}|~call mul|~args {}", stream=True))
    deltas = [d for c in chunks for d in c["choices"][0]["delta"].get("tool_calls", ())]
    assert [(d["index"], d.get("id")) for d in deltas] == [
        (0, "call_1"),
        (0, None),
        (1, "call_2"),
        (1, None),
    ]
    assert deltas[0]["type"] == "function" and deltas[0]["function"]["name"] == "add"


def test_reasoning_comes_apart_from_the_answer(node: Node) -> None:
    body = node.chat("SAY ~think hm|~think m|yes").json()
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm", "yes")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    chunks = events(node.chat("SAY ~think hm|yes", stream=True))
    assert chunks[1]["choices"][0]["delta"] == {"reasoning_content": "hm"}


def test_tool_calls_without_text_have_null_content(node: Node) -> None:
    choice = node.chat("SAY ~call add|~args {}").json()["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_come_with_the_tokens(node: Node, stream: bool) -> None:
    response = node.chat("SAY a|b", logprobs=True, top_logprobs=2, stream=stream)
    bodies = events(response) if stream else [response.json()]
    parts = [body["choices"][0]["logprobs"] for body in bodies]
    content = [item for part in parts if part for item in part["content"]]
    assert [item["token"] for item in content] == ["a", "b"]
    assert content[0]["bytes"] == [97]
    assert content[0]["top_logprobs"][1] == {"token": "\ufffd", "logprob": -9999.0, "bytes": [255]}


@pytest.mark.parametrize("n", [1, 3])
def test_an_error_before_the_first_token_has_its_status(node: Node, n: int) -> None:
    response = node.chat("FAIL", stream=True, n=n)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("n", [1, 3])
def test_an_error_in_mid_stream_is_an_event_and_the_end(node: Node, n: int) -> None:
    response = node.chat("BREAK SAY a|b", stream=True, n=n)
    assert response.status_code == 200
    assert events(response)[-1]["error"]["code"] == "engine_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_foreign_exception_tells_the_client_nothing(
    node: Node, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    response = node.chat("CRASH canary17 SAY a|b", stream=stream)
    assert "internal error" in response.text and "canary17" not in response.text
    assert "ValueError" in caplog.text and "canary17" not in caplog.text


def test_a_prompt_beyond_the_window_names_both_numbers(node: Node) -> None:
    error = node.chat("x" * 5000).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "5000" in error["message"] and "4096" in error["message"]


def test_a_model_without_template_points_to_completions(node: Node) -> None:
    response = node.chat("hi", model="plain/base")
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]


def test_prepared_stop_strings_and_grammar_reach_the_engine(node: Node) -> None:
    node.chat("SAY a", stop=["X"], grammar='root ::= "a"')
    request = node.pool.engine.requests[-1]
    assert request.stop == ("X", "<|end|>")
    assert request.constraint is not None and request.constraint.gbnf == 'root ::= "a"'


def test_a_grammar_that_does_not_compile_is_a_400(node: Node) -> None:
    response = node.chat("SAY a", grammar="bad")
    assert response.status_code == 400 and response.json()["error"]["param"] == "grammar"


def test_without_a_seed_every_request_has_its_own(node: Node) -> None:
    node.chat("SAY a")
    node.chat("SAY a")
    first, second = (request.sampling.seed for request in node.pool.engine.requests[-2:])
    assert first != second
