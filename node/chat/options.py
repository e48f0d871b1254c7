"""Template variables that a client may set. Anything else it sends could rewrite the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from node.chat.types import ChatRequest
from node.errors import InvalidRequest

__all__ = ["CONTINUE", "template_options"]

# Generates on from the last message instead of starting a new one; not a template variable.
CONTINUE = "continue_final_message"

_MAX_TEXT = 256
_KNOWN: Mapping[str, tuple[type, ...]] = {
    CONTINUE: (bool,),
    "clear_thinking": (bool,),
    "date_string": (str,),
    "enable_thinking": (bool,),
    "model_identity": (str,),
    "preserve_thinking": (bool,),
    "reasoning_effort": (str,),
    "thinking": (bool,),
    "thinking_budget": (int,),
}
# What the template of gpt-oss takes for the efforts of the API.
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def template_options(request: ChatRequest, family: str) -> dict[str, Any]:
    """
    Raises:
        InvalidRequest: an unknown name or a value of the wrong kind.
    """
    options = {name: _checked(name, value) for name, value in request.template_kwargs.items()}
    effort = request.reasoning_effort or options.get("reasoning_effort")
    if effort is not None:
        options["reasoning_effort"] = (
            _HARMONY_EFFORTS.get(effort, effort) if family == "harmony" else effort
        )
    if request.reasoning_effort == "none":
        options = {"enable_thinking": False, "thinking": False, **options}
    return {name: value for name, value in options.items() if value is not None}


def _checked(name: str, value: Any) -> Any:
    param = f"chat_template_kwargs.{name[:64]}"
    kinds = _KNOWN.get(name)
    if kinds is None:
        raise InvalidRequest(
            f"{param}: is not supported; known are {', '.join(sorted(_KNOWN))}", param=param
        )
    if value is None:
        return None
    if type(value) not in kinds:
        raise InvalidRequest(f"{param}: must be a {kinds[0].__name__}", param=param)
    if (isinstance(value, str) and len(value) > _MAX_TEXT) or (
        isinstance(value, int) and abs(value) > 2**31
    ):
        raise InvalidRequest(f"{param}: is too large", param=param)
    return value
