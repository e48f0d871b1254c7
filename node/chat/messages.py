"""From the client's messages to those a given template takes.

`plain_messages` checks and simplifies what any client may send; `adapt` bends the result to what
the template can do, always so that earlier messages come out the same when later ones are added.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from node.chat.formats.jsontext import dump, is_object
from node.chat.probe import Capabilities
from node.errors import InvalidRequest

__all__ = ["adapt", "calls_as_text", "plain_messages"]

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Content as text, `developer` as `system`, arguments as objects, results with the name of
    their function.

    Raises:
        InvalidRequest: names the message and the field.
    """
    if not messages:
        raise InvalidRequest("messages: must not be empty", param="messages")
    names: dict[str, str] = {}
    return [_plain(m, f"messages[{i}]", names) for i, m in enumerate(messages)]


def adapt(
    messages: Sequence[Message], can: Capabilities, *, tools_text: str = "", short_ids: bool = False
) -> list[Message]:
    """Messages for a template that `can` do so much. `tools_text` goes into the system message."""
    adapted = [dict(m) for m in messages]
    if not can.tools:
        adapted = [_in_words(m) for m in adapted]
    elif can.single_calls:
        adapted = _one_call_each(adapted)
    if tools_text:
        adapted = _with_system(adapted, tools_text)
    adapted = _systems(adapted, can.system)
    if can.alternates:
        adapted = _merged(adapted)
    for message in adapted:
        _finish(message, can, short_ids)
    return adapted


def calls_as_text(content: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """An assistant's message with calls, in the notation that the generic prompt asks for."""
    blocks = [f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in calls]
    return "\n".join([content, *blocks] if content else blocks)


def _call_text(function: Mapping[str, Any]) -> str:
    return f'{{"name": {dump(function["name"])}, "arguments": {_arguments_text(function)}}}'


def _arguments_text(function: Mapping[str, Any]) -> str:
    """As the model has written them, where that is known: the tokens are in the cache."""
    return function.get("raw") or dump(function["arguments"])


def _plain(message: Mapping[str, Any], where: str, names: dict[str, str]) -> Message:
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{where}.role: must be one of {', '.join(_ROLES)}", param=where)
    plain: Message = {
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content"), f"{where}.content"),
    }
    if role == "assistant":
        for key in ("reasoning_content", "reasoning"):
            if isinstance(message.get(key), str) and message[key]:
                plain["reasoning_content"] = message[key]
        plain["content"] = plain["content"] or _text(message.get("refusal"), f"{where}.refusal")
        calls = [
            _call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(message.get("tool_calls") or ())
        ]
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if calls:
            plain["tool_calls"] = calls
    elif role == "tool":
        plain["tool_call_id"] = str(message.get("tool_call_id") or "")
        name = message.get("name") or names.get(plain["tool_call_id"])
        if isinstance(name, str):
            plain["name"] = name
    return plain


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where}: must be text or a list of text parts", param=where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("refusal" if kind == "refusal" else "text") if kind else None
    if kind in (*_TEXT_PARTS, "refusal") and isinstance(text, str):
        return text
    if kind in ("image_url", "input_image", "image"):
        raise InvalidRequest(
            f"{where}: images are not supported (and no URL is ever fetched)", param=where
        )
    raise InvalidRequest(f"{where}: only text parts are supported", param=where)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function.name: is required", param=where)
    given = function.get("arguments")
    plain = {"name": function["name"], "arguments": _arguments(given)}
    if isinstance(given, str) and is_object(given):
        plain["raw"] = given
    return {"id": str(call.get("id") or ""), "type": "function", "function": plain}


def _arguments(arguments: Any) -> dict[str, Any]:
    """A model may have written arguments that are no object; the next turn has to go on."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str) or not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _in_words(message: Message) -> Message:
    """Calls and results as text of assistant and user, for templates that know neither."""
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    if calls := message.pop("tool_calls", None):
        message["content"] = calls_as_text(message["content"], calls)
    return message


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Call, result, call, result, for templates that refuse two calls in a message."""
    apart: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls") or []
        if len(calls) > 1:
            waiting = [{**message, "tool_calls": [call]} for call in calls]
            waiting[1:] = [{**m, "content": ""} for m in waiting[1:]]
        elif message["role"] == "tool" and waiting:
            apart += [waiting.pop(0), message]
        else:
            apart += [*waiting, message]
            waiting = []
    return apart + waiting


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    first, rest = messages[0], messages[1:]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *rest]


def _systems(messages: Sequence[Message], where: str) -> list[Message]:
    """System messages that stand where the template takes none are put in front of the next
    user message: merged into the first, they would change the prompt from its beginning."""
    if where == "any":
        return list(messages)
    moved: list[Message] = []
    pending: list[str] = []
    first_stays = where == "first" and any(m["role"] != "system" for m in messages)
    for i, message in enumerate(messages):
        if message["role"] == "system" and not (i == 0 and first_stays):
            pending.append(message["content"])
        elif message["role"] == "user" and pending:
            moved.append({**message, "content": "\n\n".join([*pending, message["content"]])})
            pending = []
        else:
            moved.append(message)
    if pending:
        moved.append({"role": "user", "content": "\n\n".join(pending)})
    return moved


def _merged(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        same = last is not None and last["role"] == message["role"] != "tool"
        if last is not None and same and not (last.get("tool_calls") or message.get("tool_calls")):
            last["content"] = f"{last['content']}\n\n{message['content']}"
        else:
            merged.append(message)
    return merged


def _finish(message: Message, can: Capabilities, short_ids: bool) -> None:
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = [_shaped(call, can, short_ids) for call in calls]
        if can.null_content and not message["content"]:
            message["content"] = None
    if short_ids and "tool_call_id" in message:
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    if can.parts and message["content"] is not None:
        message["content"] = [{"type": "text", "text": message["content"]}]


def _shaped(call: Mapping[str, Any], can: Capabilities, short_ids: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = _arguments_text(function) if can.text_arguments else function["arguments"]
    return {
        **call,
        "id": _short_id(call["id"]) if short_ids else call["id"],
        "function": {"name": function["name"], "arguments": arguments},
    }


def _short_id(call_id: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]
