"""The grammar of one reply: calls that must come, JSON that must come, or either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from node.chat.formats import CallShape
from node.chat.schemas import Rules, SchemaCompiler, literal

__all__ = ["ReplyGrammar"]

# A model that has just stopped thinking begins on a new line.
_LEAD = "[ \\t\\n]{0,4}"


class ReplyGrammar:
    """Alternatives for a whole reply. `param` is the request field that asked for it."""

    def __init__(self, param: str) -> None:
        self.param = param
        self._rules = Rules()
        self._alternatives: list[str] = []

    def add_call(self, shape: CallShape, name: str, parameters: Any, param: str) -> None:
        arguments = "object"
        if parameters:
            arguments = SchemaCompiler(self._rules, parameters, param).compile()
        between, after = literal(shape.between), literal(shape.after)
        before = literal(shape.before + name)
        self._alternatives.append(f"{before} {between} {arguments} {after}")

    def add_json(self, schema: Mapping[str, Any] | None, before: str) -> None:
        value = "object"
        if schema is not None:
            value = SchemaCompiler(self._rules, schema, self.param).compile()
        self._alternatives.append(f"{literal(before)} {value}")

    def text(self, *, after_thinking: bool) -> str:
        lead = f"{_LEAD} " if after_thinking else ""
        return self._rules.text(f"{lead}( {' | '.join(self._alternatives)} )")
