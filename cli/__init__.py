"""`ingle`: commands over the daemon's HTTP API and the model store. Nothing runs at import."""

from __future__ import annotations

__all__: list[str] = []
