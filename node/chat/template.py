"""A compiled chat template: variables in, text out, within bounds of time and memory.

Knows the helpers that Hugging Face gives to templates; nothing of messages or model families.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2

from node.chat.sandbox import Budget, Environment, TemplateLimit, bound_work, pay, text_size, weigh

__all__ = ["ChatTemplate", "TemplateError", "TemplateRefused"]

_MAX_SOURCE_CHARS = 512 * 1024
_MAX_STEPS = 32 * 2**20
# Templates handle each text of a conversation more than once.
_STEPS_PER_INPUT_CHAR = 24
_MAX_CPU_S = 2.0
_ADDRESS = re.compile(r"\s*(at )?0x[0-9a-fA-F]+")


class TemplateError(ValueError):
    """The template does not compile, fails on these variables or uses too much."""


class TemplateRefused(TemplateError):
    """The template called `raise_exception`; the text is the template's."""


class ChatTemplate:
    """Compiled once, rendered many times, from any thread.

    Raises:
        TemplateError: the source does not compile.
    """

    def __init__(self, source: str) -> None:
        if len(source) > _MAX_SOURCE_CHARS:
            raise TemplateError(f"it is longer than {_MAX_SOURCE_CHARS} characters")
        self.source = source
        environment = Environment()
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError, OverflowError, ValueError) as error:
            raise TemplateError("it is nested too deeply") from error

    def render(self, variables: Mapping[str, Any], *, cpu_s: float = _MAX_CPU_S) -> str:
        """
        Raises:
            TemplateRefused: the template says that it does not take these messages.
            TemplateError: it failed, or used more than it may.
        """
        try:
            steps = _MAX_STEPS + _STEPS_PER_INPUT_CHAR * text_size(variables)
            with bound_work(Budget(cpu_s, steps)):
                return Environment.concat(self._template.generate(variables))
        except TemplateError:
            raise
        except TemplateLimit as error:
            raise TemplateError(str(error)) from error
        except RecursionError as error:
            raise TemplateError("it calls itself too deeply") from error
        # A template may provoke any exception of Python's by what it does with its variables.
        except Exception as error:
            text = _ADDRESS.sub("", str(error))[:200]
            raise TemplateError(f"{type(error).__name__}: {text}") from error


def _raise_exception(message: Any = "") -> None:
    raise TemplateRefused(str(message)[:500])


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 256 or re.search(r"%[^a-zA-Z%]*\d", pattern):
        raise TemplateError("strftime_now takes no widths")
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    weigh(value)
    if indent is not None:
        indent = max(0, min(int(indent), 16))
    # Python's own spacing and no HTML escapes, which is what models have been trained on.
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    pay(len(text))
    if ensure_ascii:
        # Not by json.dumps: the separator of node.chat.protect has to stay what it is.
        text = re.sub(r"[^\x00-\x7f\ufdd0]", lambda m: json.dumps(m[0])[1:-1], text)
    return text
