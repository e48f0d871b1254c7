"""The HTTP API: OpenAI's wire format, health, metrics and the admin routes."""

from __future__ import annotations

from node.api.app import create_app
from node.api.security import check_bind
from node.api.server import NodeServer

__all__ = ["NodeServer", "check_bind", "create_app"]
