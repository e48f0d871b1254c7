"""Grammar expressions for numbers between bounds."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

__all__ = ["Bounds", "integer_expression", "number_expression"]

# Integers are written with at most so many digits.
_MAX_DIGITS = 16
_LIMIT = 10**_MAX_DIGITS - 1


class Bounds(NamedTuple):
    """Both ends belong to it unless `open_…`."""

    low: Fraction | None
    high: Fraction | None
    open_low: bool = False
    open_high: bool = False

    def integers(self, scale: int = 1) -> tuple[int, int]:
        """First and last integer n with n / scale inside, cut to what can be written."""
        low, high = -_LIMIT, _LIMIT
        if self.low is not None:
            scaled = self.low * scale
            first = math.floor(scaled) + 1 if self.open_low else math.ceil(scaled)
            low = max(low, first)
        if self.high is not None:
            scaled = self.high * scale
            last = math.ceil(scaled) - 1 if self.open_high else math.floor(scaled)
            high = min(high, last)
        return low, high


def integer_expression(bounds: Bounds) -> str | None:
    """None: there is no integer between the bounds."""
    return _between(*bounds.integers())


def number_expression(bounds: Bounds) -> str | None:
    """Integers, and decimals whose whole unit interval is inside; if the bounds are too close
    for that, hundredths."""
    low, high = bounds.integers()
    if high - low < 1:
        return _hundredths(bounds)
    parts = [_between(low, high)]
    # n.d is in [n, n + 1), and -n.d in (-n - 1, -n].
    last = high if bounds.high is None else math.floor(bounds.high) - 1
    first = low if bounds.low is None else math.ceil(bounds.low) + 1
    above = _between(max(low, 0), last)
    below = _between(max(0, -high), -first)
    parts += [f'( {above} ) "." [0-9]{{1,16}}'] if above else []
    parts += [f'"-" ( {below} ) "." [0-9]{{1,16}}'] if below else []
    return " | ".join(part for part in parts if part)


def _hundredths(bounds: Bounds) -> str | None:
    low, high = bounds.integers(100)
    values = [
        f"{'-' if n < 0 else ''}{abs(n) // 100}.{abs(n) % 100:02d}" for n in range(low, high + 1)
    ]
    return " | ".join(f'"{value}"' for value in values) or None


def _between(low: int, high: int) -> str | None:
    if low > high:
        return None
    parts = []
    if low < 0:
        parts.append(f'"-" ( {_positive(max(1, -high), -low)} )')
    if high >= 0:
        parts.append(_positive(max(low, 0), high))
    return " | ".join(parts)


def _positive(low: int, high: int) -> str:
    """Both not negative. By number of digits, as a shorter number is always the smaller one."""
    parts = []
    for width in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (width - 1) if width > 1 else 0)
        last = min(high, 10**width - 1)
        parts.append(_same_width(str(first), str(last)))
    return " | ".join(parts)


def _same_width(low: str, high: str) -> str:
    if not low:
        return '""'
    rest = len(low) - 1
    if low.strip("0") == "" and high.strip("9") == "" or (low, high) == ("0", "9"):
        return _digits(len(low))
    if low[0] == high[0]:
        return f'"{low[0]}" ( {_same_width(low[1:], high[1:])} )' if rest else f'"{low[0]}"'
    first, last = int(low[0]), int(high[0])
    parts = []
    if rest and low[1:].strip("0"):
        parts.append(f'"{first}" ( {_same_width(low[1:], "9" * rest)} )')
        first += 1
    tail = ""
    if rest and high[1:].strip("9"):
        tail = f'"{last}" ( {_same_width("0" * rest, high[1:])} )'
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}] {_digits(rest)}".rstrip())
    return " | ".join([*parts, tail] if tail else parts)


def _digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""
