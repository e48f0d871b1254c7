from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import Sequence, SequencePool, common_prefix
from kvcache.sequences import Tokens


class FakeDevice:
    """Keeps for every sequence id how many positions it holds."""

    def __init__(self) -> None:
        self.length: dict[int, int] = {}
        self.oldest_resume: dict[int, int] = {}

    def seq_cp(self, source: int, target: int, end: int) -> None:
        assert self.length[source] >= end
        assert self.length.get(target, 0) == 0, "copied onto a sequence in use"
        self.length[target] = end

    def seq_rm(self, seq_id: int, start: int = 0) -> bool:
        self.length[seq_id] = min(start, self.length.get(seq_id, 0))
        return True

    def can_resume(self, seq_id: int, position: int) -> bool:
        return position >= self.oldest_resume.get(seq_id, 0)


def make_pool(n_cells: int = 64, n_sequences: int = 4, can_fork: bool = True) -> SequencePool:
    return SequencePool(n_cells, n_sequences, can_fork, FakeDevice())


def array(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


def fill(pool: SequencePool, tokens: Tokens, use_cache: bool = True) -> tuple[Sequence, int]:
    """Open a sequence and compute all of it, as the engine does."""
    opened = pool.open(tokens, 0, use_cache)
    assert opened is not None
    rest = tokens[opened.n_cached :]
    assert pool.extend(opened.sequence, rest)
    _device(pool).length[opened.sequence.seq_id] = len(tokens)
    return opened.sequence, opened.n_cached


def _device(pool: SequencePool) -> FakeDevice:
    device = pool._device
    assert isinstance(device, FakeDevice)
    return device


def test_an_idle_sequence_that_is_a_prefix_is_taken_over() -> None:
    pool = make_pool()
    first, _ = fill(pool, array(1, 2, 3))
    pool.retire(first)
    second, cached = fill(pool, array(1, 2, 3, 4, 5))
    assert second is first
    assert cached == 3
    assert pool.cells.free == 59


def test_a_live_sequence_is_forked_and_its_cells_are_shared() -> None:
    pool = make_pool()
    first, _ = fill(pool, array(1, 2, 3, 4))
    second, cached = fill(pool, array(1, 2, 3, 9))
    assert second is not first
    assert cached == 3
    assert pool.cells.free == 64 - 5


def test_the_last_token_never_comes_from_the_cache() -> None:
    pool = make_pool()
    first, _ = fill(pool, array(1, 2, 3))
    pool.retire(first)
    _, cached = fill(pool, array(1, 2, 3))
    assert cached == 2


def test_without_cache_nothing_is_shared() -> None:
    pool = make_pool()
    fill(pool, array(1, 2, 3))
    _, cached = fill(pool, array(1, 2, 3, 4), use_cache=False)
    assert cached == 0


def test_a_model_that_cannot_be_cut_only_continues_whole_sequences() -> None:
    pool = make_pool(can_fork=False)
    first, _ = fill(pool, array(1, 2, 3))
    pool.retire(first)
    assert fill(pool, array(1, 2, 9))[1] == 0
    assert fill(pool, array(1, 2, 3, 4))[1] == 3


def test_idle_sequences_make_room_oldest_first() -> None:
    pool = make_pool(n_cells=10)
    old, _ = fill(pool, array(1, 1, 1, 1))
    new, _ = fill(pool, array(2, 2, 2, 2))
    pool.retire(old)
    pool.retire(new)
    fill(pool, array(3, 3, 3, 3, 3))
    assert old not in list(pool)
    assert new in list(pool)


def test_a_live_sequence_is_never_evicted() -> None:
    pool = make_pool(n_cells=10)
    fill(pool, array(*range(8)))
    assert pool.open(array(90, 91, 92), 0, use_cache=True) is None
    pool.check_integrity()


def test_a_long_idle_sequence_is_cut_when_a_fork_does_not_fit() -> None:
    pool = make_pool(n_cells=10)
    first, _ = fill(pool, array(*range(9)))
    pool.retire(first)
    second, cached = fill(pool, array(0, 1, 2, 3, 20, 21, 22, 23))
    assert (second, cached) == (first, 4)
    assert pool.cells.free == 2


def test_a_request_that_cannot_fit_leaves_idle_sequences_whole() -> None:
    pool = make_pool(n_cells=20)
    fill(pool, array(*range(50, 60)))
    idle, _ = fill(pool, array(*range(9)))
    pool.retire(idle)
    assert pool.open(array(0, 1, *range(20, 35)), 0, use_cache=True) is None
    assert idle.n_tokens == 9


def test_a_sequence_whose_window_is_gone_is_not_resumed_there() -> None:
    pool = make_pool()
    first, _ = fill(pool, array(*range(9)))
    pool.retire(first)
    _device(pool).oldest_resume[first.seq_id] = 6
    assert fill(pool, array(0, 1, 2, 3, 20))[1] == 0
    assert fill(pool, array(*range(7), 20))[1] == 7


def test_all_sequence_ids_in_use_means_no() -> None:
    pool = make_pool(n_sequences=2)
    fill(pool, array(1, 2))
    fill(pool, array(3, 4))
    assert pool.open(array(5, 6), 0, use_cache=True) is None


@given(st.lists(st.integers(0, 2), max_size=80), st.lists(st.integers(0, 2), max_size=80))
def test_common_prefix_is_what_a_loop_finds(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    expected = min(len(a), len(b)) if expected is None else expected
    assert common_prefix(array(*a), array(*b)) == expected


operations = st.tuples(
    st.sampled_from(["open", "grow", "retire", "drop"]),
    st.integers(0, 7),
    st.lists(st.integers(0, 2), min_size=1, max_size=14),
)


@settings(max_examples=150)
@given(st.lists(operations, max_size=50), st.booleans())
def test_ledger_and_device_always_agree(
    steps: list[tuple[str, int, list[int]]], can_fork: bool
) -> None:
    pool = make_pool(n_cells=40, n_sequences=4, can_fork=can_fork)
    device = _device(pool)
    for action, which, tokens in steps:
        live = [s for s in pool if s.live]
        if action == "open" and (opened := pool.open(array(*tokens), 0, True)) is not None:
            sequence = opened.sequence
            assert sequence.tokens.tolist() == tokens[: opened.n_cached]
            assert pool.extend(sequence, array(*tokens[opened.n_cached :]))
            device.length[sequence.seq_id] = sequence.n_tokens
        elif action == "grow" and live and pool.extend(live[which % len(live)], array(*tokens)):
            sequence = live[which % len(live)]
            device.length[sequence.seq_id] = sequence.n_tokens
        elif action == "retire" and live:
            pool.retire(live[which % len(live)])
        elif action == "drop" and live:
            pool.drop(live[which % len(live)])
        pool.check_integrity()
        assert {s.seq_id: s.n_tokens for s in pool} == {k: n for k, n in device.length.items() if n}
