"""Templates of the families in our own words, and a random reader of grammars."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from node.chat import ChatModel, OutputEvent, OutputParser


@dataclass(frozen=True)
class Template:
    """A fixture: the family it must be taken for, and the text of its special tokens."""

    family: str
    source: str
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
    bos: str = ""
    architecture: str = "llama"

    def model(self) -> ChatModel:
        return ChatModel(self.source, self.bos, "", self.special, self.architecture)


_CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_HERMES = """\
{%- macro calls(m) %}{% for c in m.tool_calls %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endmacro -%}
{%- if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% else %}\
{% set sys = 'Be helpful.' %}{% endif -%}
<|im_start|>system
{{ sys }}{% if tools %}

<tools>{% for t in tools %}
{{ t | tojson }}{% endfor %}
</tools>{% endif %}<|im_end|>
{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user
{% endif %}<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% else %}

{% endif %}{% elif m.role != 'system' or not loop.first %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}{{ calls(m) }}{% endif %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Reasoning of turns before the last user message is left out.
_QWEN3 = """\
{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' and not \
m.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{% if tools %}<|im_start|>system
<tools>{% for t in tools %}
{{ t | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' %}{% set text = m.content %}{% set thought = m.reasoning_content or '' %}\
{% if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1] %}\
{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant
{% if thought and loop.index0 > ns.last %}<think>
{{ thought.strip('\\n') }}
</think>

{% endif %}{{ text }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {% if c.function.arguments is string %}\
{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

_QWEN_CODER = """\
{% if tools %}<|im_start|>system
<tools>{% for t in tools %}<function><name>{{ t.function.name }}</name></function>{% endfor %}\
</tools><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>
{{ v }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# One call a message; tools are shown in the first user message; the date is in the prompt.
_LLAMA3 = """\
{{- bos_token }}{% set sys = '' %}{% if messages[0].role == 'system' %}\
{% set sys = messages[0].content | trim %}{% set messages = messages[1:] %}{% endif -%}
<|start_header_id|>system<|end_header_id|>

Today: {{ date_string or strftime_now('%d %b %Y') }}
{{ sys }}<|eot_id|>
{%- for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}\
{{ raise_exception('only one call at a time') }}{% endif %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": \
{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if loop.first and tools %}{% for t in tools %}{{ t | tojson(indent=4) }}

{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}{# <|python_tag|> #}"""

_MISTRAL = """\
{{- bos_token }}{% set ns = namespace(role='') %}{% for m in messages %}{% if m.role == 'system' %}\
{% if not loop.first %}{{ raise_exception('system must be first') }}{% endif %}\
[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{% elif m.role == 'user' %}{% if ns.role == 'user' %}\
{{ raise_exception('roles must alternate') }}{% endif %}{% if tools and loop.index0 < 2 %}\
[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]\
{% elif m.role == 'tool' %}[TOOL_RESULTS]{"id": "{{ m.tool_call_id }}", "content": \
{{ m.content | tojson }}}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}\
{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}\
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, \
"id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}{% else %}\
{{ m.content }}{{ eos_token }}{% endif %}{% set ns.role = m.role %}{% endfor %}"""

_GEMMA3 = """\
{{- bos_token }}{% set sys = '' %}{% if messages[0].role == 'system' %}\
{% set sys = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}\
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate') }}{% endif %}<start_of_turn>\
{{ 'model' if m.role == 'assistant' else m.role }}
{{ sys if loop.first else '' }}{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

_GRANITE = """\
{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=4) }}<|end_of_text|>
{% endif %}{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}\
{% if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", \
"arguments": {{ c.function.arguments | tojson }}}{{ '' if loop.last else ', ' }}{% endfor %}]\
{% endif %}<|end_of_text|>
{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""

# A distilled R1 drops the reasoning of earlier turns and opens it in the prompt.
_DEEPSEEK = """\
{{- bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}\
{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<｜User｜>{{ m.content }}\
{% elif m.role == 'tool' %}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ m.content }}\
<｜tool▁output▁end｜><｜tool▁outputs▁end｜>{% elif m.tool_calls %}<｜Assistant｜>{{ m.content }}\
<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>\
{{ c.function.name }}
```json
{{ c.function.arguments }}
```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% else %}<｜Assistant｜>\
{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""

# Reasoning is shown again only within a tool loop.
_HARMONY = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>\
{% if tools %}<|start|>developer<|message|>{% for t in tools %}type {{ t.function.name }} = \
{{ t.function.parameters | tojson }};{% endfor %}<|end|>{% endif %}{% for m in messages %}\
{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>\
{{ m.content }}<|end|>{% elif m.tool_calls %}{% for c in m.tool_calls %}<|start|>assistant<|channel|>\
commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>\
{{ c.function.arguments | tojson }}<|call|>{% endfor %}{% elif m.role == 'assistant' %}\
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% else %}<|start|>\
{{ 'developer' if m.role == 'system' else m.role }}<|message|>{{ m.content }}<|end|>{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""

_PHI4 = """\
{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'system' and tools %}{{ m.content }}<|tool|>\
{{ tools | tojson }}<|/tool|>{% else %}{{ m.content }}{% endif %}{% if m.tool_calls %}<|tool_call|>[\
{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": \
{{ c.function.arguments | tojson }}}{{ '' if loop.last else ', ' }}{% endfor %}]<|/tool_call|>\
{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

_LFM2 = """\
{{- bos_token }}{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}\
{% set messages = messages[1:] %}{% endif %}{% if sys or tools %}<|im_start|>system
{{ sys }}{% if tools %}<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}\
{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}\
{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}{% endfor %}]\
<|tool_call_end|>{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_LLAMA_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_HARMONY_SPECIAL = tuple(
    f"<|{name}|>" for name in "start end message channel constrain call return".split()
)
TEMPLATES = {
    "chatml": Template("generic", _CHATML),
    "qwen2.5": Template("hermes", _HERMES),
    "qwen3": Template("hermes", _QWEN3, ("<|im_start|>", "<|im_end|>", "<think>", "</think>")),
    "qwen3-coder": Template("qwen_coder", _QWEN_CODER),
    "llama3": Template("llama3", _LLAMA3, _LLAMA_SPECIAL, bos="<|begin_of_text|>"),
    "mistral": Template("mistral", _MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), bos="<s>"),
    "gemma3": Template("gemma", _GEMMA3, ("<start_of_turn>", "<end_of_turn>"), bos="<bos>"),
    "granite": Template("granite", _GRANITE, ("<|start_of_role|>", "<|end_of_text|>")),
    "deepseek-r1": Template("deepseek", _DEEPSEEK, ("<｜User｜>", "<｜Assistant｜>", "<think>")),
    "gpt-oss": Template("harmony", _HARMONY, _HARMONY_SPECIAL),
    "phi4": Template("phi", _PHI4, ("<|end|>", "<|user|>", "<|system|>")),
    "lfm2": Template("lfm2", _LFM2),
}


@pytest.fixture(scope="session")
def templates() -> dict[str, Template]:
    return TEMPLATES


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
            text = event[-1]
            if joined and joined[-1][0] == kind != "ToolCallStart":
                joined[-1] = (kind, joined[-1][1] + text)
            else:
                joined.append((kind, text))
        return joined

    return read


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
        return "".join(self._item(*item, depth) for item in chosen)

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
