"""What is refused, and that each refusal names the field in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_api import Node

from node.api.chat import ChatCall
from node.api.completions import CompletionCall
from node.api.schemas import ChatBody, CompletionBody
from node.config import NodeConfig
from node.errors import InvalidRequest

USER = {"role": "user", "content": "SAY hi"}


def refused(response: httpx.Response, param: str | None) -> str:
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert set(error) == {"message", "type", "code", "param"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    return str(error["message"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"typical_p": -1}, "typical_p"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 2**31}, "max_completion_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**60}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"continuous": True}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"grammar": "root", "response_format": {"type": "json_object"}}, "grammar"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
        ({"reasoning_effort": "endless"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"n_predict": 3}, "n_predict"),
        ({"api_base": "http://169.254.169.254"}, "api_base"),
        ({"model": ""}, "model"),
    ],
)
def test_a_bad_chat_field_is_a_400_that_names_it(
    node: Node, fields: dict[str, Any], param: str
) -> None:
    message = refused(node.chat("SAY hi", **fields), param)
    assert param.split("[")[0].split(".")[0] in message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "function", "name": "f", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"id": "a"}]}],
            "messages[1].tool_calls[0].function",
        ),
    ],
)
def test_a_bad_message_is_a_400_that_says_where(node: Node, messages: Any, param: str) -> None:
    refused(node.client.post("/v1/chat/completions", json={"messages": messages}), param)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:4663/ingle/v1/status",
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
    ],
)
def test_image_urls_are_refused_and_never_fetched(node: Node, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]
    response = node.client.post("/v1/chat/completions", json={"messages": messages})
    message = refused(response, "messages[0].content[1].type")
    assert "only text parts" in message and url not in response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, 1000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": "x" * 50_001}, "prompt"),
        ({"prompt": ["a"] * 40, "n": 2}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
def test_a_bad_completion_field_is_a_400_that_names_it(
    node: Node, fields: dict[str, Any], param: str
) -> None:
    refused(node.client.post("/v1/completions", json={"model": "local", **fields}), param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
        b"[" * 50_000,
    ],
)
def test_what_is_no_json_object_is_a_400(node: Node, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = node.client.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"


def test_fields_that_cannot_change_the_result_are_ignored(node: Node) -> None:
    extra = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    quiet = {"prompt_cache_key": "k", "modalities": ["text"], "verbosity": "medium", "stop": None}
    options = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert node.chat("SAY hi", **extra, **quiet, **options).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/health", 405),
        ("GET", "/v1/models/nope", 404),
        ("GET", "/health/", 404),
    ],
)
def test_unknown_routes_and_methods_have_the_same_shape(
    node: Node, method: str, path: str, status: int
) -> None:
    response = node.client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "code", "param"}


def test_an_unknown_model_is_a_404_with_the_code_clients_know(node: Node) -> None:
    response = node.chat("hi", model="../../etc/passwd")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_long_unknown_name_is_not_repeated_in_full(node: Node) -> None:
    assert len(node.chat("hi", **{"x" * 10_000: 1}).json()["error"]["message"]) < 200


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.booleans(), st.text(max_size=3)
)
NAMES = [n for n in ChatBody.__struct_fields__ if n not in ("messages", "tools", "model")]


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), NUMBERS, max_size=3))
def test_any_value_in_any_chat_field_is_taken_or_refused_by_name(fields: dict[str, Any]) -> None:
    try:
        ChatCall({"messages": [USER], **fields}, NodeConfig())
    except InvalidRequest as error:
        assert error.param is not None and error.param.split(".")[0].split("[")[0] in fields


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(CompletionBody.__struct_fields__), NUMBERS, max_size=3))
def test_any_value_in_any_completion_field_is_taken_or_refused(fields: dict[str, Any]) -> None:
    try:
        CompletionCall({"prompt": "a", **fields}, NodeConfig())
    except InvalidRequest as error:
        assert error.param is not None
