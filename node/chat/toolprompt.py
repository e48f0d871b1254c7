"""Tools in our own words, for models whose template does not know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from node.chat.formats.jsontext import dump

__all__ = ["tools_in_words"]

_TEXT = """\
You can call functions. These are the functions, each as a JSON object:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between these tags, and nothing else:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result comes between <tool_response> tags. If no function is needed, answer in plain words."""


def tools_in_words(tools: Sequence[Mapping[str, Any]]) -> str:
    return _TEXT.format(tools="\n".join(dump(tool["function"]) for tool in tools))
