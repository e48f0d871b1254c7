from __future__ import annotations

from typing import cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import SequencePool
from node.engine.messages import Sampling, Submit
from node.engine.request import Request, RequestStatus
from node.engine.sampling import TokenSampler
from node.engine.scheduler import Pace, Scheduler

N_BATCH = 32


class NoDevice:
    def seq_cp(self, source: int, target: int, end: int) -> None: ...

    def seq_rm(self, seq_id: int, start: int = 0) -> bool:
        return True

    def can_resume(self, seq_id: int, position: int) -> bool:
        return True


def make(n_cells: int = 256, max_running: int = 8) -> tuple[Scheduler, SequencePool]:
    pool = SequencePool(n_cells, max_running, True, NoDevice())
    return Scheduler(pool, N_BATCH, max_running, Pace(0.1)), pool


def request(number: int, prompt: list[int], max_tokens: int = 4) -> Request:
    submit = Submit(number, tuple(prompt), Sampling(), max_tokens=max_tokens)
    return Request(submit, np.array(prompt, np.int32), cast(TokenSampler, None))


def step(scheduler: Scheduler, pool: SequencePool) -> list[tuple[int, int]]:
    """One engine step without a model: every run that is complete produces token 9."""
    scheduler.admit()
    runs = scheduler.next_batch()
    for r, _ in runs:
        if r.n_pending == 0:
            if not r.at_limit:
                r.append(9)
            if r.at_limit:
                scheduler.remove(r)
                assert r.sequence is not None
                pool.retire(r.sequence)
    return [(r.id, n) for r, n in runs]


def test_decoding_comes_before_prompts() -> None:
    scheduler, pool = make()
    scheduler.add(request(1, [1] * 8, max_tokens=9))
    step(scheduler, pool)
    scheduler.add(request(2, [2] * 60))
    assert step(scheduler, pool) == [(1, 1), (2, N_BATCH - 1)]


def test_a_request_that_does_not_fit_is_skipped_not_waited_for() -> None:
    scheduler, pool = make(n_cells=200)
    scheduler.add(request(1, [1] * 100, max_tokens=50))
    scheduler.add(request(2, [2] * 150))
    scheduler.add(request(3, [3] * 10))
    step(scheduler, pool)
    assert [r.id for r in scheduler.running] == [1, 3]


def test_a_long_request_is_not_overtaken_for_ever() -> None:
    scheduler, pool = make(n_cells=200)
    scheduler.add(request(1, [1] * 60, max_tokens=20))
    scheduler.add(long := request(2, [2] * 150))
    for number in range(3, 300):
        scheduler.add(request(number, [number] * 40, max_tokens=2))
        step(scheduler, pool)
    assert long.overtaken <= 64
    assert long.status is RequestStatus.FINISHED


def test_no_more_requests_run_than_a_batch_has_tokens() -> None:
    scheduler, pool = make(n_cells=400, max_running=N_BATCH + 8)
    for number in range(N_BATCH + 8):
        scheduler.add(request(number, [number] * 2, max_tokens=4))
    for _ in range(6):
        assert 0 < sum(n for _, n in step(scheduler, pool)) <= N_BATCH
        assert len(scheduler.running) <= N_BATCH


def test_a_prefix_that_is_being_computed_is_waited_for_and_shared() -> None:
    scheduler, pool = make()
    shared = list(range(100, 170))
    scheduler.add(request(1, [*shared, 1], max_tokens=50))
    scheduler.add(request(2, [*shared, 2], max_tokens=50))
    step(scheduler, pool)
    assert [r.id for r in scheduler.running] == [1]
    for _ in range(4):
        step(scheduler, pool)
    assert [r.id for r in scheduler.running] == [1, 2]
    assert pool.cells.total - pool.cells.free < 2 * len(shared)


def test_a_prompt_beside_running_streams_is_read_in_chunks_that_keep_their_gap() -> None:
    pace = Pace(token_gap_s=0.1)
    pace.note(4, 0, 0.05)
    pace.note(0, 100, 0.2)
    assert pace.chunk_tokens(decoding=True) == 25
    assert pace.chunk_tokens(decoding=False) == 960


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=120)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(170, 400),
    st.integers(1, 6),
)
def test_every_request_finishes_within_the_cells(
    wanted: list[tuple[list[int], int]], n_cells: int, max_running: int
) -> None:
    scheduler, pool = make(n_cells, max_running)
    requests = [request(i, prompt, n) for i, (prompt, n) in enumerate(wanted)]
    for r in requests:
        scheduler.add(r)
    for _ in range(4000):
        runs = step(scheduler, pool)
        assert sum(n for _, n in runs) <= N_BATCH
        assert len(scheduler.running) <= max_running
        pool.check_integrity()
        if not (scheduler.waiting or scheduler.running):
            break
    assert all(r.status is RequestStatus.FINISHED for r in requests)
    assert [r.n_output for r in requests] == [n for _, n in wanted]
