"""What commands print: tables and JSON on stdout, remarks and progress on stderr.

Colours only on a terminal (and not under NO_COLOR). No command prints by other means.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

__all__ = ["age", "dim", "mebi", "print_json", "print_table", "say", "size", "styled"]

_UNITS = ("B", "kB", "MB", "GB", "TB")


def say(text: str) -> None:
    """A remark for the person at the terminal; never part of the output proper."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Dataclasses and named tuples become objects, paths become strings."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def print_table(head: Sequence[str], rows: Sequence[Sequence[Any]], right: str = "") -> None:
    """Aligned columns. `right` names the heads whose column is flush right, space-separated."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    flush_right = [title in right.split() for title in head]

    def line(row: Sequence[str]) -> str:
        parts = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, flush_right, strict=True)
        )
        return "  ".join(parts).rstrip()

    print(styled(line(head), "1"))
    for row in cells:
        print(line(row))


def styled(text: str, code: str, stream: TextIO | None = None) -> str:
    """`text` in an ANSI style when `stream` (default stdout) is a terminal that shows it."""
    stream = stream or sys.stdout
    if not stream.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def dim(text: str, stream: TextIO | None = None) -> str:
    return styled(text, "2", stream)


def size(n_bytes: float) -> str:
    """Decimal units, as disks and download pages count."""
    for unit in _UNITS[:-1]:
        if abs(n_bytes) < 999.5:
            return f"{n_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} {_UNITS[-1]}"


def mebi(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"


def age(seconds: float) -> str:
    """The two largest units: `3 h 12 min`."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    parts = [(days, "d"), (h, "h"), (m, "min"), (s, "s")]
    first = next((i for i, (n, _) in enumerate(parts) if n), len(parts) - 1)
    return " ".join(f"{n} {unit}" for n, unit in parts[first : first + 2] if n) or "0 s"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return str(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not `asdict`: it would copy deeply and miss the named tuples inside.
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value
