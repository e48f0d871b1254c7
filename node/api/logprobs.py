"""Log-probabilities in the two shapes OpenAI's routes have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from node.engine.messages import TokenLogprob

__all__ = ["LegacyLogprobs", "chat_logprobs"]

# JSON has no infinity; this is what OpenAI sends for a token that could not come.
_LOWEST = -9999.0


def chat_logprobs(items: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {
            **_token(item.text_bytes, item.logprob),
            "top_logprobs": [_token(piece, value) for piece, value in item.top],
        }
        for item in items
    ]


class LegacyLogprobs:
    """The four parallel lists of /v1/completions; offsets count characters of one choice."""

    def __init__(self) -> None:
        self._offset = 0

    def take(self, items: Iterable[TokenLogprob]) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for item in items:
            text = _text(item.text_bytes)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(max(item.logprob, _LOWEST))
            lists["top_logprobs"].append({_text(p): max(v, _LOWEST) for p, v in item.top})
            lists["text_offset"].append(self._offset)
            self._offset += len(text)
        return lists


def _token(piece: bytes, value: float) -> dict[str, Any]:
    return {"token": _text(piece), "logprob": max(value, _LOWEST), "bytes": list(piece)}


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
