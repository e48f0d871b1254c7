"""Engine workers: one child process per loaded model, and the daemon's side of it.

Importing this package loads neither llama.cpp nor numpy; only `worker` and what it imports do.
"""

from __future__ import annotations

from node.engine.base import Engine, GenerateRequest

__all__ = ["Engine", "GenerateRequest"]
