from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node.chat import ChatModel, ChatRequest, NamedTool, ResponseFormat
from node.errors import InvalidRequest
from node.models import check_gguf

NAMES = (
    "chatml qwen2.5 qwen3 qwen3-coder llama3 mistral gemma3 granite deepseek-r1 gpt-oss phi4 lfm2"
).split()


def call(call_id: str, city: str = "Rome") -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}
    return {"id": call_id, "type": "function", "function": function}


# One conversation, cut where the model is asked: each cut extends the one before it.
AGENT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [call("call_0123456789")]},
    {"role": "tool", "tool_call_id": "call_0123456789", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
    {"role": "user", "content": "And tomorrow?"},
    {"role": "assistant", "content": "I do not know."},
    {"role": "user", "content": "Pity."},
]
TURNS = (2, 4, 6, 8)

# Templates that do not extend the prompt of one turn to that of the next:
# - r1's prompt ends with the opened reasoning, which the next prompt leaves out.
NOT_PREFIX = {"deepseek-r1"}


def prompt(model: ChatModel, messages: list[dict[str, Any]], **more: Any) -> str:
    return "".join(model.prepare(ChatRequest(messages, **more)).prompt)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_each_template_is_taken_for_its_family(name: str, templates: dict[str, Any]) -> None:
    assert templates[name].model().family == templates[name].family


def test_each_turn_extends_the_prompt_of_the_turn_before(
    name: str, templates: dict[str, Any], weather: dict[str, Any]
) -> None:
    model = templates[name].model()
    prompts = [prompt(model, AGENT[:n], tools=[weather]) for n in TURNS]
    extends = [b.startswith(a) for a, b in zip(prompts, prompts[1:], strict=False)]
    assert all(extends) == (name not in NOT_PREFIX)


def test_reasoning_of_earlier_turns_is_dropped_by_qwen3(templates: dict[str, Any]) -> None:
    model = templates["qwen3"].model()
    answer = {"role": "assistant", "content": "four", "reasoning_content": "2+2"}
    asked = [{"role": "user", "content": "2+2?"}, answer]
    assert "<think>\n2+2\n</think>" in prompt(model, asked)
    assert "2+2\n" not in prompt(model, [*asked, {"role": "user", "content": "5?"}])
    inline = {"role": "assistant", "content": "<think>\n2+2\n</think>\n\nfour"}
    assert prompt(model, [asked[0], inline]) == prompt(model, asked)


def test_the_date_of_llama3_changes_the_prompt_unless_the_client_sets_it(
    templates: dict[str, Any],
) -> None:
    model = templates["llama3"].model()
    asked = prompt(model, AGENT[:2], template_kwargs={"date_string": "26 Jul 2024"})
    assert "Today: 26 Jul 2024" in asked


def test_calls_and_results_are_in_the_prompt(
    name: str, templates: dict[str, Any], weather: dict[str, Any]
) -> None:
    text = prompt(templates[name].model(), AGENT[:4], tools=[weather])
    assert text.count("get_weather") >= 2
    assert "Rome" in text.split("How is Rome?")[1] and "sunny" in text
    assert '\\"city' not in text


@pytest.mark.parametrize(
    "messages",
    [
        [*AGENT[:2], AGENT[4], {"role": "system", "content": "MID"}, AGENT[5]],
        [AGENT[1], {"role": "developer", "content": "MID"}],
        [AGENT[1], AGENT[5], {"role": "user", "content": "MID"}],
        [AGENT[1], {"role": "assistant", "content": "MID"}],
        [{"role": "user", "content": [{"type": "text", "text": "MID"}]}],
        [AGENT[1],
         {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b", "MID")]},
         {"role": "tool", "tool_call_id": "a", "content": "x"},
         {"role": "tool", "tool_call_id": "b", "content": "y"}],
        [{"role": "system", "content": "MID"}],
    ],
    ids=["system in the middle", "developer last", "users in a row", "assistant last", "parts",
         "two calls", "system only"],
)  # fmt: skip
def test_unusual_histories_are_rendered(
    name: str, messages: list[dict[str, Any]], templates: dict[str, Any], weather: dict[str, Any]
) -> None:
    assert "MID" in prompt(templates[name].model(), messages, tools=[weather])


def test_arguments_that_are_no_json_do_not_stop_the_next_turn(
    name: str, templates: dict[str, Any], weather: dict[str, Any]
) -> None:
    broken = call("call_1")
    broken["function"]["arguments"] = '{"city": "Ro'
    messages = [AGENT[1], {"role": "assistant", "content": "", "tool_calls": [broken]}]
    assert "Ro" in prompt(templates[name].model(), messages, tools=[weather])


@pytest.mark.parametrize(
    "choice", ["required", NamedTool("get_weather")], ids=["required", "named"]
)
def test_a_forced_call_is_read_back_from_every_text_of_its_grammar(
    name: str, choice: Any, templates: dict[str, Any], weather: dict[str, Any], derive: Any,
    read_all: Any,
) -> None:  # fmt: skip
    import json
    import random

    request = ChatRequest(AGENT[:2], tools=[weather], tool_choice=choice)
    prepared = templates[name].model().prepare(request)
    assert prepared.constraint is not None and prepared.constraint.gbnf is not None
    for seed in range(10):
        text = derive(prepared.constraint.gbnf, random.Random(seed))
        if prepared.constraint.after:
            text = f"hm{prepared.constraint.after}{text}"
        events = read_all(prepared.new_parser(), list(text))
        assert [kind for kind, _ in events if kind != "ReasoningDelta"] == [
            "ToolCallStart",
            "ToolCallArguments",
        ]
        assert "city" in json.loads(events[-1][1])


@pytest.mark.parametrize("with_tools", [False, True])
def test_a_json_answer_comes_through_as_text(
    name: str, with_tools: bool, templates: dict[str, Any], weather: dict[str, Any], read_all: Any
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = [weather] if with_tools else []
    wanted = ResponseFormat("json_schema", schema)
    prepared = (
        templates[name].model().prepare(ChatRequest(AGENT[:2], tools=tools, response_format=wanted))
    )
    assert prepared.constraint is not None
    text = '{"a": 1}'
    if templates[name].family == "harmony":
        text = "<|start|>assistant<|channel|>final<|message|>" + text
    if prepared.constraint.after:
        text = f"hm{prepared.constraint.after}\n{text}"
    events = read_all(prepared.new_parser(), list(text))
    assert events[-1] == ("TextDelta", '{"a": 1}')


def test_a_schema_waits_for_the_end_of_the_reasoning(templates: dict[str, Any]) -> None:
    model = templates["qwen3"].model()
    wanted = ResponseFormat("json_object")
    thinking = model.prepare(ChatRequest(AGENT[:2], response_format=wanted))
    assert thinking.constraint is not None and thinking.constraint.after == "</think>"
    assert thinking.prompt[-1].endswith("<think>\n")
    silent = model.prepare(
        ChatRequest(AGENT[:2], response_format=wanted, template_kwargs={"enable_thinking": False})
    )
    assert silent.constraint is not None and silent.constraint.after is None


def test_no_constraint_without_need(templates: dict[str, Any], weather: dict[str, Any]) -> None:
    model = templates["qwen2.5"].model()
    for choice in ("auto", "none"):
        request = ChatRequest(AGENT[:2], tools=[weather], tool_choice=choice)
        assert model.prepare(request).constraint is None


def test_choice_none_shows_the_tools_but_reads_no_call(
    templates: dict[str, Any], weather: dict[str, Any], read_all: Any
) -> None:
    model = templates["qwen2.5"].model()
    auto = model.prepare(ChatRequest(AGENT[:2], tools=[weather]))
    none = model.prepare(ChatRequest(AGENT[:2], tools=[weather], tool_choice="none"))
    text = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    assert none.prompt == auto.prompt
    assert read_all(none.new_parser(), [text]) == [("TextDelta", text)]


def test_reasoning_effort_none_means_no_thinking(templates: dict[str, Any]) -> None:
    model = templates["qwen3"].model()
    assert prompt(model, AGENT[:2], reasoning_effort="none").rstrip().endswith("</think>")
    high = prompt(templates["gpt-oss"].model(), AGENT[:2], reasoning_effort="xhigh")
    assert "Reasoning: high" in high


def test_the_last_message_can_be_continued(name: str, templates: dict[str, Any]) -> None:
    messages = [AGENT[1], {"role": "assistant", "content": "It is"}]
    text = prompt(
        templates[name].model(), messages, template_kwargs={"continue_final_message": True}
    )
    assert text.endswith("It is")


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"chat_template": "x"}, "chat_template_kwargs.chat_template"),
        ({"messages": "x"}, "chat_template_kwargs.messages"),
        ({"enable_thinking": "yes"}, "chat_template_kwargs.enable_thinking"),
        ({"thinking_budget": 10**30}, "chat_template_kwargs.thinking_budget"),
        ({"thinking_budget": True}, "chat_template_kwargs.thinking_budget"),
        ({"date_string": "x" * 10_000}, "chat_template_kwargs.date_string"),
        ({"date_string": ["x"] * 9}, "chat_template_kwargs.date_string"),
        ({"continue_final_message": True}, "chat_template_kwargs.continue_final_message"),
    ],
)
def test_hostile_template_kwargs_are_refused_by_name(
    kwargs: dict[str, Any], param: str, templates: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt(templates["qwen3"].model(), AGENT[:2], template_kwargs=kwargs)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://[::1]/"}}]},
         "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "wizard", "content": "x"}, "messages[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls[0]"),
    ],
)  # fmt: skip
def test_messages_we_cannot_take_are_refused_by_name(
    message: dict[str, Any], param: str, templates: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt(templates["chatml"].model(), [message])
    assert caught.value.param == param


def test_the_words_of_a_template_reach_the_client() -> None:
    model = ChatModel(
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not this') }}"
        "{% endif %}{{ m.content }}{% endfor %}", "", "", ()
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="not this"):
        prompt(model, [{"role": "user", "content": "no"}])


@pytest.mark.parametrize("source", ["{% for", "{{ raise_exception('never') }}", "constant"])
def test_a_model_with_a_useless_template_says_so_when_asked(source: str) -> None:
    with pytest.raises(InvalidRequest, match="/v1/completions") as caught:
        prompt(ChatModel(source, "", "", ()), AGENT[:2])
    assert caught.value.param == "model"


def test_a_template_that_takes_only_parts_gets_parts() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{{ '\\n' }}{% endfor %}"
    )
    text = prompt(ChatModel(source, "", "", ()), AGENT[:2])
    assert text == "system:Be brief.\nuser:How is Rome?\n"


def test_a_template_without_system_messages_gets_them_with_the_user() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    )
    text = prompt(ChatModel(source, "", "", ()), AGENT[:2])
    assert text == "user:Be brief.\n\nHow is Rome?\n"


@pytest.mark.model
def test_the_template_of_the_default_model_works(model_path: Path, weather: dict[str, Any]) -> None:
    source = check_gguf(model_path).chat_template
    assert source is not None
    model = ChatModel(source, "<|im_start|>", "<|im_end|>", ("<|im_start|>", "<|im_end|>"))
    prompts = [prompt(model, AGENT[:n], tools=[weather]) for n in TURNS]
    assert model.family == "generic"
    assert all(b.startswith(a) for a, b in zip(prompts, prompts[1:], strict=False))
    assert prompts[0].endswith("How is Rome?<|im_end|>\n<|im_start|>assistant\n")
