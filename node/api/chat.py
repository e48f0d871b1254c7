"""The request of /v1/chat/completions: from the client's JSON to engine requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from node.api.chat_reply import ChatReply
from node.api.fields import checked
from node.api.sampling import check_text_size, sampling_for
from node.api.schemas import ChatBody, check_choices, stop_strings
from node.base import LoadedModel
from node.chat import check_schema
from node.chat.types import (
    ChatRequest,
    NamedTool,
    PreparedChat,
    ResponseFormat,
)
from node.config import NodeConfig
from node.engine.base import GenerateRequest
from node.engine.messages import Constraint
from node.errors import InvalidRequest

__all__ = ["ChatCall"]

# What the template gets from us; a client that could replace these would write the prompt itself.
_RESERVED = frozenset(
    {"add_generation_prompt", "bos_token", "eos_token", "messages", "tools", "chat_template"}
)


class ChatCall:
    """A checked chat request. Raises InvalidRequest naming the field."""

    route = "chat"
    prompt_param = "messages"

    def __init__(self, raw: Mapping[str, Any], config: NodeConfig) -> None:
        self._body = body = checked(raw, ChatBody)
        self._config = config
        check_choices(body.n, config.engine.max_sequences, "n")
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        self._request = _chat_request(body, raw)
        self.model, self.stream, self.include_usage = body.model, body.stream, body.include_usage
        self.choices_per_prompt = body.n

    async def begin(self, loaded: LoadedModel) -> ChatReply:
        if loaded.chat is None:
            raise InvalidRequest(
                f"{loaded.id} has no chat template: use /v1/completions", param="model"
            )
        # In a thread: a template may use its whole time cap, and other streams go on meanwhile.
        prepared = await asyncio.to_thread(loaded.chat.prepare, self._request)
        check_text_size(prepared.prompt, self._config.api.tokenizer_input_bytes, "messages")
        return ChatReply(
            loaded.id,
            self._engine_requests(loaded, prepared),
            prepared,
            stream=self.stream,
            include_usage=self.include_usage,
        )

    def _engine_requests(
        self, loaded: LoadedModel, prepared: PreparedChat
    ) -> list[GenerateRequest]:
        body = self._body
        n_vocab = loaded.engine.info.n_vocab
        limit = (
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        )
        return [
            GenerateRequest(
                prompt=prepared.prompt,
                sampling=sampling,
                max_tokens=limit,
                stop=(*stop_strings(body), *prepared.stop),
                top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                constraint=_constraint(body.grammar, prepared.constraint),
                ignore_eos=body.ignore_eos,
                render_special=prepared.render_special,
                cache_prompt=body.cache_prompt,
            )
            for sampling in sampling_for(body, self._config.sampling, n_vocab, body.n)
        ]


def _chat_request(body: ChatBody, raw: Mapping[str, Any]) -> ChatRequest:
    names = [tool.function.name for tool in body.tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            param = f"tools[{i}].function.name"
            raise InvalidRequest(f"{param}: {name!r} is there twice", param=param)
    for name in _RESERVED & body.chat_template_kwargs.keys():
        param = f"chat_template_kwargs.{name}"
        raise InvalidRequest(f"{param}: this variable cannot be set", param=param)
    choice = _tool_choice(body.tool_choice, names)
    for i, tool in enumerate(body.tools):
        # Calls that must come are written under a grammar of the parameters.
        if choice == "required" or choice == NamedTool(tool.function.name):
            check_schema(tool.function.parameters or {}, f"tools[{i}].function.parameters")
    return ChatRequest(
        messages=raw["messages"],
        tools=raw.get("tools") or (),
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning_effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs,
    )


def _tool_choice(
    choice: str | dict[str, Any], names: Sequence[str]
) -> Literal["none", "auto", "required"] | NamedTool:
    if choice == "none" or choice == "auto":
        return "none" if choice == "none" else "auto"
    if choice == "required":
        if not names:
            raise InvalidRequest("tool_choice: required, but tools is empty", param="tool_choice")
        return "required"
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names or not isinstance(choice, dict) or choice.get("type") != "function":
        raise InvalidRequest(
            "tool_choice: must be none, auto, required or the name of a function in tools",
            param="tool_choice",
        )
    return NamedTool(str(name))


def _response_format(body: ChatBody) -> ResponseFormat:
    given = body.response_format
    if given is None or given.type == "text":
        return ResponseFormat("text")
    schema = given.schema
    param = "response_format.schema"
    if given.type == "json_schema":
        if given.json_schema is None:
            raise InvalidRequest(
                "response_format.json_schema: is required", param="response_format.json_schema"
            )
        schema, param = given.json_schema.schema, "response_format.json_schema.schema"
    if schema is None:
        return ResponseFormat("json_object")
    check_schema(schema, param)
    return ResponseFormat("json_schema", schema)


def _constraint(grammar: str | None, prepared: Constraint | None) -> Constraint | None:
    if grammar is None:
        return prepared
    if prepared is not None:
        raise InvalidRequest(
            "grammar: cannot be combined with response_format or a forced tool call",
            param="grammar",
        )
    return Constraint(gbnf=grammar, param="grammar")
