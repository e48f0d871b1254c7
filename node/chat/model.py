"""The chat side of one loaded model: from a chat request to a prompt, a constraint and a parser.

Owns the order of the steps. What they are is in `messages`, `protect`, `template`, `grammar`
and `formats`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from node.chat.formats import (
    BodyParser,
    ForcedCallParser,
    HarmonyParser,
    ReasoningParser,
    TextParser,
    Tools,
    family_of,
)
from node.chat.grammar import ReplyGrammar
from node.chat.messages import adapt, plain_messages
from node.chat.options import CONTINUE, template_options
from node.chat.probe import Capabilities, probe
from node.chat.protect import Guard, SpecialTokens
from node.chat.template import ChatTemplate, TemplateError, TemplateRefused
from node.chat.toolprompt import tools_in_words
from node.chat.types import ChatRequest, NamedTool, OutputParser, PreparedChat
from node.engine.messages import Constraint
from node.errors import InvalidRequest

__all__ = ["ChatModel"]


class _Prompt(NamedTuple):
    """`thinking`: the prompt has ended inside the reasoning."""

    segments: tuple[str, ...]
    thinking: bool


class ChatModel:
    """Chat format of one model. Any thread may call `prepare`.

    A template that cannot be used does not keep the model from loading: `prepare` says so.
    """

    def __init__(
        self,
        template_source: str,
        bos_token: str,
        eos_token: str,
        special_tokens: Sequence[str],
        architecture: str = "",
    ) -> None:
        self._variables = {"bos_token": bos_token, "eos_token": eos_token}
        self._special = SpecialTokens(special_tokens)
        self._can = Capabilities()
        self._broken: str | None = None
        try:
            self._template = ChatTemplate(template_source)
            self._can = probe(self._template, self._variables)
        except TemplateError as error:
            self._broken = str(error)
        self._family = family_of(template_source, self._can.tools, architecture)
        markers = self._family.reasoning
        self._reasons = markers.close in template_source or markers.open in self._special

    @property
    def family(self) -> str:
        return self._family.name

    def prepare(self, request: ChatRequest) -> PreparedChat:
        """
        Raises:
            InvalidRequest: names the field that this model cannot honour.
        """
        tools = _callable(request)
        forced = bool(tools) and request.tool_choice != "auto"
        grammar = self._grammar(request, tools, forced)
        prompt = self._prompt(request, constrained=grammar is not None)
        constraint = None
        if grammar is not None:
            constraint = Constraint(
                gbnf=grammar.text(after_thinking=prompt.thinking),
                after=self._family.reasoning.close if prompt.thinking else None,
                param=grammar.param,
            )
        return PreparedChat(
            prompt=prompt.segments,
            constraint=constraint,
            stop=(),
            render_special=self._shows_special(bool(tools)),
            new_parser=partial(
                self._parser,
                tools,
                forced=forced,
                thinking=prompt.thinking,
                max_calls=None if request.parallel_tool_calls else 1,
            ),
        )

    def _prompt(self, request: ChatRequest, constrained: bool) -> _Prompt:
        if self._broken is not None:
            raise InvalidRequest(
                f"the chat template of this model cannot be used: {self._broken};"
                " /v1/completions works without one",
                param="model",
            )
        options = template_options(request, self.family)
        goes_on = bool(options.pop(CONTINUE, False))
        guard = Guard(self._special, self._family.reasoning)
        messages = guard.messages(plain_messages(request.messages))
        tools = guard.strings(list(request.tools))
        options = guard.strings(options)
        if goes_on and messages[-1]["role"] != "assistant":
            param = f"chat_template_kwargs.{CONTINUE}"
            raise InvalidRequest(f"{param}: the last message must be the assistant's", param=param)
        in_words = tools_in_words(tools) if tools and not self._can.tools else ""
        adapted = adapt(messages, self._can, tools_text=in_words, short_ids=self._family.short_ids)
        text = self._render(
            {
                **options,
                **self._variables,
                "messages": adapted,
                "tools": tools if tools and self._can.tools else None,
                "add_generation_prompt": not goes_on,
            }
        )
        if goes_on:
            text = _until_last_message(text, adapted[-1]["content"])
        opened = self._opened(text, options, constrained and not goes_on)
        return _Prompt(guard.segments(opened or text), opened is not None)

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except TemplateRefused as error:
            raise InvalidRequest(
                f"messages: the model's chat template says: {error}", param="messages"
            ) from error
        except TemplateError as error:
            raise InvalidRequest(
                f"messages: the model's chat template fails on them: {error}", param="messages"
            ) from error

    def _opened(self, text: str, options: Mapping[str, Any], constrained: bool) -> str | None:
        """The prompt, ending inside the reasoning; None when no reasoning has begun.

        A constraint must know where the reasoning ends. A model that opens it by itself is helped
        to do so, as otherwise it could not be told from one that goes without.
        """
        markers = self._family.reasoning
        tail = text.rstrip()
        if not self._reasons or tail.endswith(markers.close):
            return None
        if tail.endswith(markers.open):
            return text
        thinks = self.family == "harmony" or self.family == "deepseek"
        thinks = thinks or (self._can.thinking_switch and options.get("enable_thinking", True))
        if not (constrained and thinks):
            return None
        return text + markers.open + ("" if self.family == "harmony" else "\n")

    def _grammar(self, request: ChatRequest, tools: Tools, forced: bool) -> ReplyGrammar | None:
        """Calls only if one must come; if one may come and the reply must be JSON, either."""
        wants_json = request.response_format.kind != "text" and not forced
        if not forced and not wants_json:
            return None
        schema_param = "response_format.json_schema.schema"
        grammar = ReplyGrammar("tool_choice" if forced else schema_param)
        for i, tool in enumerate(request.tools):
            name = tool["function"]["name"]
            if name in tools:
                param = f"tools[{i}].function.parameters"
                grammar.add_call(self._family.shape, name, tools[name], param)
        if wants_json:
            grammar.add_json(request.response_format.schema, self._family.answer_prefix)
        return grammar

    def _shows_special(self, reads_calls: bool) -> bool:
        if self.family == "harmony":
            return True
        reasons = self._reasons and self._family.reasoning.open in self._special
        return reasons or (reads_calls and self._family.markers_are_special)

    def _parser(
        self, tools: Tools, *, forced: bool, thinking: bool, max_calls: int | None
    ) -> OutputParser:
        parser: OutputParser
        if forced:
            parser = ForcedCallParser(self._family.shape, tools)
        elif self.family == "harmony":
            parser = HarmonyParser(tools, max_calls)
        elif tools:
            parser = BodyParser(self._family.syntaxes, tools, max_calls)
        else:
            parser = TextParser()
        if thinking or (self._reasons and not forced and self.family != "harmony"):
            return ReasoningParser(self._family.reasoning, parser, opened=thinking)
        return parser


def _callable(request: ChatRequest) -> Tools:
    """Parameters schema of each function that the reply may call."""
    if request.tool_choice == "none":
        return {}
    functions = [tool["function"] for tool in request.tools]
    if isinstance(request.tool_choice, NamedTool):
        functions = [f for f in functions if f["name"] == request.tool_choice.name]
    return {f["name"]: f.get("parameters") or {} for f in functions}


def _until_last_message(text: str, content: Any) -> str:
    """The rendered prompt up to the end of the last message's content."""
    if isinstance(content, list):
        content = content[-1]["text"]
    for wanted in (content or "", (content or "").strip()):
        at = text.rfind(wanted)
        if wanted and at >= 0:
            return text[: at + len(wanted)]
    return text.rstrip()
