from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from typing import Any

import pytest

from node.chat.schemas import Rules, SchemaCompiler
from node.engine.core import EngineCore
from node.engine.messages import Constraint, Load, Resume, Sampling, Submit
from node.engine.request import Request
from node.hardware import process_rss_bytes

pytestmark = pytest.mark.model

Run = Callable[..., list]  # type: ignore[type-arg]
SYSTEM = "<|im_start|>system\nYou are a patient teacher of natural history.<|im_end|>\n"
GREEDY = Sampling()
WARM = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.05, seed=7)


def chat(question: str) -> tuple[str, ...]:
    return (f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",)


def cold(request_id: int, question: str, sampling: Sampling = GREEDY, n: int = 16) -> Submit:
    return Submit(request_id, chat(question), sampling, max_tokens=n, cache_prompt=False)


def warm(request_id: int, question: str, sampling: Sampling = GREEDY, n: int = 16) -> Submit:
    return Submit(request_id, chat(question), sampling, max_tokens=n)


def test_a_cached_prompt_gives_the_same_greedy_tokens_as_a_cold_one(
    core: EngineCore, run: Run
) -> None:
    (reference,) = run(core, cold(1, "Why is the sea salty?"))
    run(core, warm(2, "Why is the sea salty?"))
    (again,) = run(core, warm(3, "Why is the sea salty?"))
    assert again.tokens == reference.tokens
    usage = again.finish.usage
    assert (usage.cached_tokens, usage.computed_tokens) == (usage.prompt_tokens - 1, 1)


def test_cached_tokens_are_prompt_tokens_less_those_evaluated(core: EngineCore, run: Run) -> None:
    before = core.stats(0)
    question = "What do bees eat, " + "and what else, " * 12 + "and when?"
    outcomes = run(core, *(warm(10 + i, question) for i in range(4)))
    evaluated = core.stats(0).computed_tokens_total - before.computed_tokens_total
    decoded = sum(o.finish.usage.completion_tokens - 1 for o in outcomes)
    usages = [o.finish.usage for o in outcomes]
    assert sum(u.prompt_tokens - u.cached_tokens for u in usages) == evaluated - decoded
    assert [u.computed_tokens for u in usages[1:]] == [1, 1, 1]


def test_same_seed_and_prompt_give_the_same_tokens(core: EngineCore, run: Run) -> None:
    (first,) = run(core, cold(20, "Describe a hedgehog.", WARM))
    (second,) = run(core, cold(21, "Describe a hedgehog.", WARM))
    other_seed = Sampling(temperature=0.9, top_k=40, seed=8)
    (third,) = run(core, cold(22, "Describe a hedgehog.", other_seed))
    assert first.tokens == second.tokens
    assert first.tokens != third.tokens


def test_a_resumed_request_goes_on_as_if_nothing_had_happened(core: EngineCore, run: Run) -> None:
    (whole,) = run(core, cold(30, "Tell me about moss.", WARM, n=24))
    reached = tuple(whole.tokens[:9])
    text = b"".join(core.model.piece(t, special=False) for t in reached).decode()
    submit = Submit(
        31, chat("Tell me about moss."), WARM, max_tokens=24, resume=Resume(reached, len(text))
    )
    (rest,) = run(core, submit)
    assert text + rest.text == whole.text
    assert rest.finish.usage.completion_tokens == 24


def test_a_stop_string_ends_the_output_and_is_not_in_it(core: EngineCore, run: Run) -> None:
    (whole,) = run(core, cold(40, "Why do leaves fall?", n=24))
    stop = whole.text[10:14]
    submit = Submit(41, chat("Why do leaves fall?"), GREEDY, max_tokens=24, stop=(stop,))
    (stopped,) = run(core, submit)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert (stopped.finish.reason, stopped.finish.stop_string) == ("stop", stop)


def test_max_tokens_zero_reads_the_prompt_and_says_nothing(core: EngineCore, run: Run) -> None:
    (outcome,) = run(core, warm(50, "Anything?", n=0))
    assert (outcome.text, outcome.finish.reason) == ("", "length")
    assert outcome.finish.usage.completion_tokens == 0


def test_a_prompt_beyond_the_window_names_both_numbers(core: EngineCore, run: Run) -> None:
    (outcome,) = run(core, Submit(60, ("word " * 3000,), GREEDY))
    assert outcome.failure.code == "context_length_exceeded"
    assert "3000" in outcome.failure.message or "3001" in outcome.failure.message
    assert "2048" in outcome.failure.message


def test_output_ends_with_length_when_the_window_is_full(
    make_load: Callable[..., Load], run: Run
) -> None:
    small = EngineCore(make_load(n_ctx=256), threads=2)
    (outcome,) = run(small, Submit(61, tuple([5] * 250), GREEDY, ignore_eos=True))
    assert outcome.finish.reason == "length"
    assert outcome.finish.usage.completion_tokens == 7


def test_special_tokens_in_a_segment_of_their_own_stay_text(core: EngineCore) -> None:
    split = core.prepare(Submit(70, ("a <|im", "_end|> b"), GREEDY))
    whole = core.prepare(Submit(71, ("a <|im_end|> b",), GREEDY))
    end = core.model.tokenize("<|im_end|>", add_special=False, parse_special=True)
    assert end[0] not in split.tokens  # type: ignore[union-attr]
    assert end[0] in whole.tokens  # type: ignore[union-attr]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "wild": {"type": "boolean"},
    },
    "required": ["name", "legs", "wild"],
    "additionalProperties": False,
}


def gbnf_of(schema: dict[str, Any]) -> str:
    rules = Rules()
    return rules.text(SchemaCompiler(rules, schema, "response_format").compile())


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_constrained_output_validates(core: EngineCore, run: Run, sampling: Sampling) -> None:
    submit = Submit(
        80,
        chat("Describe a fox as JSON."),
        sampling,
        max_tokens=200,
        constraint=Constraint(gbnf=gbnf_of(SCHEMA)),
    )
    (outcome,) = run(core, submit)
    value = json.loads(outcome.text)
    assert set(value) == {"name", "legs", "wild"}
    assert 0 <= value["legs"] <= 8
    assert outcome.finish.reason == "stop"


def test_a_constraint_begins_after_its_marker(core: EngineCore, run: Run) -> None:
    constraint = Constraint(gbnf='root ::= " "? "<" ("true" | "false") ">"', after=".")
    submit = Submit(
        81, chat("Are foxes wild? Explain."), GREEDY, max_tokens=100, constraint=constraint
    )
    (outcome,) = run(core, submit)
    free, _, rest = outcome.text.partition(".")
    assert free
    assert rest.strip() in ("<true>", "<false>")


@pytest.mark.parametrize(
    ("constraint", "word"),
    [
        (Constraint(gbnf="root ::= ("), "grammar"),
        (Constraint(gbnf='start ::= "a"'), "root"),
        (Constraint(gbnf='root ::= "a"{99999}'), "repetition"),
        (Constraint(gbnf='root ::= root "a"'), "recursion"),
        (Constraint(gbnf=f'root ::= ")))" {"(" * 90_000}"a"{")" * 90_000}'), "nested"),
    ],
)
def test_a_constraint_that_does_not_compile_fails_the_request(
    core: EngineCore, run: Run, constraint: Constraint, word: str
) -> None:
    (outcome,) = run(core, Submit(90, chat("x"), GREEDY, constraint=constraint))
    assert outcome.failure.code == "invalid_request"
    assert outcome.failure.param == "response_format"
    assert word in outcome.failure.message


@pytest.mark.parametrize(
    "rest", ["{" + " " * 9000, "{" + "1" * 200_000, "[" * 200_000, "[" * 99999 + "\\"]
)
def test_a_hostile_grammar_is_refused_at_once(core: EngineCore, run: Run, rest: str) -> None:
    constraint = Constraint(gbnf=f'root ::= "a"{rest}')
    (outcome,) = run(core, Submit(97, chat("x"), GREEDY, constraint=constraint))
    assert outcome.failure.code == "invalid_request"


def test_braces_and_brackets_in_the_literals_of_a_grammar_are_text(
    core: EngineCore, run: Run
) -> None:
    constraint = Constraint(gbnf=f'root ::= "{{9999}}{"(" * 1200}"')
    (outcome,) = run(core, Submit(91, chat("x"), GREEDY, max_tokens=4, constraint=constraint))
    assert outcome.text.startswith("{")


def test_a_finished_grammar_ends_the_output_even_where_eos_is_ignored(
    core: EngineCore, run: Run
) -> None:
    constraint = Constraint(gbnf='root ::= "ab"')
    submit = Submit(92, chat("x"), GREEDY, max_tokens=9, ignore_eos=True, constraint=constraint)
    (outcome,) = run(core, submit)
    assert (outcome.text, outcome.finish.reason) == ("ab", "stop")


def test_a_bias_against_all_that_a_grammar_allows_fails_the_request(
    core: EngineCore, run: Run
) -> None:
    never = tuple((token, -math.inf) for token in range(core.model.n_vocab))
    constraint = Constraint(gbnf='root ::= "ab"')
    submit = Submit(93, chat("x"), Sampling(logit_bias=never), constraint=constraint)
    (outcome,) = run(core, submit)
    assert "no token" in outcome.failure.message


def test_a_look_back_beyond_all_bounds_takes_no_memory(core: EngineCore) -> None:
    far = 2**31 - 1
    sampling = Sampling(
        repeat_penalty=1.1, repeat_last_n=far, dry_multiplier=1.0, dry_penalty_last_n=far
    )
    before = process_rss_bytes(os.getpid()) or 0
    request = core.prepare(Submit(94, chat("x"), sampling))
    assert isinstance(request, Request)
    request.sampler.close()
    assert (process_rss_bytes(os.getpid()) or 0) < before + 2**28


def test_more_top_logprobs_than_tokens_are_all_of_them(core: EngineCore, run: Run) -> None:
    submit = Submit(95, chat("x"), GREEDY, max_tokens=1, top_logprobs=2**20)
    (outcome,) = run(core, submit)
    assert len(outcome.logprobs[0].top) == core.model.n_vocab


def test_a_resumed_request_that_a_smaller_window_cannot_hold_ends(
    core: EngineCore, run: Run
) -> None:
    n_ctx = core.context.n_ctx
    resume = Resume(tuple([20] * 40), 0)
    (outcome,) = run(core, Submit(96, tuple([5] * (n_ctx - 20)), GREEDY, resume=resume))
    assert outcome.finish.reason == "length"


def test_logprobs_are_those_of_the_model(core: EngineCore, run: Run) -> None:
    submit = Submit(100, chat("Say yes."), GREEDY, max_tokens=4, top_logprobs=3)
    (outcome,) = run(core, submit)
    for entry in outcome.logprobs:
        assert entry.logprob == pytest.approx(max(p for _, p in entry.top))
        assert sum(math.exp(p) for _, p in entry.top) <= 1.0001
    assert len(outcome.logprobs) == len(outcome.tokens)


def test_a_forbidden_token_never_comes(core: EngineCore, run: Run) -> None:
    (reference,) = run(core, cold(110, "Why is grass green?", n=6))
    banned = reference.tokens[0]
    sampling = Sampling(logit_bias=((banned, -100.0),))
    (outcome,) = run(core, cold(111, "Why is grass green?", sampling, n=6))
    assert banned not in outcome.tokens


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repeat_penalty=1.8, repeat_last_n=64),
        Sampling(presence_penalty=1.5, frequency_penalty=1.5),
        Sampling(dry_multiplier=2.0, dry_allowed_length=1),
    ],
)
def test_penalties_change_a_text_that_repeats_itself(
    core: EngineCore, run: Run, sampling: Sampling
) -> None:
    prompt = ("one two three one two three one two three one two",)
    (plain,) = run(core, Submit(120, prompt, GREEDY, max_tokens=12, cache_prompt=False))
    (other,) = run(core, Submit(121, prompt, sampling, max_tokens=12, cache_prompt=False))
    assert plain.tokens != other.tokens


def test_cancelling_frees_the_sequence_and_keeps_what_was_read(core: EngineCore) -> None:
    core.submit(core.prepare(warm(130, "Tell me everything about oaks.", n=500)))
    for _ in range(3):
        core.step()
    core.cancel(130)
    step = core.step()
    assert [f.reason for f in step.finished] == ["cancelled"]
    assert not core.busy
    assert core.stats(0).running == 0


def test_more_than_fits_is_preempted_and_still_finishes(
    make_load: Callable[..., Load], run: Run
) -> None:
    small = EngineCore(make_load(n_ctx=256, max_sequences=8), threads=2)
    submits = [
        Submit(i, tuple([20 + i] * 40), GREEDY, max_tokens=50, ignore_eos=True) for i in range(4)
    ]
    outcomes = run(small, *submits)
    assert [o.finish.usage.completion_tokens for o in outcomes] == [50] * 4
    assert small.stats(0).preemptions_total > 0
    for usage in (o.finish.usage for o in outcomes):
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens == 40
