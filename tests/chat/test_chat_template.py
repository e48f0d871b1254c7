from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node.chat.template import ChatTemplate, TemplateError, TemplateRefused

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.popen('touch PATH').read() }}",
    "{{ ''.__class__.__base__.__subclasses__()[1].__init__.__globals__['os'].system('touch PATH')"
    " }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ '{m.__class__}'.format_map({'m': messages}) }}",
    "{{ ('%s'|attr('__mod__'))(1) }}",
    "{{ ('{0.__class__}'|attr('format'))(messages) }}",
    "{% set f = ''.format %}{{ f.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends 'x' %}",
]

LOOPS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) if false %}{% endfor %}" * 400,
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
    "{% for a in range(30) recursive %}{% if loop.depth < 12 %}{{ loop(range(30)) }}{% endif %}"
    "{% endfor %}",
    "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "{% for a in range(99999) %}{{ range(99999)|list|length }}{% endfor %}",
    "{% set a = ['x'] %}" + "{% set a = [a, a] %}" * 60 + "{{ a == a|list }}{{ a }}",
    "{% set a = ['x'] %}" + "{% set a = dict(a=a, b=a) %}" * 60 + "{{ a|tojson }}",
    "{% set a = 'x' %}" + "{% set a = (a, a) %}" * 60 + "{{ a|string }}",
]

BOMBS = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ 9**(9**9) }}",
    "{% set a = 9**999 %}" + "{% set a = a * a %}" * 40,
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'.rjust(1000000000) }}",
    "{{ '1'.zfill(1000000000) }}",
    "{{ '\\t'.expandtabs(1000000000) }}",
    "{{ 'a'.encode('utf-8').zfill(1000000000) }}",
    "{{ 'a'|center(1000000000) }}",
    "{{ 'a b'|indent(1000000000) }}{{ ('\\n' * 9999999)|indent('x' * 9999999) }}",
    "{{ 'a b'|wordwrap(1, wrapstring='x' * 9999999) }}",
    "{{ ('a' * 9999999)|replace('a', 'b' * 9999999) }}",
    "{{ ('a' * 9999999).replace('a', 'b' * 9999999) }}",
    "{{ ('x' * 9999999).join('a' * 9999999) }}",
    "{{ (['x' * 9999999] * 99999)|join }}",
    "{{ [1]|batch(1000000000, 'x')|list }}",
    "{{ lipsum(n=1000000000) }}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ [1]|tojson(indent=1000000000) * 99999999 }}",
    "{% set a = 'aaaaaaaa' %}" + "{% set a = a ~ a %}" * 40,
    "{% set a = 'aaaaaaaa' %}" + "{% set a = a + a %}" * 40,
    "{% set a = 'aaaaaaaa' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40,
    "{% macro m(x) %}" + "{{ x }}" * 99 + "{% endmacro %}{{ m(m(m(m(m('aaaa'))))) }}",
    "{% set x = 'a' * 9999999 %}{{ x ~ x ~ x ~ x ~ x ~ x ~ x ~ x ~ x ~ x ~ x ~ x }}",
]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render({"messages": [{"role": "user"}], **variables})


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_get_out(source: str, tmp_path: Path) -> None:
    with pytest.raises(TemplateError):
        render(source.replace("PATH", str(tmp_path / "made")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", LOOPS)
def test_a_looping_template_stops(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render({}, cpu_s=0.2)


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_cannot_fill_the_memory(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize("source", ["{" * 9 + "% if %}", "{{ " + "(" * 5000 + " }}", "x" * 600_000])
def test_a_malformed_template_does_not_compile(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source)


def test_blocks_leave_no_blank_lines_as_with_hugging_face() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"


def test_tojson_keeps_letters_and_markup_as_they_are() -> None:
    assert render("{{ v|tojson }}", v={"a": "<é>&'"}) == '{"a": "<é>&\'"}'
    assert render("{{ v|tojson(indent=2) }}", v=[1]) == "[\n  1\n]"
    assert render("{{ v|tojson(ensure_ascii=true) }}", v="é😀") == '"\\u00e9\\ud83d\\ude00"'


def test_what_templates_use_is_there() -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}"
        "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}"
        "{% generation %}said{% endgeneration %}{{ ' x '.strip()|upper }}{{ 'a,b'.split(',')[-1] }}"
        "{{ '%s-%s'|string % ('p', 'q') }}{{ {'k': 'v'}|items|list }}{{ ['a', 'b']|join('+') }}"
    )
    assert render(source) == "2saidXbp-q[('k', 'v')]a+b"
    assert len(render("{{ strftime_now('%Y') }}")) == 4


def test_a_refusal_has_the_words_of_the_template() -> None:
    with pytest.raises(TemplateRefused, match="only users"):
        render("{{ raise_exception('only users') }}")


def test_errors_tell_no_addresses() -> None:
    with pytest.raises(TemplateError) as caught:
        render("{{ (raise_exception ~ '') + 1 }}{{ {}[raise_exception] + 1 }}")
    assert "0x" not in str(caught.value)
