from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.text import TextStream


def test_a_character_is_never_cut() -> None:
    stream = TextStream(())
    outputs = [stream.feed(bytes([b])) for b in "aé😀".encode()]
    assert outputs == ["a", "", "é", "", "", "", "😀"]


def test_an_unfinished_character_is_left_out_at_the_end() -> None:
    stream = TextStream(())
    assert stream.feed("a😀".encode()[:3]) == "a"
    assert stream.finish() == ""


def test_half_a_stop_string_is_held_back_until_settled() -> None:
    stream = TextStream(("STOP",))
    assert stream.feed(b"one ST") == "one "
    assert stream.feed(b"AR") == "STAR"
    assert stream.feed(b" STO") == " "
    assert stream.feed(b"P more") == ""
    assert stream.stopped_by == "STOP"
    assert stream.finish() == ""


def test_the_stop_string_that_begins_first_wins() -> None:
    stream = TextStream(("cd", "abcde"))
    assert stream.feed(b"xabc") == "x"
    assert stream.feed(b"de") == ""
    assert stream.stopped_by in ("cd", "abcde")


def test_what_was_held_back_comes_at_the_end() -> None:
    stream = TextStream(("END",))
    assert stream.feed(b"the EN") == "the "
    assert stream.finish() == "EN"


@pytest.mark.parametrize("skip", [0, 3, 5])
def test_a_resumed_stream_leaves_out_what_the_client_has(skip: int) -> None:
    stream = TextStream((), skip_chars=skip)
    assert stream.feed(b"hello") + stream.feed(b" sea") == "hello sea"[skip:]


@given(
    st.text(alphabet="abé😀", max_size=30),
    st.lists(st.text(alphabet="abé😀", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 100), max_size=12),
)
def test_any_split_gives_the_text_before_the_first_stop_string(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    data = text.encode()
    points = sorted({min(c, len(data)) for c in cuts} | {0, len(data)})
    stream = TextStream(stop)
    out = "".join(stream.feed(data[a:b]) for a, b in zip(points, points[1:], strict=False))
    out += stream.finish()
    assert text.startswith(out)
    assert not any(s in out for s in stop)
    if stream.stopped_by is None:
        assert out == text
    else:
        assert text[len(out) :].startswith(stream.stopped_by)
