"""The models known by a short name. The list itself is `catalogue.toml` beside this file."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CatalogueEntry", "load_catalogue"]


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """`size_bytes` is of the file to be loaded; `context_tokens` the window it was trained for."""

    name: str
    source: str
    size_bytes: int
    sha256: str | None
    licence: str
    context_tokens: int
    description: str


@functools.cache
def load_catalogue() -> tuple[CatalogueEntry, ...]:
    import tomllib

    text = Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8")
    return tuple(
        CatalogueEntry(
            name=name,
            source=row["source"],
            size_bytes=row["size_bytes"],
            sha256=row.get("sha256"),
            licence=row["licence"],
            context_tokens=row["context_tokens"],
            description=row["description"],
        )
        for name, row in tomllib.loads(text).items()
    )
