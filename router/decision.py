"""The decision where a step of a program runs, as a value that can be logged and shown."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Decision", "decide"]


class Decision(NamedTuple):
    """`place` is "local"; `reason` says why in a few words, fit for a response header."""

    place: str
    model: str
    reason: str


def decide(requested: str, default_model: str) -> Decision:
    """`auto` and `local` mean the default model; any other name pins that model."""
    if requested in ("auto", "local"):
        return Decision("local", default_model, "no cloud model is configured")
    return Decision("local", requested, "model named by the request")
