"""Tokens and times of one API request, over all its choices; the `usage` and `timings` objects."""

from __future__ import annotations

import time
from typing import Any

from node.api.metrics import Metrics
from node.engine.messages import Finish, Usage

__all__ = ["Tally"]


class Tally:
    """`choices_per_prompt` choices share a prompt: it is counted once, with what its first
    choice found cached."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._usages: dict[int, Usage] = {}
        self.choices_per_prompt = 1
        self.ttft_s: float | None = None
        self.reasoning_tokens = 0

    def first_item(self) -> None:
        self.ttft_s = time.monotonic() - self._started_s

    def finish(self, index: int, finish: Finish) -> None:
        self._usages[index] = finish.usage

    def usage(self) -> dict[str, Any]:
        prompts = [u for i, u in self._usages.items() if i % self.choices_per_prompt == 0]
        prompt_tokens = sum(u.prompt_tokens for u in prompts)
        completion_tokens = sum(u.completion_tokens for u in self._usages.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in prompts)},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def timings(self) -> dict[str, float]:
        """Prompt tokens of all choices by where they came from, and how long things took."""
        usages = self._usages.values()
        first = self._usages.get(0, Usage())
        decode_s = max((u.decode_s for u in usages), default=0.0)
        # The first token of a choice belongs to prefill.
        decoded_tokens = sum(max(0, u.completion_tokens - 1) for u in usages)
        return {
            "queued_ms": _ms(first.queued_s),
            "prefill_ms": _ms(first.prefill_s),
            "decode_ms": _ms(decode_s),
            "ttft_ms": _ms(self.ttft_s or 0.0),
            "device_tokens": sum(u.device_tokens for u in usages),
            "dram_tokens": sum(u.dram_tokens for u in usages),
            "ssd_tokens": sum(u.ssd_tokens for u in usages),
            "computed_tokens": sum(u.computed_tokens for u in usages),
            "tokens_per_s": round(decoded_tokens / decode_s, 2) if decode_s > 0 else 0.0,
        }

    def record(self, metrics: Metrics, model: str) -> None:
        usage = self.usage()
        metrics.prompt_tokens.add(usage["prompt_tokens"], model)
        metrics.cached_tokens.add(usage["prompt_tokens_details"]["cached_tokens"], model)
        metrics.completion_tokens.add(usage["completion_tokens"], model)
        for source in ("device", "dram", "ssd", "computed"):
            amount = sum(getattr(u, f"{source}_tokens") for u in self._usages.values())
            metrics.tokens_by_source.add(amount, model, source)
        if self.ttft_s is not None:
            metrics.ttft.observe(self.ttft_s, model)
        for one in self._usages.values():
            if one.completion_tokens > 1:
                metrics.token_latency.observe(one.decode_s / (one.completion_tokens - 1), model)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
