"""`ingle demo`: a small agent against the running daemon, and a table of what its steps cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from cli.options import Json, Model
from cli.output import dim, print_json, print_table, say, styled

if TYPE_CHECKING:
    from cli.agent import Finding, Step

__all__ = ["COLUMNS", "Column", "register"]

_MAX_TOKENS = 48


class Column(NamedTuple):
    title: str
    value: Callable[[Step], str]


COLUMNS = (
    Column("STEP", lambda step: str(step.number)),
    Column("PROMPT", lambda step: str(step.turn.prompt_tokens)),
    Column("DEVICE", lambda step: str(step.turn.device_tokens)),
    Column("DRAM", lambda step: str(step.turn.dram_tokens)),
    Column("SSD", lambda step: str(step.turn.ssd_tokens)),
    Column("COMPUTED", lambda step: str(step.turn.computed_tokens)),
    Column("TTFT-MS", lambda step: f"{step.turn.ttft_ms:.0f}"),
    Column("TOKENS/S", lambda step: f"{step.turn.tokens_per_s:.1f}"),
)


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: ingle demo --json")(demo)


def demo(model: Model = "", as_json: Json = False) -> None:
    """Watch a small agent read a document and ask about it.

    Shows for every step how much of the prompt was already there. How good the answers are
    depends on the model; the default one is tiny, and often wrong.
    """
    from cli.agent import document, opening, steps
    from cli.client import DaemonClient
    from cli.conversation import Conversation
    from node.paths import node_paths

    text = document()
    with DaemonClient(node_paths()) as client:
        talk = Conversation(
            client,
            model or "local",
            {"max_tokens": _MAX_TOKENS, "temperature": 0},
            opening(text),
        )
        if not as_json:
            print(f"An agent reads a document of {len(text.split())} words and asks about it.")
        show, announce = (_silent, _announce_briefly) if as_json else (_show, _announce)
        done = list(steps(talk, text, show, announce))
    if as_json:
        print_json({"model": done[-1].turn.model, "steps": done, "totals": _totals(done)})
    else:
        _print_summary(done)


def _announce(number: int, found: Finding | None, question: str) -> None:
    if found is not None:
        print(dim(f"\n\ntool     look up {found}"), end="")
    print(styled(f"\n\nstep {number}   {question}", "1"))
    print("model    ", end="", flush=True)


def _announce_briefly(number: int, found: Finding | None, question: str) -> None:
    say(f"step {number}: {question}")


def _show(piece: str) -> None:
    sys.stdout.write(piece.replace("\n", "\n         "))
    sys.stdout.flush()


def _silent(piece: str) -> None:
    pass


def _print_summary(done: Sequence[Step]) -> None:
    print("\n")
    heads = [column.title for column in COLUMNS]
    rows = [[column.value(step) for column in COLUMNS] for step in done]
    print_table(heads, rows, right=" ".join(heads))
    totals = _totals(done)
    print(
        f"\n{totals['prompt_tokens']} prompt tokens in {len(done)} calls: "
        f"{totals['cached_tokens']} were still there ({100 * totals['cached_share']:.0f} %), "
        f"{totals['computed_tokens']} were computed."
    )
    print(dim("The answers are as good as the model is; the tiny default one is often wrong."))


def _totals(done: Sequence[Step]) -> dict[str, Any]:
    prompt_tokens = sum(step.turn.prompt_tokens for step in done)
    cached_tokens = sum(step.turn.cached_tokens for step in done)
    return {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "computed_tokens": sum(step.turn.computed_tokens for step in done),
        "completion_tokens": sum(step.turn.completion_tokens for step in done),
        "cached_share": round(cached_tokens / prompt_tokens, 4) if prompt_tokens else 0.0,
    }
