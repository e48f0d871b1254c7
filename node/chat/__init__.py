"""Chat formats: templates, special tokens, tools, reasoning, constraints. Knows no engine and no
HTTP; what goes in and comes out is in `types`."""

from __future__ import annotations

from node.chat.model import ChatModel
from node.chat.schemas import check_schema
from node.chat.types import (
    ChatRequest,
    NamedTool,
    OutputEvent,
    OutputParser,
    PreparedChat,
    ReasoningDelta,
    ResponseFormat,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)

__all__ = [
    "ChatModel",
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
    "check_schema",
]
