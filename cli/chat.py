"""`ingle run`, one question and its answer, and `ingle chat`, a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from cli.options import Json, Model, verbosity
from cli.output import print_json, say

__all__ = ["register"]

MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Longest answer.", min=0, show_default=False)
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", help="0: always the likeliest token.", min=0, max=5, show_default=False
    ),
]
System = Annotated[
    str, typer.Option("--system", help="System message.", metavar="TEXT", show_default=False)
]


def register(app: typer.Typer) -> None:
    app.command(epilog='Example: ingle run "Name three birds."; git diff | ingle run "Explain:" -')(
        run
    )
    app.command(epilog="Example: ingle chat --model smollm2:135m")(chat)


def run(
    prompt: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="Words of the prompt; - reads stdin.")
    ],
    model: Model = "",
    system: System = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    as_json: Json = False,
) -> None:
    """Ask once; the answer is streamed to stdout."""
    from cli.client import DaemonClient
    from cli.conversation import Conversation
    from node.paths import node_paths

    with DaemonClient(node_paths()) as client:
        talk = Conversation(
            client, model or "local", _options(max_tokens, temperature), _opening(system)
        )
        turn = talk.say(_words(prompt), (lambda piece: None) if as_json else _show)
    if as_json:
        print_json(turn)
        return
    print()
    if verbosity.on:
        say(turn.summary())


def chat(
    model: Model = "",
    system: System = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D leaves, /help shows the rest."""
    from cli.client import DaemonClient
    from cli.conversation import Conversation
    from cli.repl import Repl
    from node.paths import node_paths

    paths = node_paths()
    with DaemonClient(paths) as client:
        talk = Conversation(
            client, model or "local", _options(max_tokens, temperature), _opening(system)
        )
        Repl(talk, paths).run()


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _words(prompt: list[str]) -> str:
    return "\n".join(
        part for part in (" ".join(w for w in prompt if w != "-"), _stdin(prompt)) if part
    )


def _stdin(prompt: list[str]) -> str:
    return sys.stdin.read() if "-" in prompt else ""


def _options(max_tokens: int | None, temperature: float | None) -> dict[str, Any]:
    given = {"max_tokens": max_tokens, "temperature": temperature}
    return {name: value for name, value in given.items() if value is not None}


def _opening(system: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []
