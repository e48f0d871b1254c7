"""JSON schemas as grammars: what is compiled always validates, what cannot be is refused."""

from __future__ import annotations

from node.chat.schemas.compiler import SchemaCompiler, check_schema
from node.chat.schemas.gbnf import Rules, literal

__all__ = ["Rules", "SchemaCompiler", "check_schema", "literal"]
