from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import CellPool
from kvcache.cells import Cells


def test_released_cells_can_be_taken_again() -> None:
    pool = CellPool(4)
    first = pool.allocate(4)
    assert pool.release(first[:3]) == 3
    assert sorted(pool.allocate(3)) == sorted(first[:3])
    pool.check_integrity()


def test_a_shared_cell_is_free_only_when_the_last_holder_lets_go() -> None:
    pool = CellPool(8)
    cells = pool.allocate(5)
    pool.share(cells[:2])
    assert pool.exclusive(cells) == 3
    assert pool.release(cells) == 3
    assert pool.release(cells[:2]) == 2
    assert pool.free == 8


def test_more_than_is_free_cannot_be_taken() -> None:
    with pytest.raises(AssertionError, match="asked for 5 cells, 4 are free"):
        CellPool(4).allocate(5)


@given(st.lists(st.tuples(st.sampled_from("asr"), st.integers(0, 12)), max_size=60))
def test_no_cell_is_lost_or_given_twice(steps: list[tuple[str, int]]) -> None:
    pool = CellPool(24)
    held: list[Cells] = []
    for action, n in steps:
        if action == "a":
            held.append(pool.allocate(min(n, pool.free)))
        elif held and action == "s":
            part = held[n % len(held)][:n]
            pool.share(part)
            held.append(part)
        elif held:
            pool.release(held.pop(n % len(held)))
        pool.check_integrity()
        unique = np.unique(np.concatenate([*held, np.empty(0, np.int32)]))
        assert pool.free == pool.total - len(unique)
