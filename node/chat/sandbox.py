"""The Jinja environment for templates that come out of model files, which nobody has reviewed.

Attribute access is Jinja's immutable sandbox. What that leaves open is time and memory: every
loop turn, call, concatenation and conversion to text is paid from a `Budget`, before it happens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

__all__ = ["Budget", "Environment", "TemplateLimit", "bound_work", "pay", "text_size", "weigh"]

_MAX_INT_BITS = 4096
_CLOCK_EVERY = 64

_STR_METHODS = frozenset(
    "capitalize casefold count endswith find format index isalnum isalpha isdecimal isdigit"
    " islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix"
    " removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith"
    " strip swapcase title upper".split()
)
# Those that look at the text and make none.
_LOOKING = frozenset(
    "count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle"
    " isupper rfind rindex startswith".split()
)
# Filters that can make much out of little and that no chat template needs.
_NO_FILTERS = "batch center filesizeformat format pprint random slice striptags urlize wordwrap"
_NO_FILTERS += " xmlattr truncate forceescape escape e"
_NO_GLOBALS = ("lipsum", "cycler", "joiner")


class TemplateLimit(Exception):
    """The template used more time or memory than one rendering may."""


class Budget:
    """What one rendering may use: processor seconds of this thread, and characters plus steps."""

    __slots__ = ("_deadline_s", "_left", "_until_clock")

    def __init__(self, cpu_s: float, steps: int) -> None:
        # The thread's own time: a rendering is not cut short because the machine is busy.
        self._deadline_s = time.thread_time() + cpu_s
        self._left = steps
        self._until_clock = _CLOCK_EVERY

    def pay(self, steps: int) -> None:
        self._left -= steps
        self._until_clock -= 1
        if self._left < 0:
            raise TemplateLimit("it makes too much text")
        if self._until_clock <= 0:
            self._until_clock = _CLOCK_EVERY
            if time.thread_time() > self._deadline_s:
                raise TemplateLimit("it runs for too long")


_budget: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


@contextmanager
def bound_work(budget: Budget) -> Iterator[None]:
    """Everything rendered inside is paid from `budget`."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def pay(steps: int = 1) -> None:
    budget = _budget.get()
    if budget is not None:
        budget.pay(steps)


def weigh(value: Any, *, text: bool = True) -> None:
    """Pay for every element of a nested value, each as often as it is reached: `[a, a]` of
    `[b, b]` of … costs what its text would. Without `text`, strings count as one."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            pay(len(item) if text else 1)
            continue
        pay()
        if isinstance(item, Mapping):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            pending.extend(item)


class Environment(ImmutableSandboxedEnvironment):
    """Blocks as Hugging Face sets them, no loader, no constant folding (that would run filters
    while compiling), and all work paid for."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=False,
            optimized=False,
            cache_size=0,
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        for name in _NO_FILTERS.split():
            self.filters.pop(name, None)
        for name in _NO_GLOBALS:
            self.globals.pop(name, None)
        self.filters |= {
            "_step": _step,
            "_joined": _joined,
            "_built": _built,
            "indent": _indent,
            "join": _join_filter(self.filters["join"]),
            "replace": lambda s, old, new, count=-1: _replace(str(s), str(old), str(new), count),
        }

    @staticmethod
    def concat(chunks: Iterable[str]) -> str:
        """Compiled templates join their output with this."""
        parts = []
        for chunk in chunks:
            pay(len(chunk))
            parts.append(chunk)
        return "".join(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = super()._parse(source, name, filename)
        Metered().visit(tree)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in _STR_METHODS:
            return False
        if isinstance(obj, (bytes, bytearray, type)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to {attribute[:64]!r} is not allowed")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _BINOP_CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        pay()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_str_method(owner, __obj.__name__, args)
        elif isinstance(__obj, Macro):
            weigh((args, kwargs), text=False)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, (list, tuple, dict)):
            weigh(result, text=False)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template = str(value.__self__)

        def formatted(*args: Any, **kwargs: Any) -> str:
            if re.search(r"\d{4}|\{[^{}]*\{", template):
                raise SecurityError("widths and nested fields are not allowed in format()")
            weigh((args, kwargs))
            pay(len(template) * max(1, text_size((args, kwargs))))
            return wrapped(*args, **kwargs)

        return formatted


class Metered(NodeTransformer):
    """Puts the meter into a parsed template: loop bodies, `~`, and literals that hold others."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        step = _filter(nodes.Const(True), "_step", node)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        operands = nodes.List(node.nodes, lineno=node.lineno)
        return _filter(operands, "_joined", node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_built", node) if node.items else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_built", node) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_built", node) if node.ctx == "load" and node.items else node


class _Generation(Extension):
    """Hugging Face's `{% generation %}` marks what the assistant wrote; here it does nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filter(operand: nodes.Expr, name: str, at: nodes.Node) -> nodes.Filter:
    return nodes.Filter(operand, name, [], [], None, None, lineno=at.lineno)


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    if not isinstance(value, str):
        weigh(value)
    return value


def _step(value: bool) -> bool:
    pay()
    return value


def _built(value: Any) -> Any:
    weigh(value, text=False)
    return value


def _joined(operands: list[Any]) -> str:
    for operand in operands:
        weigh(operand)
    return "".join(map(str, operands))


def _join_filter(join: Callable[..., str]) -> Callable[..., str]:
    @pass_context
    def metered(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
        items = list(value)
        pay(len(items) * (1 + len(str(d))))
        weigh(items)
        return join(context.eval_ctx, items, d, attribute)

    return metered


def _indent(text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    filler = " " * min(width, 256) if isinstance(width, int) else str(width)
    lines = str(text).split("\n")
    pay(len(filler) * len(lines))
    return "\n".join(
        filler + line if (first or i) and (blank or line) else line for i, line in enumerate(lines)
    )


def _replace(text: str, old: str, new: str, count: int | None = -1) -> str:
    _check_str_method(text, "replace", (old, new))
    return text.replace(old, new, -1 if count is None else count)


def _check_str_method(owner: str, name: str, args: tuple[Any, ...]) -> None:
    if name == "join" and args:
        if isinstance(args[0], (list, tuple, str)):
            pay(len(args[0]) * (1 + len(owner)))
        weigh(args[0])
        return
    pay(len(owner) // 64 + 1 if name in _LOOKING else len(owner))
    if name == "replace" and len(args) >= 2:
        pay(owner.count(str(args[0])) * len(str(args[1])))


def _check_add(left: Any, right: Any) -> None:
    if isinstance(left, (str, list, tuple)):
        pay(len(left) + len(right))
    _check_int(left, right)


def _check_multiply(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
            pay(len(sequence) * max(times, 0))
    _check_int(left, right)


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > _MAX_INT_BITS:
            _too_large()


def _check_modulo(left: Any, right: Any) -> None:
    if isinstance(left, str):
        if re.search(r"\d{4}|\*", left):
            raise SecurityError("widths are not allowed in a % format")
        weigh(right)
        pay(len(left) * max(1, text_size(right)))


def _check_int(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            _too_large()


def _too_large() -> NoReturn:
    raise TemplateLimit("it computes with numbers that are too large")


def text_size(value: Any) -> int:
    """Characters in a nested value, and one for each other leaf."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_size, value.values()))
    return sum(map(text_size, value)) if isinstance(value, (list, tuple)) else 1


_BINOP_CHECKS: Mapping[str, Callable[[Any, Any], None]] = {
    "+": _check_add,
    "*": _check_multiply,
    "**": _check_power,
    "%": _check_modulo,
}
