from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.bench.arms import Arm, BareArm, HttpArm, Stream, WorkerArm, decode_rate
from cli.bench.report import Report
from node.engine.messages import Load


def make_report() -> Report:
    return Report("engine", "0", "tiny", {"engine.n_ctx": 512}, {"cores": 2}, 0.1)


def test_a_report_holds_the_median_and_how_far_the_runs_spread() -> None:
    report = make_report()
    assert report.add("decode_1", "http", "decode_tok_s", "tok/s", [3.0, 1.0, 2.0]) == 2.0
    row = json.loads(report.json())["results"][0]
    assert (row["value"], row["runs"], row["min"], row["max"]) == (2.0, 3, 1.0, 3.0)
    assert "decode_1" in report.table()


def test_a_scenario_that_could_not_run_is_in_the_results() -> None:
    report = make_report()
    report.add_missing("busy_core", "busy", "decode_tok_s", "the machine has one core")
    row = json.loads(report.json())["results"][0]
    assert row["value"] is None
    assert "one core" in report.table()


def test_the_rate_counts_only_the_time_in_which_all_streams_ran() -> None:
    first = Stream(0.0, [1.0, 2.0, 3.0, 4.0])
    second = Stream(0.0, [2.0, 3.0, 4.0, 5.0])
    assert decode_rate([first, second]) == pytest.approx(4 / 2)


@pytest.fixture
def load(model_path: Path) -> Load:
    return Load(
        path=str(model_path),
        n_ctx=512,
        n_batch=128,
        n_ubatch=128,
        max_sequences=4,
        gpu_layers=0,
        type_k="f16",
        type_v="f16",
        threads=2,
    )


@pytest.mark.model
def test_every_arm_decodes_the_real_model(load: Load, daemon: Any) -> None:
    async def measure(start: Callable[[], Any]) -> tuple[float, float]:
        arm: Arm = await start()
        try:
            return await arm.first_token_s(16), await arm.decode_tok_s(6, 2)
        finally:
            await arm.close()

    async def http() -> HttpArm:
        return HttpArm(daemon.port, "smollm2:135m")

    for start in (lambda: BareArm.start(load), lambda: WorkerArm.start(load), http):
        first_token_s, rate = asyncio.run(measure(start))
        assert first_token_s > 0
        assert rate > 0
