"""Keeps the text of special tokens, when it comes from a client, from becoming special tokens.

Before rendering a private separator is put inside every occurrence in the client's strings;
after rendering the prompt is cut there, and each piece is tokenised by itself, so that no piece
holds the whole token. The joined pieces are the text the template wrote, unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

__all__ = ["Guard", "SpecialTokens"]

# A Unicode noncharacter: valid in a str, never assigned, not for interchange.
_SEPARATOR = "\ufdd0"


class SpecialTokens:
    """The texts that the tokenizer reads as one special token.

    Three cases in a client's string: a whole special token; the beginning of one at the string's
    end, which the template could complete; the middle or end of one at its start.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(t for t in texts if len(t) > 1)
        self._lengths: dict[str, list[int]] = {}
        for text in self._texts:
            lengths = self._lengths.setdefault(text[0], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        self._beginnings = frozenset(t[:n] for t in self._texts for n in range(1, len(t)))
        self._longest = max(map(len, self._texts), default=0)
        self._all = "\0".join(self._texts)
        self._ends = frozenset(
            t[i:] for t in self._texts for i in range(1, len(t) - 1) if not t[i:].isalnum()
        )

    def __contains__(self, text: str) -> bool:
        return text in self._texts

    def guard(self, text: str, separator: str, allowed: frozenset[str] = frozenset()) -> str:
        """`text` with separators; tokens in `allowed` stay whole."""
        cuts = set(self._inside(text, allowed)) | set(self._at_edges(text))
        if not cuts:
            return text
        ordered = [0, *sorted(cuts), len(text)]
        return separator.join(text[a:b] for a, b in pairwise(ordered))

    def _inside(self, text: str, allowed: frozenset[str]) -> Iterable[int]:
        for first, lengths in self._lengths.items():
            at = text.find(first)
            while at >= 0:
                if any(
                    text[at : at + n] in self._texts and text[at : at + n] not in allowed
                    for n in lengths
                ):
                    yield at + 1
                at = text.find(first, at + 1)

    def _at_edges(self, text: str) -> Iterable[int]:
        tail = text[-self._longest :]
        if any(tail[i:] in self._beginnings for i in range(len(tail))):
            yield len(text)
        head = text[: self._longest]
        if any(head[:n] in self._ends for n in range(2, len(head) + 1)):
            yield 1
        elif len(text) > 1 and not text.isalnum() and len(text) < self._longest:
            if text in self._all:
                yield 1


class Guard:
    """The strings of one request on their way into the prompt, and the prompt cut up after it.

    An assistant's message may hold the marks of its reasoning whole, because templates look for
    them to take the reasoning of earlier turns out. They give a client nothing: it could as well
    write such a turn.
    """

    def __init__(self, special: SpecialTokens, reasoning: Sequence[str]) -> None:
        self._special = special
        self._reasoning = frozenset(reasoning)

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [
            {
                key: value
                if key == "role"
                else self.strings(value, assistant=message["role"] == "assistant")
                for key, value in message.items()
            }
            for message in messages
        ]

    def strings(self, value: Any, *, assistant: bool = False) -> Any:
        allowed = self._reasoning if assistant else frozenset()
        return _map_strings(value, lambda text: self._string(text, allowed))

    def segments(self, prompt: str) -> tuple[str, ...]:
        return tuple(part for part in prompt.split(_SEPARATOR) if part)

    def _string(self, text: str, allowed: frozenset[str]) -> str:
        if _SEPARATOR in text:
            # Not for interchange, by Unicode; a real text does not have it.
            text = text.replace(_SEPARATOR, "\ufffd")
        return self._special.guard(text, _SEPARATOR, allowed)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string, keys too, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(k)): _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(item, change) for item in value]
    return value
