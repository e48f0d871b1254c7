"""Counters and histograms of the node, and their Prometheus text; no prompt becomes a label."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from node import __version__
from node.api.gate import Gate
from node.base import ModelState

__all__ = ["Counter", "Histogram", "Metrics"]

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

Labels = tuple[str, ...]
Row = tuple[str, float]


class Counter:
    """Only goes up; one value for each combination of labels."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str]) -> None:
        self._head = (name, help_text)
        self._labels = labels
        self._values: dict[Labels, float] = {}

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def lines(self) -> Iterable[str]:
        rows = [(_labels(self._labels, key), value) for key, value in self._values.items()]
        return _family(*self._head, "counter", rows)


class Histogram:
    """Cumulative buckets, sum and count for each model."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._head = (name, help_text)
        self._bounds = bounds
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, value: float, model: str) -> None:
        counts = self._counts.setdefault(model, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[model] = self._sums.get(model, 0.0) + value

    def lines(self) -> Iterable[str]:
        rows: list[Row] = []
        for model, counts in self._counts.items():
            total = 0
            for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
                total += count
                rows.append(("_bucket" + _labels(("model", "le"), (model, bound)), total))
            rows.append(("_sum" + _labels(("model",), (model,)), self._sums[model]))
            rows.append(("_count" + _labels(("model",), (model,)), total))
        return _family(*self._head, "histogram", rows)


class Metrics:
    """Everything `/metrics` shows. Changed from the event loop only."""

    def __init__(self) -> None:
        by_model = ("model",)
        self.requests = Counter(
            "requests_total", "Requests by outcome.", ("model", "route", "outcome")
        )
        self.rejected = Counter("requests_rejected_total", "Requests refused with 429.", ())
        self.prompt_tokens = Counter("prompt_tokens_total", "Prompt tokens.", by_model)
        self.cached_tokens = Counter(
            "cached_tokens_total", "Prompt tokens that were not computed again.", by_model
        )
        self.tokens_by_source = Counter(
            "prompt_tokens_by_source_total",
            "Prompt tokens by where their state came from.",
            ("model", "source"),
        )
        self.completion_tokens = Counter("completion_tokens_total", "Tokens generated.", by_model)
        self.ttft = Histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _TTFT_S
        )
        self.token_latency = Histogram(
            "time_per_output_token_seconds", "Mean gap between tokens of a request.", _TOKEN_S
        )

    def render(self, gate: Gate, states: Sequence[ModelState]) -> str:
        families = [
            *(family.lines() for family in vars(self).values()),
            _family(
                "build_info", "Version.", "gauge", [(_labels(("version",), (__version__,)), 1)]
            ),
            _family("requests_waiting", "Without a first token.", "gauge", [("", gate.waiting)]),
            _family("requests_running", "Streaming tokens.", "gauge", [("", gate.running)]),
            *_model_families(states),
        ]
        return "".join(line + "\n" for family in families for line in family)


def _model_families(states: Sequence[ModelState]) -> Iterable[Iterable[str]]:
    def family(name: str, help_text: str, kind: str, values: Iterable[float]) -> Iterable[str]:
        rows = [
            (_labels(("model",), (state.id,)), value)
            for state, value in zip(states, values, strict=True)
        ]
        return _family(name, help_text, kind, rows)

    yield family("model_up", "1 when ready.", "gauge", [s.state == "ready" for s in states])
    yield family("model_in_use", "Requests holding it.", "gauge", [s.in_use for s in states])
    yield family("worker_rss_bytes", "Worker memory.", "gauge", [s.rss_bytes for s in states])
    yield family("worker_restarts_total", "Crashes.", "counter", [s.restarts for s in states])
    known = [state for state in states if state.stats is not None]
    yield from _cache_families([(s.id, s.stats.cache) for s in known if s.stats and s.stats.cache])
    for name, kind, help_text in _STATS:
        rows = [(_labels(("model",), (s.id,)), float(getattr(s.stats, name))) for s in known]
        yield _family(f"engine_{name}", help_text, kind, rows)


def _cache_families(caches: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterable[Iterable[str]]:
    """Bytes by tier, and everything that was not kept or not found, by reason."""
    held: list[Row] = []
    reasons: list[Row] = []
    for model, cache in caches:
        held += [
            (_labels(("model", "tier"), (model, tier)), cache[tier]["bytes"])
            for tier in ("dram", "ssd")
            if cache[tier]
        ]
        reasons += [
            (_labels(("model", "reason"), (model, reason)), count)
            for reason, count in cache["reasons"].items()
        ]
    yield _family("kv_bytes", "Computed state held; on disk, of all models.", "gauge", held)
    yield _family("kv_misses_total", "State not kept or not found.", "counter", reasons)


_STATS = (
    ("waiting", "gauge", "Sequences not admitted yet."),
    ("running", "gauge", "Sequences in the batch."),
    ("idle_sequences", "gauge", "Finished sequences kept as prefix cache."),
    ("cells_total", "gauge", "KV cells."),
    ("cells_free", "gauge", "KV cells in no sequence."),
    ("threads", "gauge", "CPU threads in use."),
    ("steps_total", "counter", "Engine steps since the worker started."),
    ("preemptions_total", "counter", "Running sequences set back to make room."),
)


def _family(name: str, help_text: str, kind: str, rows: Iterable[Row]) -> Iterable[str]:
    name = f"inglenook_{name}"
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
    for rest, value in rows:
        yield f"{name}{rest} {float(value):.10g}"


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    pairs = ",".join(f'{n}="{_escaped(v)}"' for n, v in zip(names, values, strict=True))
    return "{" + pairs + "}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
