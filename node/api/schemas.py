"""The request bodies of the generating routes: fields, types and bounds of each.

Every number has bounds. What a field needs from the loaded model (vocabulary size) is checked
in `node.api.sampling`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from node.errors import InvalidRequest

__all__ = [
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "GenerateBody",
    "LoadBody",
    "ResponseFormatBody",
    "StreamOptions",
    "ToolBody",
    "TokenizeBody",
    "UnloadBody",
    "check_choices",
    "stop_strings",
]

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
CountOrAll = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
ModelName = Annotated[str, Meta(min_length=1, max_length=512)]
Choices = Annotated[int, Meta(ge=1, le=256)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = False
    include_obfuscation: bool | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """What both generating routes take. None means: the node's default."""

    model: ModelName = "local"
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Choices = 1
    max_tokens: Count | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=10_000_000)] | None = None
    min_p: Share | None = None
    typical_p: Share = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    repeat_last_n: CountOrAll = 64
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] = 0.0
    dry_base: Annotated[float, Meta(ge=1, le=100)] = 1.75
    dry_allowed_length: Count = 2
    dry_penalty_last_n: CountOrAll = -1
    logit_bias: Annotated[
        dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)
    ] = {}
    grammar: Annotated[str, Meta(min_length=1, max_length=2**18)] | None = None
    ignore_eos: bool = False
    cache_prompt: bool = True

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class SystemMessage(msgspec.Struct, tag_field="role", tag="system"):
    content: str | list[TextPart]
    name: str | None = None


class DeveloperMessage(SystemMessage, tag_field="role", tag="developer"):
    pass


class UserMessage(SystemMessage, tag_field="role", tag="user"):
    pass


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant"):
    content: str | list[TextPart | RefusalPart] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None


class ToolMessage(msgspec.Struct, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str | list[TextPart]


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(msgspec.Struct):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct):
    function: Function
    type: Literal["function"] = "function"


class SchemaBody(msgspec.Struct):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormatBody(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaBody | None = None
    # llama-server's spelling: a schema directly under json_object.
    schema: dict[str, Any] | None = None


class ChatBody(GenerateBody, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=512)] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormatBody | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    chat_template_kwargs: Annotated[
        dict[
            Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")],
            bool | int | float | Annotated[str, Meta(max_length=256)] | None,
        ],
        Meta(max_length=16),
    ] = {}


class CompletionBody(GenerateBody, kw_only=True):
    prompt: str | list[Any]
    max_tokens: Count | None = 16
    best_of: Choices | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class TokenizeBody(msgspec.Struct):
    """`content` as llama-server calls it, or `prompt` as vLLM does."""

    model: ModelName = "local"
    content: str | None = None
    prompt: str | None = None
    add_special: bool = False
    parse_special: bool = True


class DetokenizeBody(msgspec.Struct):
    tokens: list[Count]
    model: ModelName = "local"


class LoadBody(msgspec.Struct):
    model: ModelName
    keep_alive_s: Annotated[float, Meta(ge=0, le=10**9)] | None = None


class UnloadBody(msgspec.Struct):
    model: ModelName


class PurgeBody(msgspec.Struct):
    namespace: Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")] = ""


def stop_strings(body: GenerateBody) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def check_choices(count: int, limit: int, param: str) -> None:
    """All choices of a request live at once, each in a sequence of its own."""
    if count > limit:
        raise InvalidRequest(
            f"{count} choices in one request; this node allows {limit}", param=param
        )
