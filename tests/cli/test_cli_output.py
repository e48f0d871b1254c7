"""Tables, JSON and figures as text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from cli.output import age, print_json, print_table, size, styled


class Pair(NamedTuple):
    left: int
    right: Path


@dataclass(frozen=True, slots=True)
class Box:
    pairs: tuple[Pair, ...]
    name: str | None


def test_json_has_objects_for_dataclasses_and_named_tuples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_json(Box((Pair(1, Path("a")),), None))
    assert json.loads(capsys.readouterr().out) == {
        "pairs": [{"left": 1, "right": "a"}],
        "name": None,
    }


def test_a_table_is_aligned_and_has_no_colour_in_a_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(["NAME", "N"], [("a", 1), ("bcdef", 234), (None, 5)], right="N")
    assert capsys.readouterr().out == "NAME     N\na        1\nbcdef  234\n-        5\n"
    assert styled("x", "1") == "x"


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (98_362_432, "98.4 MB"), (4.7e9, "4.7 GB"), (2e15, "2000.0 TB")],
)
def test_sizes_are_decimal(n_bytes: float, text: str) -> None:
    assert size(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min"), (3725, "1 h 2 min"), (90_000, "1 d 1 h")],
)
def test_ages_show_two_units(seconds: float, text: str) -> None:
    assert age(seconds) == text
