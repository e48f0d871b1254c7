"""Regular expressions (ECMA 262, as JSON schema has them) as grammar rules inside JSON strings.

What a grammar cannot say (look-around, back references, word boundaries) is refused. What may be
written is a part of what the expression matches where that is simpler, never more.
"""

from __future__ import annotations

from collections.abc import Iterable

from node.chat.schemas.gbnf import MAX_REPEAT, Rules, char_class, repeat

__all__ = ["FORMATS", "PatternError", "REFUSED_FORMATS", "pattern_rule"]

_Ranges = list[tuple[int, int]]

_MAX_PATTERN_CHARS = 512
_MAX_GROUPS = 64
_LAST = 0x10FFFF
_ESCAPES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_CLASSES: dict[str, _Ranges] = {
    "d": [(48, 57)],
    "w": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "s": [(9, 13), (32, 32), (0xA0, 0xA0)],
}
# Not written raw: control characters, the quote and the backslash; never: surrogates.
_RAW: _Ranges = [(32, 33), (35, 91), (93, 126), (0xA0, 0xD7FF), (0xE000, 0xFFFD), (0x10000, _LAST)]
_JSON_ESCAPES = {34: '"', 92: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}

_DATE = (
    r"[12]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])"
    r"|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_NAME = "[a-zA-Z0-9]+(-[a-zA-Z0-9]+)*"
_HOST = rf"{_NAME}(\.{_NAME})*"
FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "ipv4": r"^((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)$",
    "ipv6": "^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
    "hostname": f"^{_HOST}$",
    "email": rf"^[a-zA-Z0-9]+([._+-][a-zA-Z0-9]+)*@{_HOST}\.[a-zA-Z]{{2,24}}$",
    "uri": rf"^[a-z][a-z0-9+.-]*://{_HOST}(:\d{{1,4}})?(/[a-zA-Z0-9._~!$&'()*+,;=:@/?-]*)?$",
    "duration": r"^P(\d{1,4}[WD]|\d{1,4}DT\d{1,2}H|T\d{1,4}[HMS]|T\d{1,4}H\d{1,2}M)$",
}
# Standard formats that a validator may assert and that are not worth a grammar.
REFUSED_FORMATS = frozenset(
    "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer"
    " relative-json-pointer regex".split()
)


class PatternError(ValueError):
    """The expression is malformed, too large or has parts that no grammar can say."""


def pattern_rule(pattern: str, rules: Rules) -> str:
    """Name of a rule for a JSON string, quotes included, in which the pattern finds a match."""
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise PatternError(f"is longer than {_MAX_PATTERN_CHARS} characters")
    return rules.add(f'"\\"" ( {_Pattern(pattern, rules).alternatives(0)} ) "\\""')


class _Pattern:
    def __init__(self, pattern: str, rules: Rules) -> None:
        self._text = pattern
        self._rules = rules
        self._at = 0

    def alternatives(self, depth: int) -> str:
        """Up to the closing bracket of this depth, or the end."""
        if depth > _MAX_GROUPS:
            raise PatternError("is nested too deeply")
        found = [self._sequence(depth)]
        while self._take("|"):
            found.append(self._sequence(depth))
        if depth == 0 and self._at < len(self._text):
            raise PatternError("has a bracket too many")
        return " | ".join(found)

    def _sequence(self, depth: int) -> str:
        """Without an anchor, anything may stand before or behind."""
        from_start = self._take("^")
        parts: list[str] = [] if from_start or depth else ["char*"]
        to_end = False
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if to_end:
                raise PatternError("has an anchor in its middle")
            if self._take("$"):
                to_end = True
            else:
                parts.append(self._quantified(depth))
        if depth and (from_start or to_end):
            raise PatternError("has an anchor inside brackets")
        if not to_end and not depth:
            parts.append("char*")
        return " ".join(parts) or '""'

    def _quantified(self, depth: int) -> str:
        item = self._item(depth)
        bounds = self._quantifier()
        if bounds is None:
            return item
        if self._quantifier() is not None:
            raise PatternError("has two quantifiers in a row")
        least, most = bounds
        if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least):
            raise PatternError(f"repeats more than {MAX_REPEAT} times or less than never")
        return repeat(self._rules.add(item), least, most)

    def _quantifier(self) -> tuple[int, int | None] | None:
        bounds: tuple[int, int | None] | None = None
        if self._take("*"):
            bounds = (0, None)
        elif self._take("+"):
            bounds = (1, None)
        elif self._take("?"):
            bounds = (0, 1)
        elif self._text.startswith("{", self._at):
            bounds = self._braces()
        if bounds is not None:
            # Greedy or lazy makes no difference to what is matched.
            self._take("?")
        return bounds

    def _braces(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at + 1 : max(end, 0)].partition(",")
        if end < 0 or not _is_count(least) or (most and not _is_count(most)):
            raise PatternError("has a brace that is no quantifier; write \\{ for the character")
        self._at = end + 1
        if not comma:
            return int(least), int(least)
        return int(least), int(most) if most else None

    def _item(self, depth: int) -> str:
        if self._take("("):
            return self._group(depth)
        character = self._next()
        if character == "[":
            return _in_json(self._set())
        if character == ".":
            return _in_json(_without([(0, _LAST)], [(10, 10), (13, 13), (0x2028, 0x2029)]))
        if character == "\\":
            return _in_json(self._escape(in_set=False))
        if character in "*+?{}]^":
            raise PatternError(f"has a {character!r} out of place")
        return _in_json([(ord(character), ord(character))])

    def _group(self, depth: int) -> str:
        if self._take("?"):
            if self._take("<") and self._at < len(self._text) and self._text[self._at] not in "=!":
                end = self._text.find(">", self._at)
                self._at = end + 1 if end >= 0 else len(self._text)
            elif not self._take(":"):
                raise PatternError("looks around, which a grammar cannot")
        inner = self.alternatives(depth + 1)
        if not self._take(")"):
            raise PatternError("has a bracket that is not closed")
        return f"( {inner} )"

    def _set(self) -> _Ranges:
        negated = self._take("^")
        ranges: _Ranges = []
        while not self._take("]"):
            low = self._member()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 :][:1] != "]":
                self._at += 1
                high = self._member()
                if not _single(low) or not _single(high) or high[0][0] < low[0][0]:
                    raise PatternError("has a range that is none")
                low = [(low[0][0], high[0][0])]
            ranges += low
        return _without([(0, _LAST)], ranges) if negated else ranges

    def _member(self) -> _Ranges:
        character = self._next()
        if character == "\\":
            return self._escape(in_set=True)
        return [(ord(character), ord(character))]

    def _escape(self, in_set: bool) -> _Ranges:
        character = self._next()
        if character.lower() in _CLASSES:
            ranges = _CLASSES[character.lower()]
            return ranges if character.islower() else _without([(0, _LAST)], ranges)
        if character in ("x", "u"):
            width = 2 if character == "x" else 4
            digits = self._text[self._at : self._at + width]
            self._at += width
            try:
                point = int(digits, 16)
            except ValueError:
                raise PatternError(f"has a \\{character} without digits") from None
            return [(point, point)]
        if in_set and character == "b":
            return [(8, 8)]
        if character in _ESCAPES:
            return [(_ESCAPES[character], _ESCAPES[character])]
        if character.isalnum():
            raise PatternError(f"has \\{character}, which a grammar cannot say")
        return [(ord(character), ord(character))]

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, character: str) -> bool:
        found = self._text.startswith(character, self._at)
        self._at += found
        return found


def _in_json(ranges: _Ranges) -> str:
    """One character of the ranges as it is written inside a JSON string."""
    raw = _common(ranges, _RAW)
    parts = [char_class(raw)] if raw else []
    for point, short in _JSON_ESCAPES.items():
        if any(low <= point <= high for low, high in ranges):
            parts.append(f'"\\\\" {char_class([(ord(short), ord(short))])}')
    if not parts:
        raise PatternError("asks for a character that JSON text cannot hold")
    return parts[0] if len(parts) == 1 and raw else f"( {' | '.join(parts)} )"


def _without(ranges: Iterable[tuple[int, int]], taken: _Ranges) -> _Ranges:
    gaps: _Ranges = []
    at = 0
    for low, high in sorted(taken):
        if low > at:
            gaps.append((at, low - 1))
        at = max(at, high + 1)
    if at <= _LAST:
        gaps.append((at, _LAST))
    return _common(list(ranges), gaps)


def _common(a: _Ranges, b: _Ranges) -> _Ranges:
    both = [(max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b]
    return sorted({(low, high) for low, high in both if low <= high})


def _single(ranges: _Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6
