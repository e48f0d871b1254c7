"""Calls as `<function=name><parameter=key>value</parameter></function>` (Qwen3-Coder), and as
`<function=name>{…}</function>` (Llama 3.1)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from node.chat.formats.base import NO_CALL, Call, Match, Syntax, Tools
from node.chat.formats.jsontext import arguments_text, dump

__all__ = ["FunctionTags", "function_tags"]

_OPEN = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\s]+)>")
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_END = re.compile(r"</function>(?P<rest>\s*</tool_call>)?")


def function_tags() -> Syntax:
    """Without `<tool_call>` around; with it, `tagged_json` finds them."""
    return Syntax(("<function=",), FunctionTags)


class FunctionTags:
    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._from = 0

    def step(self, text: str, ended: bool) -> Match | None:
        end = _END.search(text, self._from)
        if end is None:
            self._from = max(0, len(text) - len("</function>"))
            return NO_CALL if ended else None
        rest = text[end.end() :].lstrip()
        if end["rest"] is None and not ended and "</tool_call>".startswith(rest):
            return None
        call = self._call(text[: end.start()])
        return Match(end.end(), (call,)) if call else NO_CALL

    def _call(self, text: str) -> Call | None:
        head = _OPEN.match(text)
        if head is None or head[1] not in self._tools:
            return None
        body = text[head.end() :]
        if body.lstrip().startswith("{"):
            arguments = arguments_text(body)
            return Call(head[1], arguments) if arguments is not None else None
        properties = self._tools[head[1]].get("properties")
        values: dict[str, Any] = {}
        at = 0
        while found := _PARAMETER.match(body, at):
            schema = properties.get(found[1]) if isinstance(properties, Mapping) else None
            values[found[1]] = _typed(found[2], schema)
            at = found.end()
        arguments = arguments_text(dump(values))
        return Call(head[1], arguments) if arguments and not body[at:].strip() else None


def _typed(text: str, schema: Any) -> Any:
    """The tags hold text only; the tool's schema says what was meant."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        return text
