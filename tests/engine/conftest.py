from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from node.engine.core import EngineCore
from node.engine.messages import Fail, Finish, Load, Submit, TokenLogprob


class Outcome(NamedTuple):
    text: str
    tokens: list[int]
    end: Finish | Fail
    logprobs: list[TokenLogprob]

    @property
    def finish(self) -> Finish:
        assert isinstance(self.end, Finish), self.end
        return self.end

    @property
    def failure(self) -> Fail:
        assert isinstance(self.end, Fail), self.end
        return self.end


MakeLoad = Callable[..., Load]
MakeCore = Callable[..., EngineCore]


@pytest.fixture(scope="session")
def make_load(model_path: Path) -> MakeLoad:
    def make(n_ctx: int = 2048, n_batch: int = 256, max_sequences: int = 16) -> Load:
        return Load(
            path=str(model_path),
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_batch,
            max_sequences=max_sequences,
            gpu_layers=0,
            type_k="f16",
            type_v="f16",
            threads=2,
        )

    return make


@pytest.fixture(scope="session")
def core(make_load: MakeLoad) -> EngineCore:
    """One model for all tests that leave no request behind."""
    return EngineCore(make_load(), threads=2)


@pytest.fixture(scope="session")
def run() -> Callable[..., list[Outcome]]:
    """Submit all at once, step until all have ended, check the ledger at every step."""

    def run_all(core: EngineCore, *submits: Submit) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        parts = {s.request_id: ("", list[int](), list[TokenLogprob]()) for s in submits}
        for submit in submits:
            core.submit(core.prepare(submit))
        while core.busy:
            step = core.step()
            for delta in step.deltas:
                text, tokens, logprobs = parts[delta.request_id]
                parts[delta.request_id] = (
                    text + delta.text,
                    tokens + list(delta.tokens),
                    logprobs + list(delta.logprobs),
                )
            ends: list[Finish | Fail] = [*step.finished, *step.failed]
            for end in ends:
                text, tokens, logprobs = parts[end.request_id]
                outcomes[end.request_id] = Outcome(text, tokens, end, logprobs)
            core.tidy()
            core.pool.check_integrity()
        return [outcomes[s.request_id] for s in submits]

    return run_all
