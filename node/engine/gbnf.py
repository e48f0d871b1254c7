"""Refuses grammars that llama.cpp's parser would not survive, before it sees them.

Whether the rest compiles is the parser's business. All checks take linear time.
"""

from __future__ import annotations

import re
from itertools import accumulate

__all__ = ["GrammarError", "check_gbnf"]

_MAX_REPETITIONS = 2000
_MAX_GRAMMAR_BYTES = 256 * 1024
# Literals, character classes and comments; to the end if not closed, so that this stays linear.
_GBNF_TEXT = re.compile(
    r'"(?:\\[\s\S]?|[^"\\])*(?:"|\Z)|\[(?:\\[\s\S]?|[^\]\\])*(?:\]|\Z)|#[^\r\n]*'
)
_MAX_GRAMMAR_DEPTH = 1000  # the parser recurses, and a stack overflow ends the process


class GrammarError(ValueError):
    """A grammar that llama.cpp cannot compile."""


def check_gbnf(gbnf: str) -> None:
    """
    Raises:
        GrammarError: too large, too deep, or without the rule `root`.
    """
    if len(gbnf.encode()) > _MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar is larger than {_MAX_GRAMMAR_BYTES} bytes")
    if not re.search(r"^root\s*::=", gbnf, re.MULTILINE):
        raise GrammarError("the grammar has no rule 'root'")
    syntax = _GBNF_TEXT.sub("", gbnf)
    if max(accumulate((c == "(") - (c == ")") for c in syntax), default=0) > _MAX_GRAMMAR_DEPTH:
        raise GrammarError(f"the grammar is nested deeper than {_MAX_GRAMMAR_DEPTH}")
    for braces in re.findall(r"\{[^{}]*\}", syntax):
        if any(len(n) > 6 or int(n) > _MAX_REPETITIONS for n in re.findall(r"[0-9]+", braces)):
            raise GrammarError(f"a repetition is larger than {_MAX_REPETITIONS}")
