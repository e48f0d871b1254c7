"""Finds out by rendering what a template does with messages, tools and arguments.

Templates do not say what they can do, and their texts are too different to tell; but each either
shows a word that was put into the fixture or does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.chat.template import ChatTemplate, TemplateError

__all__ = ["Capabilities", "probe"]

_PROBE_CPU_S = 0.5
_FIRST, _SECOND, _SYSTEM, _TOOL, _VALUE, _RESULT = (
    f"inglenook{name}probe" for name in ("one", "two", "sys", "tool", "value", "result")
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """
    Attributes:
        parts: content has to be a list of parts.
        system: where a system message may stand: anywhere, first or nowhere.
        alternates: two user messages in a row are refused.
        tools: it shows tools, calls and results; else we have to.
        text_arguments: it takes a call's arguments as JSON text; else as an object.
        null_content: a message with calls has to have no content rather than an empty one.
        single_calls: it refuses two calls in one message.
        thinking_switch: `enable_thinking: false` changes the prompt.
    """

    parts: bool = False
    system: str = "any"
    alternates: bool = False
    tools: bool = False
    text_arguments: bool = False
    null_content: bool = False
    single_calls: bool = False
    thinking_switch: bool = False


def probe(template: ChatTemplate, variables: Mapping[str, Any]) -> Capabilities:
    """
    Raises:
        TemplateError: not even one plain user message can be rendered.
    """
    fixture = _Fixture(template, variables)
    parts = not fixture.shows([_user(_FIRST)], _FIRST)
    if parts:
        fixture.parts = True
        if not fixture.shows([_user(_FIRST)], _FIRST):
            raise TemplateError(fixture.failure or "it does not show the user's message")
    tools, text_arguments, null_content = fixture.tools()
    return Capabilities(
        parts=parts,
        system=fixture.system(),
        alternates=not fixture.shows([_user(_FIRST), _user(_SECOND)], _FIRST, _SECOND),
        tools=tools,
        text_arguments=text_arguments,
        null_content=null_content,
        single_calls=tools and not fixture.two_calls(text_arguments, null_content),
        thinking_switch=fixture.differs([_user(_FIRST)], enable_thinking=False),
    )


class _Fixture:
    def __init__(self, template: ChatTemplate, variables: Mapping[str, Any]) -> None:
        self._template = template
        self._variables = variables
        self.parts = False
        self.failure = ""

    def render(self, messages: Sequence[dict[str, Any]], **more: Any) -> str | None:
        if self.parts:
            messages = [_in_parts(m) for m in messages]
        variables = {**self._variables, "messages": messages, "tools": None, **more}
        variables.setdefault("add_generation_prompt", True)
        try:
            return self._template.render(variables, cpu_s=_PROBE_CPU_S)
        except TemplateError as error:
            self.failure = str(error)
            return None

    def shows(self, messages: Sequence[dict[str, Any]], *words: str, **more: Any) -> bool:
        text = self.render(messages, **more)
        return text is not None and all(word in text for word in words)

    def differs(self, messages: Sequence[dict[str, Any]], **more: Any) -> bool:
        return self.render(messages, **more) != self.render(messages)

    def system(self) -> str:
        system = {"role": "system", "content": _SYSTEM}
        if not self.shows([system, _user(_FIRST)], _SYSTEM, _FIRST):
            return "none"
        middle = [_user(_FIRST), _assistant("ok"), system, _user(_SECOND)]
        text = self.render(middle) or ""
        in_order = 0 <= text.find(_FIRST) < text.find(_SYSTEM) < text.find(_SECOND)
        return "any" if in_order else "first"

    def tools(self) -> tuple[bool, bool, bool]:
        """Whether tools are shown; whether arguments may be text; whether content must be null."""
        if not self.shows([_user(_FIRST)], _TOOL, tools=[_tool()]):
            return False, False, False
        for text_arguments in (True, False):
            for null_content in (False, True):
                messages = _with_calls(1, text_arguments, null_content)
                text = self.render(messages, tools=[_tool()])
                if text is not None and _calls_are_whole(text):
                    return True, text_arguments, null_content
        return False, False, False

    def two_calls(self, text_arguments: bool, null_content: bool) -> bool:
        messages = _with_calls(2, text_arguments, null_content)
        text = self.render(messages, tools=[_tool()])
        return text is not None and text.count(_VALUE) >= 2


def _calls_are_whole(text: str) -> bool:
    """Name, argument and result are there, and the arguments are not a string in a string."""
    wanted = (_VALUE, _RESULT, _FIRST)
    quoted = f'\\"{_VALUE}' in text or f"{_VALUE}\\" in text
    return all(word in text for word in wanted) and text.count(_TOOL) >= 2 and not quoted


def _with_calls(count: int, text_arguments: bool, null_content: bool) -> list[dict[str, Any]]:
    arguments = f'{{"key": "{_VALUE}"}}' if text_arguments else {"key": _VALUE}
    ids = [f"abcdefgh{i}" for i in range(count)]
    calls = [
        {"id": i, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
        for i in ids
    ]
    assistant = {
        "role": "assistant",
        "content": None if null_content else "",
        "tool_calls": calls,
    }
    results = [{"role": "tool", "tool_call_id": i, "name": _TOOL, "content": _RESULT} for i in ids]
    return [_user(_FIRST), assistant, *results]


def _tool() -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"key": {"type": "string", "description": "a word"}},
        "required": ["key"],
    }
    function = {"name": _TOOL, "description": "does something", "parameters": parameters}
    return {"type": "function", "function": function}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
