"""What goes into a chat format and what comes out of its parser; no behaviour.

Messages and tools are the client's JSON, already validated by the API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from node.engine.messages import Constraint

__all__ = [
    "ChatRequest",
    "NamedTool",
    "OutputEvent",
    "OutputParser",
    "PreparedChat",
    "ReasoningDelta",
    "ResponseFormat",
    "TextDelta",
    "ToolCallArguments",
    "ToolCallStart",
]


class NamedTool(NamedTuple):
    """`tool_choice` that names the function to call."""

    name: str


class ResponseFormat(NamedTuple):
    """`json_object` has no schema; `json_schema` has one."""

    kind: Literal["text", "json_object", "json_schema"]
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat call. `template_kwargs` are extra template variables the client may set."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat("text")
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class TextDelta(NamedTuple):
    text: str


class ReasoningDelta(NamedTuple):
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """First event of a call. `index` counts from 0 in the reply."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of the call's arguments, as JSON text; concatenate by `index`."""

    index: int
    fragment: str


OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Incremental: `feed` any split of the text gives the same events when joined. Never raises
    on model output: what is not a valid call comes out as text."""

    def feed(self, text: str) -> list[OutputEvent]: ...

    def finish(self) -> list[OutputEvent]:
        """The text has ended; hand over what was held back."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat call ready for the engine.

    `prompt` is a tuple of segments, each tokenised by itself with special tokens read, so that
    special tokens inside user text are split and read as plain text. `parser` belongs to one
    choice: call `new_parser()` for each.
    """

    prompt: tuple[str, ...]
    constraint: Constraint | None
    stop: tuple[str, ...]
    render_special: bool
    new_parser: Callable[[], OutputParser]
