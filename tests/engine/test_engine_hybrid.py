"""Models whose state cannot be cut: hybrid attention and convolution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tiny_hybrid import write_tiny_hybrid

from node.engine.core import EngineCore
from node.engine.messages import Load, Sampling, Submit
from node.models import check_gguf

pytestmark = pytest.mark.model

Run = Callable[..., list]  # type: ignore[type-arg]


@pytest.fixture(scope="module")
def hybrid(
    model_path: Path, make_load: Callable[..., Load], tmp_path_factory: pytest.TempPathFactory
) -> EngineCore:
    path = write_tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "tiny.gguf", model_path)
    assert check_gguf(path).architecture == "lfm2"
    load = msgspec.structs.replace(make_load(n_ctx=512, max_sequences=4), path=str(path))
    return EngineCore(load, threads=2)


def ask(number: int, prompt: list[int], cache: bool = True) -> Submit:
    return Submit(
        number, tuple(prompt), Sampling(), max_tokens=8, ignore_eos=True, cache_prompt=cache
    )


def test_a_hybrid_model_continues_a_whole_sequence_token_for_token(
    hybrid: EngineCore, run: Run
) -> None:
    assert not hybrid.model.can_fork
    first = list(range(200, 240))
    (turn,) = run(hybrid, ask(1, first))
    second = [*first, *turn.tokens[:-1], 300, 301, 302]
    (warm,) = run(hybrid, ask(2, second))
    (cold,) = run(hybrid, ask(3, second, cache=False))
    assert warm.finish.usage.cached_tokens == len(first) + 7
    assert warm.tokens == cold.tokens


def test_a_hybrid_model_recomputes_what_it_would_have_to_cut(hybrid: EngineCore, run: Run) -> None:
    prompt = list(range(400, 440))
    run(hybrid, ask(10, prompt))
    (branch,) = run(hybrid, ask(11, [*prompt[:20], 7, 8, 9]))
    (cold,) = run(hybrid, ask(12, [*prompt[:20], 7, 8, 9], cache=False))
    assert branch.finish.usage.cached_tokens == 0
    assert branch.tokens == cold.tokens


def test_several_hybrid_streams_run_side_by_side(hybrid: EngineCore, run: Run) -> None:
    outcomes = run(hybrid, *(ask(20 + i, [500 + i] * 12) for i in range(4)))
    assert [o.finish.usage.completion_tokens for o in outcomes] == [8] * 4
