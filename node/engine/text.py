"""Turns the bytes of tokens into text that may be shown: whole characters, no stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["TextStream"]


class TextStream:
    """Incremental decoder of one sequence's output.

    Text that might be the beginning of a stop string is held back until that is settled. After a
    stop string has been found, `stopped_by` names it and nothing more comes out.

    Args:
        stop: stop strings; the one that begins first in the text wins.
        skip_chars: characters at the start that the client already has.
    """

    def __init__(self, stop: Sequence[str], skip_chars: int = 0) -> None:
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._skip = skip_chars
        self.stopped_by: str | None = None

    def feed(self, data: bytes) -> str:
        """Text that became certain with these bytes; may be empty."""
        if self.stopped_by is not None:
            return ""
        text = self._held + self._decoder.decode(data)
        found = [(text.find(s), -len(s), s) for s in self._stop if s in text]
        if found:
            start, _, self.stopped_by = min(found)
            self._held = ""
            return self._deliver(text[:start])
        keep = self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return self._deliver(text[: len(text) - keep])

    def finish(self) -> str:
        """The rest, at the end of the output. An unfinished character is left out."""
        held, self._held = self._held, ""
        return self._deliver(held)

    def _possible_stop(self, text: str) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        longest = max((len(s) - 1 for s in self._stop), default=0)
        for n in range(min(longest, len(text)), 0, -1):
            tail = text[-n:]
            if any(s.startswith(tail) for s in self._stop):
                return n
        return 0

    def _deliver(self, text: str) -> str:
        if self._skip == 0:
            return text
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        return text[skipped:]
