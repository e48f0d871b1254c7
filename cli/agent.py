"""The agent that `ingle demo` runs: reads a document, asks, looks words up between its questions.

It decides by fixed rules what to ask and what to look up; the model only answers. So it shows
what a server does for an agent, also with a model too small to call tools by itself.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources

from cli.conversation import Conversation, Turn

__all__ = ["QUESTIONS", "Finding", "Step", "document", "look_up", "opening", "steps"]

QUESTIONS = (
    "What is this guide about? Answer in one sentence.",
    "Which of the two phases reads the prompt, and why is it the faster one?",
    "Why does an agent profit when the cache is kept during a tool pause?",
    "What spoils a cache, and what should come first in a prompt?",
    "Name one of the three rules for the house.",
)
_PLANNED_WORDS = ("prefill", "agent", "letter", "diary")
_PAUSE_S = 1.0
# Words that would be a waste of a look-up.
_COMMON = frozenset(
    "about after again because before behind could during every first other their there these"
    " those three which while whole would".split()
)
_WORD = re.compile(r"[a-z]{5,}")


@dataclass(frozen=True, slots=True)
class Finding:
    """What the look-up tool brought back."""

    word: str
    count: int
    sentence: str

    def __str__(self) -> str:
        return f'"{self.word}" occurs {self.count} times; first: "{self.sentence}"'


@dataclass(frozen=True, slots=True)
class Step:
    """One model call with the tool use that preceded it."""

    number: int
    found: Finding | None
    question: str
    turn: Turn


def document() -> str:
    return resources.files("cli").joinpath("data/banked_fire.md").read_text(encoding="utf-8")


def opening(text: str) -> list[dict[str, str]]:
    """What never changes comes first, as the document itself advises."""
    rules = "Answer briefly, and only from the document below."
    return [{"role": "system", "content": f"{rules}\n\n{text}"}]


def look_up(text: str, word: str) -> Finding:
    """Count `word` as a whole word, and quote the first sentence that has it."""
    pattern = re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    first = next((s for s in sentences if pattern.search(s)), "")
    return Finding(word, len(pattern.findall(text)), first)


def steps(
    talk: Conversation,
    text: str,
    show: Callable[[str], None],
    announce: Callable[[int, Finding | None, str], None],
) -> Iterator[Step]:
    """Run the agent; `announce` is called before each model call, `show` with its output."""
    found: Finding | None = None
    used: set[str] = set()
    for number, question in enumerate(QUESTIONS, 1):
        announce(number, found, question)
        turn = talk.say(question if found is None else f"Looked up: {found}\n\n{question}", show)
        yield Step(number, found, question, turn)
        if number < len(QUESTIONS):
            word = _next_word(turn.text, text, used, _PLANNED_WORDS[number - 1])
            used.add(word)
            found = look_up(text, word)
            # As long as a quick tool takes; meanwhile the server may do what it likes.
            time.sleep(_PAUSE_S)


def _next_word(answer: str, text: str, used: set[str], planned: str) -> str:
    """The rarest word of the document that the answer used, else the planned one."""
    known = _WORD.findall(text.lower())
    candidates = {word for word in _WORD.findall(answer.lower()) if word in known}
    candidates -= used | _COMMON
    return min(candidates, key=lambda word: (known.count(word), word), default=planned)
