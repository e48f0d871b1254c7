"""The table of families: what their calls look like, and how a template tells its family."""

from __future__ import annotations

from dataclasses import dataclass

from node.chat.formats.base import Syntax
from node.chat.formats.constrained import CallShape
from node.chat.formats.delimited import (
    deepseek,
    function_gemma,
    gemma4,
    lfm2,
    mistral,
    tool_code,
)
from node.chat.formats.reasoning import Markers
from node.chat.formats.tagged import bare_json, fenced_json, tagged_json
from node.chat.formats.xmlish import function_tags

__all__ = ["FAMILIES", "Family", "family_of"]

_THINK = Markers("<think>", "</think>")
_HERMES = tagged_json("<tool_call>", "</tool_call>")
_HERMES_SHAPE = CallShape('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
_BARE_SHAPE = CallShape('{"name": "', '", "arguments": ', "}")


@dataclass(frozen=True, slots=True)
class Family:
    """
    Attributes:
        shape: how a call is written when one must come.
        markers_are_special: calls begin with a control token, which the engine has to show.
        short_ids: the template takes only call ids of nine letters and digits.
        answer_prefix: what an answer that must be JSON begins with.
    """

    name: str
    syntaxes: tuple[Syntax, ...]
    shape: CallShape
    reasoning: Markers = _THINK
    markers_are_special: bool = False
    short_ids: bool = False
    answer_prefix: str = ""


_TABLE = (
    Family("hermes", (_HERMES, function_tags()), _HERMES_SHAPE),
    Family("qwen_coder", (_HERMES, function_tags()), _HERMES_SHAPE),
    Family(
        "llama3",
        (tagged_json("<|python_tag|>", None), function_tags(), bare_json("{")),
        CallShape('{"name": "', '", "parameters": ', "}"),
        markers_are_special=True,
    ),
    Family(
        "mistral",
        (mistral(),),
        CallShape('[TOOL_CALLS][{"name": "', '", "arguments": ', "}]"),
        reasoning=Markers("[THINK]", "[/THINK]"),
        markers_are_special=True,
        short_ids=True,
    ),
    Family(
        "gemma",
        (_HERMES, tool_code(), fenced_json("json", "tool_call"), bare_json("{", "[")),
        _HERMES_SHAPE,
    ),
    Family(
        "gemma4",
        (gemma4(),),
        _BARE_SHAPE,
        reasoning=Markers("<|channel>thought", "<channel|>"),
        markers_are_special=True,
    ),
    Family("function_gemma", (function_gemma(),), _BARE_SHAPE, markers_are_special=True),
    Family(
        "granite",
        (tagged_json("<|tool_call|>", None), _HERMES),
        CallShape('<|tool_call|>[{"name": "', '", "arguments": ', "}]"),
        markers_are_special=True,
    ),
    Family(
        "phi",
        (tagged_json("<|tool_call|>", "<|/tool_call|>"), tagged_json("functools", None)),
        CallShape('<|tool_call|>[{"name": "', '", "arguments": ', "}]<|/tool_call|>"),
        markers_are_special=True,
    ),
    Family(
        "deepseek",
        deepseek(),
        CallShape(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        markers_are_special=True,
    ),
    Family(
        "harmony",
        (),
        CallShape(
            "<|start|>assistant<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
        ),
        reasoning=Markers("<|channel|>analysis<|message|>", "<|end|>"),
        markers_are_special=True,
        answer_prefix="<|start|>assistant<|channel|>final<|message|>",
    ),
    Family(
        "lfm2",
        (lfm2(),),
        CallShape('<|tool_call_start|>[{"name": "', '", "arguments": ', "}]<|tool_call_end|>"),
        markers_are_special=True,
    ),
    # What models write that have seen tools only in our own words.
    Family(
        "generic",
        (_HERMES, function_tags(), fenced_json("json", "tool_call"), bare_json("{", "[")),
        _HERMES_SHAPE,
    ),
)

FAMILIES = {family.name: family for family in _TABLE}

# The first text that is in the template decides.
_TELLTALES = (
    ("<|channel|>", "harmony"),
    ("<｜tool▁call", "deepseek"),
    ("<｜Assistant｜>", "deepseek"),
    ("<|tool_call_start|>", "lfm2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<parameter=", "qwen_coder"),
    ("<|/tool_call|>", "phi"),
    ("<|tool|>", "phi"),
    ("<|tool_call|>", "granite"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "function_gemma"),
    ("<|python_tag|>", "llama3"),
    ("<tool_call>", "hermes"),
    ("<|start_header_id|>", "llama3"),
    ("<start_of_turn>", "gemma"),
)


def family_of(template: str, knows_tools: bool, architecture: str = "") -> Family:
    """By the template's text. One that does not know tools gets them in our own words."""
    found = next((name for text, name in _TELLTALES if text in template), "generic")
    if found == "generic" and architecture.startswith("gemma"):
        found = "gemma"
    if knows_tools or found in ("harmony", "gemma"):
        return FAMILIES[found]
    return _generic(FAMILIES[found])


def _generic(family: Family) -> Family:
    """A model that is asked in our words may still answer in its own, and reasons in its own."""
    generic = FAMILIES["generic"]
    return Family(
        "generic",
        (*family.syntaxes, *generic.syntaxes),
        generic.shape,
        reasoning=family.reasoning,
        markers_are_special=family.markers_are_special,
    )
