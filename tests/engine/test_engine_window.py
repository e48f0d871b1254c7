"""Models with sliding-window attention: cells that have left the window go to others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tiny_window import WINDOW, write_tiny_window

from node.engine.core import EngineCore
from node.engine.messages import Load, Sampling, Submit

pytestmark = pytest.mark.model

Run = Callable[..., list]  # type: ignore[type-arg]


def ask(number: int, prompt: list[int], cache: bool = True) -> Submit:
    return Submit(
        number, tuple(prompt), Sampling(), max_tokens=8, ignore_eos=True, cache_prompt=cache
    )


@pytest.fixture
def window(model_path: Path, make_load: Callable[..., Load], tmp_path: Path) -> EngineCore:
    path = write_tiny_window(tmp_path / "tiny.gguf", model_path)
    load = msgspec.structs.replace(make_load(n_ctx=512, max_sequences=8), path=str(path))
    return EngineCore(load, threads=2)


def test_a_prefix_is_not_reused_once_its_window_is_overwritten(
    window: EngineCore, run: Run
) -> None:
    kept, branch = list(range(1000, 1200)), [*range(1000, 1100), 7, 8, 9]
    (cold,) = run(window, ask(1, branch, cache=False))
    run(window, ask(2, list(range(2000, 2030))), ask(3, kept))
    first = next(s for s in window.pool if s.tokens[0] == 2000)
    window.pool.drop(first)  # the search for free cells begins before the kept ones again
    run(window, ask(4, list(range(3000, 3200)), cache=False))
    (warm,) = run(window, ask(5, branch))
    assert warm.finish.usage.cached_tokens == 0
    assert warm.tokens == cold.tokens


def test_a_turn_goes_on_from_the_end_of_the_one_before(window: EngineCore, run: Run) -> None:
    prompt = list(range(1000, 1000 + 3 * WINDOW))
    (turn,) = run(window, ask(1, prompt))
    longer = [*prompt, *turn.tokens[:-1], 7, 8]
    (cold,) = run(window, ask(2, longer, cache=False))
    (warm,) = run(window, ask(3, longer))
    assert warm.finish.usage.cached_tokens == len(prompt) + 7
    assert warm.tokens == cold.tokens
