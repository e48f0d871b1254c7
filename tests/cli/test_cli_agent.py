"""The demo's agent: its document, its tool, and the account of a turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from cli import agent
from cli.agent import QUESTIONS, Step, document, look_up, opening, steps
from cli.client import DaemonClient
from cli.conversation import Conversation
from node.errors import InvalidRequest


class ScriptedClient:
    """Answers with fixed pieces; remembers what it was sent."""

    def __init__(self, *pieces: str, error: Exception | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._pieces = pieces
        self._error = error

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append({**body, "messages": list(body["messages"])})
        for piece in self._pieces:
            yield {"model": "tiny", "choices": [{"delta": {"content": piece}}]}
        if self._error is not None:
            raise self._error
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        yield {
            "choices": [],
            "usage": {
                "prompt_tokens": 10,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 7},
            },
            "timings": {"computed_tokens": 3, "tokens_per_s": 50.0},
        }


def talk_with(client: ScriptedClient) -> Conversation:
    return Conversation(cast(DaemonClient, client), "local", {"temperature": 0})


def test_the_document_ships_with_the_package_and_fits_a_small_window() -> None:
    words = document().split()
    assert 600 <= len(words) <= 1000
    assert all(ord(character) < 128 for character in document())


def test_look_up_counts_whole_words_and_quotes_the_first_sentence() -> None:
    found = look_up("A cat sat. Cats\nsat on the cat.", "cat")
    assert (found.count, found.sentence) == (2, "A cat sat.")
    assert look_up("nothing", "cat").count == 0


def test_a_turn_is_added_to_the_conversation_with_its_account() -> None:
    client = ScriptedClient("Hel", "lo")
    talk = talk_with(client)
    shown: list[str] = []
    turn = talk.say("Hi", shown.append)
    assert shown == ["Hel", "lo"]
    assert (turn.model, turn.text) == ("tiny", "Hello")
    assert (turn.cached_tokens, turn.computed_tokens) == (7, 3)
    assert talk.messages[-1] == {"role": "assistant", "content": "Hello"}
    assert client.bodies[0]["temperature"] == 0


@pytest.mark.parametrize(("pieces", "kept"), [((), 0), (("Half",), 2)])
def test_a_broken_turn_leaves_what_was_answered(pieces: tuple[str, ...], kept: int) -> None:
    talk = talk_with(ScriptedClient(*pieces, error=InvalidRequest("no")))
    with pytest.raises(InvalidRequest):
        talk.say("Hi", lambda piece: None)
    assert len(talk.messages) == kept


def test_every_call_extends_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_PAUSE_S", 0.0)
    client = ScriptedClient("The embers keep.")
    talk = talk_with(client)
    talk.messages = opening(document())
    done: list[Step] = list(
        steps(talk, document(), lambda piece: None, lambda number, found, question: None)
    )
    assert len(done) == len(QUESTIONS) >= 4
    for before, after in zip(client.bodies, client.bodies[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]
    found = [step.found for step in done[1:]]
    assert all(item is not None and item.count > 0 for item in found)
    assert len({item.word for item in found if item is not None}) == len(found)
