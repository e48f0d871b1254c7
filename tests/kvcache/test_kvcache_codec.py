from __future__ import annotations

import numpy as np
import pytest
from blobs_kvcache import make_blob
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.codec import (
    CodecError,
    Memory,
    attention_span,
    cut,
    join,
    joined_bytes,
    recurrent_position,
    with_recurrent,
)

KINDS: list[tuple[Memory, int]] = [("full", 1), ("window", 2), ("hybrid", 1)]


@pytest.mark.parametrize(("memory", "n_sections"), KINDS)
def test_a_cut_range_is_what_the_device_would_have_written(memory: Memory, n_sections: int) -> None:
    whole = make_blob(range(10, 30), n_sections=n_sections)
    part = cut(whole, memory, 14, 20)
    alone = make_blob(range(14, 20), n_sections=n_sections)
    assert attention_span(part, memory) == (14, 20)
    assert np.array_equal(part, cut(alone, memory, 14, 20))


@given(
    order=st.permutations(list(range(24))),
    cuts=st.lists(st.integers(1, 23), min_size=1, max_size=5, unique=True),
    kind=st.sampled_from(KINDS),
)
@settings(deadline=None)
def test_cutting_and_joining_gives_the_state_in_order(
    order: list[int], cuts: list[int], kind: tuple[Memory, int]
) -> None:
    memory, n_sections = kind
    blob = make_blob(order, n_sections=n_sections)
    bounds = [0, *sorted(cuts), 24]
    parts = [cut(blob, memory, a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
    out = np.empty(joined_bytes(parts, memory), np.uint8)
    assert join(parts, memory, out) is out
    assert np.array_equal(out, cut(blob, memory, 0, 24))


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_a_changed_or_cut_blob_is_refused_or_has_the_same_shape(data: st.DataObject) -> None:
    blob = make_blob(range(6))
    at = data.draw(st.integers(0, len(blob) - 1))
    blob[at] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.integers(0, len(blob)))
    for one in (blob, blob[:end]):
        try:
            start, stop = attention_span(one, "full")
            assert stop - start == 6
        except CodecError:
            pass


@pytest.mark.parametrize("memory", ["recurrent", "unknown"])
def test_memory_that_cannot_be_cut_is_refused(memory: Memory) -> None:
    with pytest.raises(CodecError):
        attention_span(make_blob(range(4)), memory)


def test_a_gap_is_refused() -> None:
    with pytest.raises(CodecError, match="missing"):
        attention_span(make_blob([1, 2, 4]), "full")
    with pytest.raises(CodecError, match="not all there"):
        cut(make_blob([1, 2, 4]), "full", 1, 5)


def test_ranges_that_do_not_meet_are_not_joined() -> None:
    with pytest.raises(CodecError, match="follow"):
        join([make_blob(range(4)), make_blob(range(5, 8))], "full")


def test_sections_with_different_cells_are_refused() -> None:
    base, window = make_blob(range(4)), make_blob(range(2, 4))
    with pytest.raises(CodecError, match="different"):
        attention_span(np.concatenate([base, window[8:]]), "window")


def test_recurrent_state_is_kept_apart_and_put_behind_again() -> None:
    recurrent = np.frombuffer(b"headhead" + b"\1\0\0\0\x09\0\0\0\0\0\0\0state", np.uint8)
    blob = make_blob(range(10), tail=recurrent[8:].tobytes())
    part = cut(blob, "hybrid", 0, 10)
    assert len(part) == len(blob) - len(recurrent) + 8
    assert recurrent_position(with_recurrent(part, recurrent), "hybrid") == 9
    assert recurrent_position(recurrent, "recurrent") == 9
