"""How the families of models write reasoning and tool calls, and which family a model is of."""

from __future__ import annotations

from node.chat.formats.base import BodyParser, Syntax, TextParser, Tools
from node.chat.formats.constrained import CallShape, ForcedCallParser
from node.chat.formats.families import FAMILIES, Family, family_of
from node.chat.formats.harmony import HarmonyParser
from node.chat.formats.reasoning import Markers, ReasoningParser

__all__ = [
    "FAMILIES",
    "BodyParser",
    "CallShape",
    "Family",
    "ForcedCallParser",
    "HarmonyParser",
    "Markers",
    "ReasoningParser",
    "Syntax",
    "TextParser",
    "Tools",
    "family_of",
]
