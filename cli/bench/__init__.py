"""`ingle bench`: measurements that anybody can repeat, as ratios taken in one run."""

from __future__ import annotations

from cli.bench.command import app

__all__ = ["app"]
