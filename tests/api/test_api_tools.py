"""Tool calls over the wire with a real chat format: the model's text in, OpenAI's deltas out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from server_api import Node

from node.chat import ChatModel

TEMPLATE = """{%- if tools %}<|im_start|>system
Call tools as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}</tool_call>'
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "mul")
]


@pytest.fixture
def client(node: Node) -> Iterator[OpenAI]:
    node.pool.chat = ChatModel(TEMPLATE, "", "<|im_end|>", ("<|im_start|>", "<|im_end|>"))
    with OpenAI(base_url=node.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
    node.pool.chat = None


def ask(client: OpenAI) -> Any:
    messages: Any = [{"role": "user", "content": "hi"}]
    with client.chat.completions.stream(model="local", messages=messages, tools=TOOLS) as answer:
        return answer.get_final_completion().choices[0]


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_a_call_is_rebuilt_whatever_the_pieces(node: Node, client: OpenAI, piece: int) -> None:
    node.pool.engine.says = [CALL[i : i + piece] for i in range(0, len(CALL), piece)]
    choice = ask(client)
    node.pool.engine.says = None
    (call,) = choice.message.tool_calls
    assert call.function.name == "add" and choice.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"a": 1, "b": [2, "x"]}


def test_what_is_no_valid_call_comes_out_as_text(node: Node, client: OpenAI) -> None:
    node.pool.engine.says = ['<tool_call>{"name": oops</tool_call>']
    choice = ask(client)
    node.pool.engine.says = None
    assert not choice.message.tool_calls and "oops" in choice.message.content
    assert choice.finish_reason == "stop"


def test_a_schema_that_cannot_be_a_grammar_is_a_400_naming_the_field(
    node: Node, client: OpenAI
) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    for fields in (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
        },
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": "required",
        },
    ):
        response = node.chat("hi", **fields)
        assert response.status_code == 400
        assert "schema" in response.text or "parameters" in response.text
