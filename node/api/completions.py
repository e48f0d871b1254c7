"""/v1/completions: raw prompts, one or many, text or token ids; no chat template."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from node.api.fields import checked
from node.api.logprobs import LegacyLogprobs
from node.api.sampling import check_text_size, check_tokens, sampling_for
from node.api.schemas import CompletionBody, check_choices, stop_strings
from node.api.service import FINGERPRINT
from node.api.tally import Tally
from node.base import LoadedModel
from node.config import NodeConfig
from node.engine.base import GenerateRequest
from node.engine.messages import Constraint, Delta, Finish, TokenLogprob
from node.errors import InvalidRequest

__all__ = ["CompletionCall"]

_encode = msgspec.json.encode

Prompt = tuple[str, ...] | tuple[int, ...]


class CompletionCall:
    """A checked completion request. Raises InvalidRequest naming the field."""

    route = "completions"
    prompt_param = "prompt"

    def __init__(self, raw: Mapping[str, Any], config: NodeConfig) -> None:
        self._body = body = checked(raw, CompletionBody)
        self._config = config
        self._prompts = _prompts(body.prompt)
        limit = config.engine.max_sequences
        check_choices(body.n, limit, "n")
        check_choices(body.n * len(self._prompts), limit, "prompt")
        if body.best_of not in (None, body.n):
            raise InvalidRequest("best_of: only the value of n is supported", param="best_of")
        for prompt in self._prompts:
            text = [part for part in prompt if isinstance(part, str)]
            check_text_size(text, config.api.tokenizer_input_bytes, "prompt")
        self.model, self.stream, self.include_usage = body.model, body.stream, body.include_usage
        self.choices_per_prompt = body.n

    async def begin(self, loaded: LoadedModel) -> CompletionReply:
        body, n_vocab = self._body, loaded.engine.info.n_vocab
        for prompt in self._prompts:
            check_tokens([part for part in prompt if isinstance(part, int)], n_vocab, "prompt")
        samplings = sampling_for(body, self._config.sampling, n_vocab, body.n)
        constraint = Constraint(gbnf=body.grammar, param="grammar") if body.grammar else None
        requests = [
            GenerateRequest(
                prompt=prompt,
                sampling=sampling,
                max_tokens=body.max_tokens,
                stop=stop_strings(body),
                top_logprobs=body.logprobs,
                constraint=constraint,
                ignore_eos=body.ignore_eos,
                cache_prompt=body.cache_prompt,
            )
            for prompt in self._prompts
            for sampling in samplings
        ]
        return CompletionReply(loaded.id, requests, body)


class CompletionReply:
    """The chunks, or the one completion, of a completion call."""

    def __init__(
        self, model: str, requests: Sequence[GenerateRequest], body: CompletionBody
    ) -> None:
        self.requests = requests
        self._head = {
            "id": "cmpl-" + secrets.token_hex(12),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._streaming = body.stream
        self._tail = b',"usage":null}\n\n' if body.include_usage else b"}\n\n"
        self._choices = [_Choice(body.logprobs is not None) for _ in requests]
        head = _encode(self._head)[:-1]
        self._prefixes = [
            b'data: %b,"choices":[{"index":%d,"text":' % (head, i) for i in range(len(requests))
        ]
        self._plain_suffix = b',"logprobs":null,"finish_reason":null}]' + self._tail

    def take(self, index: int, item: Delta | Finish, tally: Tally) -> bytes:
        choice = self._choices[index]
        if type(item) is Finish:
            choice.finish_reason = item.reason
            return self._chunk(index, "", item.reason) if self._streaming else b""
        assert type(item) is Delta
        choice.feed(item, keep_text=not self._streaming)
        if not self._streaming or not (item.text or item.logprobs):
            return b""
        return self._chunk(index, item.text, None)

    def usage_event(self, tally: Tally) -> bytes:
        usage = {"choices": [], "usage": tally.usage(), "timings": tally.timings()}
        return b"data: " + _encode({**self._head, **usage}) + b"\n\n"

    def result(self, tally: Tally) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [choice.result(i) for i, choice in enumerate(self._choices)],
            "usage": tally.usage(),
            "timings": tally.timings(),
        }

    def _chunk(self, index: int, text: str, reason: str | None) -> bytes:
        logprobs = self._choices[index].take_logprobs()
        if logprobs is None and reason is None:
            return self._prefixes[index] + _encode(text) + self._plain_suffix
        return b'%b%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._prefixes[index],
            _encode(text),
            _encode(logprobs),
            _encode(reason),
            self._tail,
        )


class _Choice:
    def __init__(self, wants_logprobs: bool) -> None:
        self._text: list[str] = []
        self._pending: list[TokenLogprob] = []
        self._logprobs = LegacyLogprobs() if wants_logprobs else None
        self.finish_reason = "stop"

    def feed(self, delta: Delta, *, keep_text: bool) -> None:
        self._pending += delta.logprobs
        if keep_text:
            self._text.append(delta.text)

    def take_logprobs(self) -> dict[str, list[Any]] | None:
        if self._logprobs is None:
            return None
        taken, self._pending = self._pending, []
        return self._logprobs.take(taken)

    def result(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(self._text),
            "logprobs": self.take_logprobs(),
            "finish_reason": self.finish_reason,
        }


def _prompts(prompt: str | list[Any]) -> list[Prompt]:
    """One text, several texts, the ids of one prompt, or of several."""
    if isinstance(prompt, str):
        return [(prompt,)]
    if prompt and all(isinstance(item, str) for item in prompt):
        return [(item,) for item in prompt]
    if _is_ids(prompt):
        return [tuple(prompt)]
    if prompt and all(_is_ids(item) for item in prompt):
        return [tuple(item) for item in prompt]
    raise InvalidRequest(
        "prompt: must be a text, a list of texts, or non-empty lists of token ids", param="prompt"
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
