from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.chat import OutputEvent, OutputParser, ToolCallArguments, ToolCallStart
from node.chat.formats import (
    FAMILIES,
    BodyParser,
    CallShape,
    ForcedCallParser,
    HarmonyParser,
    Markers,
    ReasoningParser,
    TextParser,
)

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "functional.now": {},
}
ARGS = '{"city": "Rome", "days": 2}'
CALL = f'{{"name": "get_weather", "arguments": {ARGS}}}'
NOW = '{"name": "functional.now", "arguments": {}}'
DS = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
DS31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
BOTH = (("get_weather", ARGS), ("functional.now", "{}"))

# Family, reply, text without the calls, calls.
CALLS: list[tuple[str, str, str, tuple[tuple[str, str], ...]]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", BOTH[:1]),
    ("hermes", f"Sure.\n<tool_call>\n{CALL}\n</tool_call>\n", "Sure.", BOTH[:1]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{NOW}</tool_call>", "", BOTH),
    ("hermes", f"<tool_call>\n{CALL}", "", BOTH[:1]),
    ("hermes", f"<tool_call>{CALL}<tool_call>{NOW}", "", BOTH),
    ("hermes", f"<tool_call>[{CALL}, {NOW}]</tool_call> Bye.", "Bye.", BOTH),
    ("hermes", "<tool_call>" + CALL.replace(ARGS, json.dumps(ARGS)) + "</tool_call>", "", BOTH[:1]),
    ("hermes", '<tool_call>{"name": "functional.now"}</tool_call>', "", BOTH[1:]),
    ("hermes",
     '<tool_call>{"name": "get_weather", "arguments": {"city": "a</tool_call>\n\u2028b"}}',
     "", (("get_weather", '{"city": "a</tool_call>\\n\u2028b"}'),)),
    ("hermes", f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call>', "", BOTH[:1]),
    ("qwen_coder",
     "<tool_call>\n<function=get_weather>\n<parameter=city>\n3\n</parameter>\n<parameter=days>\n2\n"
     "</parameter>\n</function>\n</tool_call>",
     "", (("get_weather", '{"city": "3", "days": 2}'),)),
    ("qwen_coder", "Hm. <function=functional.now>\n</function> Ok.", "Hm.\n\nOk.", BOTH[1:]),
    ("llama3", CALL.replace("arguments", "parameters"), "", BOTH[:1]),
    ("llama3", f"{CALL}; {NOW}", "", BOTH),
    ("llama3", f"<|python_tag|>{CALL}", "", BOTH[:1]),
    ("llama3", f"<function=get_weather>{ARGS}</function>", "", BOTH[:1]),
    ("mistral", f"[TOOL_CALLS][{CALL}, {NOW}]", "", BOTH),
    ("mistral", f"Ok. [TOOL_CALLS] [{CALL}]", "Ok.", BOTH[:1]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGS}[TOOL_CALLS]functional.now[ARGS]{{}}", "",
     BOTH),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{ARGS}", "", BOTH[:1]),
    ("mistral", f"[TOOL_CALLS]get_weather{ARGS}", "", BOTH[:1]),
    ("gemma", f"```json\n{CALL}\n```", "", BOTH[:1]),
    ("gemma", '```tool_code\nget_weather(city="Rome", days=2)\n```', "", BOTH[:1]),
    ("gemma", f"<tool_call>{CALL}</tool_call>", "", BOTH[:1]),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>', "",
     BOTH[:1]),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>{"a": "}"}<|"|>}<tool_call|>', "",
     (("get_weather", '{"city": "{\\"a\\": \\"}\\"}"}'),)),
    ("function_gemma",
     "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:2}<end_function_call>",
     "", BOTH[:1]),
    ("granite", f"<|tool_call|>[{CALL}, {NOW}]", "", BOTH),
    ("granite", f"<tool_call>\n{CALL}\n</tool_call>", "", BOTH[:1]),
    ("phi", f"<|tool_call|>[{CALL}]<|/tool_call|>", "", BOTH[:1]),
    ("phi", f"functools[{CALL}]", "", BOTH[:1]),
    ("deepseek",
     "<｜tool▁calls▁begin｜>" + DS.format("get_weather", ARGS) + "\n"
     + DS.format("functional.now", "{}") + "<｜tool▁calls▁end｜>", "", BOTH),
    ("deepseek",
     "<｜tool▁calls▁begin｜>" + DS31.format("functional.now", "{}") + "<｜tool▁calls▁end｜>",
     "", BOTH[1:]),
    ("deepseek", DS31.format("get_weather", ARGS), "", BOTH[:1]),
    ("lfm2",
     '<|tool_call_start|>[get_weather(city="Rome", days=2), functional.now()]<|tool_call_end|>',
     "", BOTH),
    ("lfm2", f"<|tool_call_start|>[{CALL}]<|tool_call_end|>Wait.", "Wait.", BOTH[:1]),
    ("lfm2", "<|tool_call_start|>[get_weather(city='it\\'s', days=[1, {'a': None, \"b\": True}])]",
     "", (("get_weather", '{"city": "it\'s", "days": [1, {"a": null, "b": true}]}'),)),
    ("generic", CALL, "", BOTH[:1]),
    ("generic", f"[{CALL}]", "", BOTH[:1]),
    ("generic", f"Ok:\n```json\n{CALL}\n```", "Ok:", BOTH[:1]),
    ("harmony",
     "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + ARGS, "",
     BOTH[:1]),
    ("harmony",
     " to=functions.get_weather<|channel|>commentary<|message|>" + ARGS + "<|call|>"
     "<|start|>assistant<|channel|>commentary to=functions.functional.now<|message|>{}<|call|>",
     "", BOTH),
    ("harmony",
     "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant to=functions.get_weather"
     "<|channel|>commentary json<|message|>" + ARGS, "One moment.", BOTH[:1]),
]  # fmt: skip

# Replies that hold no call: they come out as they are.
TEXTS: list[tuple[str, str]] = [
    *((family, text) for family in FAMILIES if family != "harmony" for text in (
        "Just text, with < and { and [ and `.\n\n",
        "<tool_call>\nnot json\n</tool_call> after",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Ro',
        '<tool_call>{"name": "get_weather" "arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 3000,
        "<tool_call>" + '{"name":' * 3000 + "</tool_call>",
        '{"answer": 42, "name": "get_weather"}',
        '{"name": "get_weather"}',
        "```json\n{\"a\": 1}\n```\nand more",
        "<function=unknown></function>",
        "<function=get_weather>\n<parameter=city>\nRome",
        "[TOOL_CALLS] no calls here",
        "[TOOL_CALLS]get_weather[ARGS]{\"city\": ",
        "<|python_tag|>print(1)",
        "<|tool_call|>",
        "<|tool_call_start|>[get_weather(city=)]<|tool_call_end|>",
        "<|tool_call_start|>[get_weather(city=" + "[" * 500 + ")]<|tool_call_end|>",
        "<|tool_call>call:get_weather{city<tool_call|>",
        "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\n```<｜tool▁call▁end｜>",
        "ends in a marker <tool_ca",
    )),
]  # fmt: skip


def parser_of(family: str, max_calls: int | None = None) -> OutputParser:
    if family == "harmony":
        return HarmonyParser(TOOLS, max_calls)
    return BodyParser(FAMILIES[family].syntaxes, TOOLS, max_calls)


def shown(events: list[tuple[str, ...]]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Text and calls of joined events."""
    names = [text for kind, text in events if kind == "ToolCallStart"]
    arguments = [text for kind, text in events if kind == "ToolCallArguments"]
    text = "".join(text for kind, text in events if kind == "TextDelta")
    return text, tuple(zip(names, arguments, strict=True))


@pytest.mark.parametrize(("family", "reply", "text", "calls"), CALLS)
def test_calls_are_found(
    family: str, reply: str, text: str, calls: tuple[tuple[str, str], ...], read_all: Any
) -> None:
    assert shown(read_all(parser_of(family), [reply])) == (text, calls)


@pytest.mark.parametrize(("family", "reply"), TEXTS)
def test_what_is_no_call_stays_text(family: str, reply: str, read_all: Any) -> None:
    assert read_all(parser_of(family), [reply]) == [("TextDelta", reply)]


@pytest.mark.parametrize(
    ("family", "reply"), [(f, r) for f, r, _, _ in CALLS] + [(f, t[:400]) for f, t in TEXTS]
)
def test_any_split_of_a_reply_gives_the_same(family: str, reply: str, read_all: Any) -> None:
    whole = read_all(parser_of(family), [reply])
    assert read_all(parser_of(family), list(reply)) == whole
    rng = random.Random(reply)
    for _ in range(5):
        assert read_all(parser_of(family), pieces(reply, rng)) == whole


MARKERS = (
    "<tool_call> </tool_call> <function= [TOOL_CALLS] get_weather [ARGS] <|python_tag|> call: final"
    " <|tool_call|> <|tool_call> <tool_call|> <|channel|> <|message|> <|end|> <|start|> assistant"
    " analysis (city= <|tool_call_start|> <|tool_call_end|> <think> </think> ```json\n ```"
    " <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜>"
).split(" ")
FRAGMENTS = st.sampled_from(
    [CALL, NOW, *'<>{}[]"\\\n ,;:a)', '{"name"', " to=functions.get_weather", *MARKERS]
)


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    parts=st.lists(FRAGMENTS, max_size=12),
    seed=st.integers(0, 1000),
)
def test_no_reply_and_no_split_upsets_a_parser(
    family: str, parts: list[str], seed: int, read_all: Any
) -> None:
    def parser() -> OutputParser:
        return ReasoningParser(
            Markers("<think>", "</think>"), parser_of(family), opened=seed % 2 == 0
        )

    reply = "".join(parts)
    whole = read_all(parser(), [reply])
    assert read_all(parser(), pieces(reply, random.Random(seed))) == whole
    for arguments in (text for kind, text in whole if kind == "ToolCallArguments"):
        assert isinstance(json.loads(arguments), dict)


def test_ids_and_indexes_of_parallel_calls() -> None:
    events = parser_of("hermes").feed(f"<tool_call>[{CALL},{NOW}]</tool_call>")
    starts = [e for e in events if isinstance(e, ToolCallStart)]
    fragments = [e for e in events if isinstance(e, ToolCallArguments)]
    assert [s.index for s in starts] == [0, 1] == [f.index for f in fragments]
    assert len({s.id for s in starts}) == 2
    assert all(s.id.startswith("call_") and len(s.id) == 29 for s in starts)


def test_without_parallel_calls_only_the_first_is_handed_on(read_all: Any) -> None:
    reply = f"<tool_call>{CALL}</tool_call><tool_call>{NOW}</tool_call>"
    assert shown(read_all(parser_of("hermes", max_calls=1), [reply])) == ("", BOTH[:1])


def test_text_is_not_held_back_longer_than_needed() -> None:
    parser = parser_of("hermes")
    assert text_of(parser.feed("a < b")) == "a < b"
    assert text_of(parser.feed(" <tool")) == ""
    assert text_of(parser.feed("box>")) == " <toolbox>"


def test_json_that_is_no_call_is_streamed_soon() -> None:
    parser = parser_of("generic")
    assert text_of(parser.feed('{"temperature": 21, "unit"')) == '{"temperature": 21, "unit"'


THINK = Markers("<think>", "</think>")


@pytest.mark.parametrize(
    ("opened", "reply", "reasoning", "text"),
    [
        (False, "<think>\nhm\n</think>\n\nHi.\n", "hm", "Hi.\n"),
        (False, "  <think>hm</think>Hi", "hm", "Hi"),
        (False, "Hi <think>hm</think>", "", "Hi <think>hm</think>"),
        (False, "\n Hi", "", "\n Hi"),
        (False, "<thi", "", "<thi"),
        (True, "hm\n</think>\n\nHi", "hm", "Hi"),
        (True, "<think>\nhm</think>Hi", "hm", "Hi"),
        (True, "\n</think>\n\nHi", "", "Hi"),
        (True, "a </thi b", "a </thi b", ""),
        (True, "cut off </thin", "cut off </thin", ""),
    ],
)
def test_reasoning_is_told_from_the_answer(
    opened: bool, reply: str, reasoning: str, text: str, read_all: Any
) -> None:
    for parts in ([reply], list(reply)):
        parser = ReasoningParser(THINK, TextParser(), opened=opened)
        events = dict(read_all(parser, parts))
        assert events.get("ReasoningDelta", "") == reasoning
        assert events.get("TextDelta", "") == text


def test_channels_of_harmony(read_all: Any) -> None:
    reply = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "First.<|end|><|start|>assistant<|channel|>final<|message|>Then.<|return|>"
    )
    for parts in ([reply], list(reply)):
        assert read_all(HarmonyParser(TOOLS), parts) == [
            ("ReasoningDelta", "Think."),
            ("TextDelta", "First.\n\nThen."),
        ]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("Plain.", "Plain."),
        ("<|channel|>commentary to=functions.unknown<|message|>{}", "{}"),
        ("<|channel|>commentary to=functions.get_weather<|message|>{broken<|call|>", "{broken"),
        ("<|channel|>fin", ""),
    ],
)
def test_harmony_without_a_valid_call_is_text(reply: str, text: str, read_all: Any) -> None:
    assert shown(read_all(HarmonyParser(TOOLS), [reply])) == (text, ())


def test_a_forced_call_hands_its_arguments_on_as_they_come() -> None:
    shape = CallShape('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
    parser = ForcedCallParser(shape, TOOLS)
    events: list[OutputEvent] = []
    for piece in ("<tool_call>\n", '{"name": "get_weather", "argu', 'ments": {"city"', ': "R}'):
        events += parser.feed(piece)
    assert [type(e) for e in events] == [ToolCallStart, ToolCallArguments, ToolCallArguments]
    last = parser.feed('ome"}}\n</tool')
    assert [e.fragment for e in last if isinstance(e, ToolCallArguments)] == ['ome"}']
    assert parser.feed("_call>") == parser.finish() == []


def test_a_forced_call_that_was_cut_off_before_its_name_is_text(read_all: Any) -> None:
    shape = CallShape('{"name": "', '", "arguments": ', "}")
    assert read_all(ForcedCallParser(shape, TOOLS), ['{"na', "me"]) == [("TextDelta", '{"name')]


def pieces(text: str, rng: random.Random) -> list[str]:
    found = []
    while text:
        size = rng.choice((1, 2, 3, 5, 8, 40))
        found.append(text[:size])
        text = text[size:]
    return found


def text_of(events: list[OutputEvent]) -> str:
    return "".join(getattr(event, "text", "") for event in events)
