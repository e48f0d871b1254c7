"""Templates of the families in our own words, and a random reader of grammars."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from node.chat import ChatModel, OutputEvent, OutputParser, ToolCallArguments, ToolCallStart


@dataclass(frozen=True)
class Template:
    """A fixture: the family it must be taken for, and the text of its special tokens."""

    name: str
    family: str
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
    bos: str = ""

    def model(self) -> ChatModel:
        path = Path(__file__).parent / "templates" / f"{self.name}.jinja"
        return ChatModel(path.read_text("utf-8"), self.bos, "", self.special)


_LLAMA_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_HARMONY_SPECIAL = tuple(
    f"<|{name}|>" for name in "start end message channel constrain call return".split()
)
_TEMPLATES = (
    Template("chatml", "generic"),
    Template("qwen2.5", "hermes"),
    Template("qwen3", "hermes", ("<|im_start|>", "<|im_end|>", "<think>", "</think>")),
    Template("qwen3-coder", "qwen_coder"),
    Template("llama3", "llama3", _LLAMA_SPECIAL, bos="<|begin_of_text|>"),
    Template("mistral", "mistral", ("<s>", "</s>", "[INST]", "[/INST]"), bos="<s>"),
    Template("gemma3", "gemma", ("<start_of_turn>", "<end_of_turn>"), bos="<bos>"),
    Template("granite", "granite", ("<|start_of_role|>", "<|end_of_text|>")),
    Template("deepseek-r1", "deepseek", ("<｜User｜>", "<｜Assistant｜>", "<think>")),
    Template("gpt-oss", "harmony", _HARMONY_SPECIAL),
    Template("phi4", "generic", ("<|end|>", "<|user|>", "<|system|>")),
    Template("lfm2", "lfm2"),
)


@pytest.fixture(scope="session")
def templates() -> dict[str, Template]:
    return {template.name: template for template in _TEMPLATES}


@pytest.fixture(scope="session")
def weather() -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    }
    function = {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


ReadAll = Callable[[OutputParser, list[str]], list[tuple[str, ...]]]


@pytest.fixture(scope="session")
def read_all() -> ReadAll:
    """Feeds the pieces and joins the events: texts, reasoning and arguments in one piece each."""

    def read(parser: OutputParser, pieces: list[str]) -> list[tuple[str, ...]]:
        events: list[OutputEvent] = []
        for piece in pieces:
            events += parser.feed(piece)
        joined: list[tuple[str, ...]] = []
        for event in events + parser.finish():
            kind = type(event).__name__
            text = _text(event)
            if joined and joined[-1][0] == kind != "ToolCallStart":
                joined[-1] = (kind, joined[-1][1] + text)
            else:
                joined.append((kind, text))
        return joined

    return read


def _text(event: OutputEvent) -> str:
    if isinstance(event, ToolCallStart):
        return event.name
    return event.fragment if isinstance(event, ToolCallArguments) else event.text


Derive = Callable[[str, random.Random], str]


@pytest.fixture(scope="session")
def derive() -> Derive:
    """A random text of a grammar."""
    return lambda gbnf, rng: _Derivation(gbnf, rng).text()


_TOKEN = re.compile(
    r"\s*(?:(?P<string>\"(?:[^\"\\]|\\.)*\")|(?P<set>\[(?:[^\]\\]|\\.)*\])|(?P<name>[\w-]+)"
    r"|(?P<bounds>\{\d*,?\d*\})|(?P<mark>[()|?*+]))"
)
_CHARACTER = re.compile(r"\\x(..)|\\u(....)|\\U(........)|\\(.)|(.)", re.DOTALL)
_SHORT = {"n": "\n", "t": "\t", "r": "\r"}


class _Derivation:
    """Reads a rule's text anew for each use; slow and simple. Deep down it takes the alternative
    with the fewest rules in it, so that it ends."""

    def __init__(self, gbnf: str, rng: random.Random) -> None:
        lines = [line.split(" ::= ", 1) for line in gbnf.splitlines() if line]
        self._rules = {name: self._alternatives(self._tokens(body)) for name, body in lines}
        self._rng = rng

    def text(self) -> str:
        return self._any(self._rules["root"], 0)

    def _tokens(self, body: str) -> list[str]:
        tokens = []
        at = 0
        while at < len(body.rstrip()):
            found = _TOKEN.match(body, at)
            assert found is not None, body[at:]
            tokens.append(found.group().strip())
            at = found.end()
        return tokens[::-1]

    def _alternatives(self, tokens: list[str]) -> list[list[Any]]:
        """`tokens` is a stack. An item is (what, least, most)."""
        found: list[list[Any]] = [[]]
        while tokens and tokens[-1] != ")":
            token = tokens.pop()
            if token == "|":
                found.append([])
                continue
            item: Any = token
            if token == "(":
                item = self._alternatives(tokens)
                assert tokens.pop() == ")"
            found[-1].append((item, *self._bounds(tokens)))
        return found

    def _bounds(self, tokens: list[str]) -> tuple[int, int]:
        token = tokens[-1] if tokens else ""
        simple = {"?": (0, 1), "*": (0, 5), "+": (1, 5)}
        if token in simple:
            return simple[tokens.pop()]
        if not re.fullmatch(r"\{.*\}", token):
            return 1, 1
        least, comma, most = tokens.pop()[1:-1].partition(",")
        return int(least or 0), int(most) if most else int(least or 0) + (5 if comma else 0)

    def _any(self, alternatives: list[list[Any]], depth: int) -> str:
        if depth > 12:
            chosen = min(alternatives, key=lambda a: (_weight(a), self._rng.random()))
        else:
            chosen = self._rng.choice(alternatives)
        return "".join(self._item(what, n, m, depth) for what, n, m in chosen)

    def _item(self, what: Any, least: int, most: int, depth: int) -> str:
        most = min(most, least + 6)
        times = least if depth > 12 else self._rng.randint(least, most)
        return "".join(self._once(what, depth + 1) for _ in range(times))

    def _once(self, what: Any, depth: int) -> str:
        if isinstance(what, list):
            return self._any(what, depth)
        if what[0] == '"':
            return "".join(map(chr, _points(what[1:-1])))
        if what[0] == "[":
            return self._character(what[1:-1])
        return self._any(self._rules[what], depth)

    def _character(self, text: str) -> str:
        negated = text.startswith("^")
        ranges = []
        points = _points(text.removeprefix("^"), dashes=True)
        if points[0] == -1:
            points[0] = ord("-")
        while points:
            low = points.pop(0)
            high = low
            if points and points[0] == -1:
                points.pop(0)
                high = points.pop(0)
            ranges.append((low, high))
        if not negated:
            return chr(self._rng.randint(*self._rng.choice(ranges)))
        while True:
            point = self._rng.choice([self._rng.randint(0, 0x2FF), self._rng.randint(32, 126)])
            if not any(low <= point <= high for low, high in ranges):
                return chr(point)


def _weight(items: list[Any]) -> int:
    words = [what for what, least, _ in items if least]
    return sum(5 if isinstance(w, list) or w[0] not in '"[' else 1 for w in words)


def _points(text: str, dashes: bool = False) -> list[int]:
    points = []
    for found in _CHARACTER.finditer(text):
        code = found[1] or found[2] or found[3]
        if code:
            points.append(int(code, 16))
        elif found[4]:
            points.append(ord(_SHORT.get(found[4], found[4])))
        else:
            points.append(-1 if dashes and found[5] == "-" else ord(found[5]))
    return points
