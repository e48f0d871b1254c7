"""Where a step runs. So far every step runs on the local model."""

from __future__ import annotations

from router.decision import Decision, decide

__all__ = ["Decision", "decide"]
