"""From a decoded JSON body to a checked struct: which names are known, and errors that name one.

Three cases for a top-level name: it is supported and checked; it cannot change the result and is
ignored (`IGNORED`); anything else is refused, because a result that silently differs from what
was asked is worse than an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from node.errors import InvalidRequest

__all__ = ["IGNORED", "checked"]

IGNORED = frozenset(
    {
        "extra_headers",
        "id_slot",
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "return_progress",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "timings_per_token",
        "usage",
        "user",
    }
)

# Values under which a field we do not support changes nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "modalities": (["text"],),
    "suffix": ("",),
    "verbosity": ("medium",),
    "functions": ([],),
}

_INSTEAD = {
    "enable_thinking": "chat_template_kwargs",
    "function_call": "tool_choice",
    "functions": "tools",
    "guided_grammar": "grammar",
    "guided_json": "response_format",
    "json_schema": "response_format",
    "n_predict": "max_tokens",
    "repetition_penalty": "repeat_penalty",
}

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")
_PART_TYPE = re.compile(r"messages\[\d+\]\.content\[\d+\]\.type")

T = TypeVar("T", bound=msgspec.Struct)


def checked(body: Mapping[str, Any], kind: type[T]) -> T:
    """`body` as a `kind`. An explicit null is the same as absent, as OpenAI's clients send it.

    Raises:
        InvalidRequest: names the field in `param`.
    """
    given = {name: value for name, value in body.items() if value is not None}
    known = kind.__struct_fields__
    for name in given.keys() - set(known) - IGNORED:
        if given[name] not in _NEUTRAL.get(name, ()):
            raise InvalidRequest(_unsupported(name), param=name, code="unsupported_parameter")
    try:
        return msgspec.convert({name: given[name] for name in known if name in given}, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error


def _unsupported(name: str) -> str:
    shown = name if len(name) <= 64 else name[:61] + "..."
    hint = f"; use {_INSTEAD[name]!r}" if name in _INSTEAD else ""
    return f"{shown!r} is not supported here{hint}"


def _named(text: str) -> InvalidRequest:
    """msgspec says where: ``Expected `int` >= 1 - at `$.messages[0].name` ``."""
    at = _PATH.search(text)
    path = at["path"].replace("[...]", "") if at else ""
    reason = text[: at.start()] if at else text
    missing = _MISSING.search(reason)
    if missing:
        path = f"{path}.{missing['name']}".lstrip(".")
        reason = "is required"
    if _PART_TYPE.fullmatch(path):
        reason = "only text parts are supported (and no URL is ever fetched)"
    return InvalidRequest(f"{path}: {reason}" if path else reason, param=path or None)
