"""`ingle bench kv`: prompt tokens computed when agents pause, alternate, fork and are restarted.

Everything goes over HTTP as a client would send it, so that other servers can be measured too.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx

from cli.bench.ledger import Ledger
from cli.bench.private import PrivateNode
from cli.bench.report import Report, machine
from node import __version__
from node.engine.messages import Load
from node.hardware import detect_hardware
from node.models import InstalledModel, check_gguf, model_shape

__all__ = ["Answer", "Bench", "repeated", "run"]

ARM = "inglenook"
N_CTX = 8192
ANSWER_TOKENS = 24
_WAIT_S = 120.0
_FIXED_TOKEN = " the"

Say = Callable[[str], None]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """`computed` is None where the server does not say."""

    text: str
    message: Mapping[str, Any]
    computed: int | None
    ttft_ms: float
    floor: int


@dataclass(slots=True)
class Count:
    """What the requests of one scenario cost; `unknown` when a server does not say."""

    computed: int = 0
    floor: int = 0
    turns: int = 0
    unknown: bool = False
    ttft_ms: list[float] = field(default_factory=list)


class Bench:
    """One server under test. `node` is ours, started and killed as scenarios want; None for a
    server somebody else runs, which `restart_command` kills and starts."""

    def __init__(
        self,
        node: PrivateNode | None,
        model: InstalledModel,
        ledger: Ledger,
        base_url: str,
        restart_command: str,
        fixed_answers: bool,
    ) -> None:
        self.node = node
        self.model = model
        self.ledger = ledger
        self.count = Count()
        self.bytes_per_token = model_shape(check_gguf(model.path)).kv_bytes_per_token("f16")
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._restart_command = restart_command
        self._settings: dict[str, Any] = {}
        self._bias: dict[str, float] = {}
        if fixed_answers:
            (token,) = ledger.tokenize([_FIXED_TOKEN])
            self._bias = {str(token): 100.0}

    @property
    def url(self) -> str:
        return self.node.url if self.node else self._base_url

    def begin(self, **settings: Any) -> None:
        """A fresh server with an empty cache, as far as that is in our power."""
        self.ledger.forget()
        self.count = Count()
        self._settings = {"engine.n_ctx": N_CTX, **settings}
        if self.node:
            self.node.stop()
            for path in sorted(self.node.paths.kv.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            self.node.start(self._settings)
        else:
            self._restart_other()

    def restart(self, **settings: Any) -> None:
        """Kill -9 and start again. Only what comes after it is counted."""
        self._settings |= settings
        if self.node:
            self.node.kill()
            self.node.start(self._settings)
        else:
            self._restart_other()
        self.count = Count()

    def _restart_other(self) -> None:
        if not self._restart_command:
            raise RuntimeError("this scenario needs --restart-command for a server of others")
        subprocess.run(self._restart_command, shell=True, check=True)
        deadline_s = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline_s:
            try:
                if httpx.get(f"{self.url}/v1/models", timeout=5, trust_env=False).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"{self.url} does not answer after its restart")

    def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        max_tokens: int = ANSWER_TOKENS,
        force: str = "",
        **more: Any,
    ) -> Answer:
        """One request, counted. `force`: the tool that must be called."""
        tokens = self.ledger.tokens(messages, tools, force)
        floor = self.ledger.floor(tokens)
        body: dict[str, Any] = {
            "model": self.model.name,
            "max_tokens": max_tokens,
            "temperature": 0,
            **more,
        }
        if self._bias:
            body["logit_bias"] = self._bias
        if self.ledger.chat is None:
            route = "completions"
            body["prompt"] = self.ledger.plain(messages)
        else:
            route = "chat/completions"
            body["messages"] = messages
            if tools:
                body["tools"] = tools
            if force:
                body["tool_choice"] = {"type": "function", "function": {"name": force}}
        sent_s = time.perf_counter()
        response = httpx.post(f"{self.url}/v1/{route}", json=body, timeout=600, trust_env=False)
        took_ms = 1000 * (time.perf_counter() - sent_s)
        if not response.is_success:
            raise RuntimeError(f"{response.status_code}: {response.text[:300]}")
        reply = response.json()
        answer = self._read(reply, floor, took_ms)
        choice = reply["choices"][0]
        if answer.message.get("tool_calls"):  # what was written is known as the client repeats it
            self.ledger.note(self.ledger.tokens([*messages, repeated(answer)], tools), "", False)
        else:
            self.ledger.note(tokens, answer.text, choice["finish_reason"] == "length")
        self._note(answer)
        return answer

    def _read(self, reply: Mapping[str, Any], floor: int, took_ms: float) -> Answer:
        choice, usage = reply["choices"][0], reply["usage"]
        message = choice.get("message") or {"role": "assistant", "content": choice.get("text")}
        timings = reply.get("timings") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        computed = timings.get("computed_tokens", timings.get("prompt_n"))
        if computed is None and cached is not None:
            computed = usage["prompt_tokens"] - cached
        return Answer(
            message.get("content") or "",
            message,
            computed,
            timings.get("ttft_ms") or timings.get("prompt_ms") or took_ms,
            floor,
        )

    def _note(self, answer: Answer) -> None:
        count = self.count
        count.turns += 1
        count.floor += answer.floor
        count.ttft_ms.append(answer.ttft_ms)
        if answer.computed is None:
            count.unknown = True
        else:
            count.computed += answer.computed

    def settle(self, pause_s: float = 2.5) -> None:
        """A pause longer than what a kill may lose (`kvcache.flush_interval_s`)."""
        time.sleep(pause_s)


def repeated(answer: Answer) -> Message:
    """A tool call as a client sends it back."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": answer.message["tool_calls"],
    }


def run(
    model: InstalledModel,
    scenarios: Sequence[str],
    runs: int,
    say: Say,
    *,
    base_url: str = "",
    arm: str = "",
    restart_command: str = "",
    fixed_answers: bool = False,
    throttle: Sequence[float] = (),
) -> Report:
    """Measure the scenarios one by one, each `runs` times; values are medians."""
    from cli.bench.kv_scenarios import SCENARIOS, throttled

    hardware = detect_hardware()
    report = Report(
        "kv",
        __version__,
        model.name,
        {"engine.n_ctx": N_CTX},
        machine(hardware.gpus[0].name if hardware.gpus else None, hardware.ram_total_bytes),
        round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
    )
    name = (arm or "other") if base_url else ARM
    with ExitStack() as stack:
        node = None if base_url else stack.enter_context(PrivateNode(model))
        ledger = Ledger(_load(model))
        stack.callback(ledger.close)
        bench = Bench(node, model, ledger, base_url, restart_command, fixed_answers)
        for scenario in scenarios:
            say(f"{scenario}: {(SCENARIOS[scenario].__doc__ or '').splitlines()[0]}")
            try:
                SCENARIOS[scenario](bench, report, name, runs)
            except (RuntimeError, httpx.HTTPError, subprocess.SubprocessError) as error:
                report.add_missing(scenario, name, "prompt_tokens_computed", str(error))
        if throttle:
            throttled(bench, report, throttle, runs, say)
    return report


def _load(model: InstalledModel) -> Load:
    return Load(
        path=str(model.path),
        n_ctx=64,
        n_batch=64,
        n_ubatch=64,
        max_sequences=1,
        gpu_layers=0,
        type_k="f16",
        type_v="f16",
        threads=1,
    )
