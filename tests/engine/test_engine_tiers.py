"""State goes to the disk and comes back into another engine, for every kind of memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tiny_hybrid import write_tiny_hybrid
from tiny_recurrent import write_tiny_recurrent
from tiny_window import write_tiny_window

from node.engine.core import EngineCore
from node.engine.messages import CachePlan, Load, Sampling, Submit

pytestmark = pytest.mark.model

Run = Callable[..., list]  # type: ignore[type-arg]
Write = Callable[[Path, Path], Path]

PROMPT = list(range(300, 480))
FLUSH_S = 30.0

KINDS: dict[str, Write | None] = {
    "full": None,
    "window": lambda path, model: write_tiny_window(path, model, window=128),
    "hybrid": write_tiny_hybrid,
    "recurrent": write_tiny_recurrent,
}


def ask(number: int, prompt: list[int], tenant: str = "") -> Submit:
    return Submit(number, tuple(prompt), Sampling(), max_tokens=8, ignore_eos=True, tenant=tenant)


@pytest.fixture(params=KINDS)
def load(
    request: pytest.FixtureRequest,
    model_path: Path,
    make_load: Callable[..., Load],
    tmp_path: Path,
) -> Load:
    write = KINDS[request.param]
    path = write(tmp_path / "tiny.gguf", model_path) if write else model_path
    plan = CachePlan(
        dram_bytes=64 * 2**20,
        ssd_path=str(tmp_path / "kv"),
        ssd_bytes=10**9,
        ssd_free_floor_bytes=0,
        ssd_write_bytes_per_day=10**12,
        flush_interval_s=0.5,
    )
    made = make_load(n_ctx=512, max_sequences=4)
    return msgspec.structs.replace(made, path=str(path), cache=plan)


def patient(load: Load) -> EngineCore:
    """An engine that believes computing to be slow, so that loading pays for a tiny model too."""
    core = EngineCore(load, threads=2)
    core.pace.note(0, 100, 100.0)
    return core


def test_another_engine_goes_on_where_the_first_one_ended(load: Load, run: Run) -> None:
    control = EngineCore(msgspec.structs.replace(load, cache=None), threads=2)
    (turn,) = run(control, ask(1, PROMPT))
    following = [*PROMPT, *turn.tokens[:-1], 500, 501, 502]
    (wanted,) = run(control, ask(2, following))

    first = EngineCore(load, threads=2)
    assert run(first, ask(1, PROMPT))[0].tokens == turn.tokens
    assert first.flush(FLUSH_S)
    first.close(FLUSH_S)
    second = patient(load)
    (got,) = run(second, ask(2, following))
    usage = got.finish.usage
    assert (usage.ssd_tokens, usage.computed_tokens) == (len(PROMPT) + 7, 3)
    assert got.tokens == wanted.tokens
    second.close(FLUSH_S)


def test_another_tenant_finds_nothing(load: Load, run: Run) -> None:
    first = EngineCore(load, threads=2)
    run(first, ask(1, PROMPT, tenant="a"))
    first.close(FLUSH_S)
    second = patient(load)
    (other,) = run(second, ask(1, PROMPT, tenant="b"))
    assert other.finish.usage.cached_tokens == 0
    (same,) = run(second, ask(2, PROMPT, tenant="a"))
    assert same.finish.usage.cached_tokens == len(PROMPT) - 1
    second.close(FLUSH_S)
