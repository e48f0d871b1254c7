"""What every benchmark prints: one JSON object, or the same as a table."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Report", "machine"]


@dataclass(slots=True)
class Report:
    """Results of one benchmark, in the order they were added."""

    bench: str
    version: str
    model: str
    config: Mapping[str, Any]
    machine: Mapping[str, Any]
    load_before: float
    results: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        scenario: str,
        arm: str,
        metric: str,
        unit: str,
        values: Iterable[float],
        **more: float,
    ) -> float:
        """Add one row; its value is the median, which is returned. `more`: further fields, such as
        `floor`, the theoretical best."""
        numbers = list(values)
        median = statistics.median(numbers)
        row = {
            "scenario": scenario,
            "arm": arm,
            "metric": metric,
            "value": round(median, 4),
            "unit": unit,
            "runs": len(numbers),
            "min": round(min(numbers), 4),
            "max": round(max(numbers), 4),
            **more,
        }
        self.results.append(row)
        return median

    def add_missing(self, scenario: str, arm: str, metric: str, reason: str) -> None:
        row = {"scenario": scenario, "arm": arm, "metric": metric, "value": None, "reason": reason}
        self.results.append(row)

    def json(self) -> str:
        names = ("bench", "version", "model", "machine", "load_before", "config", "results")
        return json.dumps({name: getattr(self, name) for name in names})

    def table(self) -> str:
        """Plain text, one row a result."""
        head = ("scenario", "arm", "metric", "median", "min", "max", "floor", "unit")
        rows = [head] + [_cells(row) for row in self.results]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def machine(gpu: str | None, ram_bytes: int) -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "ram_bytes": ram_bytes,
        "os": platform.platform(terse=True),
    }


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    first = (row["scenario"], row["arm"], row["metric"])
    if row["value"] is None:
        return (*first, "-", "", "", "", row["reason"])
    figures = [_figure(row.get(name)) for name in ("value", "min", "max", "floor")]
    return (*first, *figures, row["unit"])


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
