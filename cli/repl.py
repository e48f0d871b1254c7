"""The terminal side of `ingle chat`: reading lines, slash commands, interrupting an answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cli.conversation import Conversation, Turn
from cli.output import dim, say, styled
from node.errors import NodeError, Unavailable
from node.paths import NodePaths

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

__all__ = ["Repl"]

_HELP = """\
/help           this list
/clear          forget the conversation (the system message stays)
/system TEXT    set the system message and begin anew; without TEXT: show it
/save FILE      write the conversation to FILE as JSON
/stats          tokens of the turns so far
/exit           leave, like Ctrl-D
Enter sends; Alt-Enter, or Escape then Enter, begins a new line; Ctrl-C stops an answer."""


class Repl:
    """Reads from a terminal with history and editing, or plain lines from a pipe."""

    def __init__(self, talk: Conversation, paths: NodePaths) -> None:
        self._talk = talk
        self._turns: list[Turn] = []
        self._read = _terminal_reader(paths) if sys.stdin.isatty() else _pipe_reader()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: say(_HELP),
            "/clear": self._clear,
            "/system": self._system,
            "/save": self._save,
            "/stats": self._stats,
        }

    def run(self) -> None:
        if sys.stdin.isatty():
            say(dim(f"Talking with {self._talk.model}; /help for help.", sys.stderr))
        while (line := self._read()) is not None:
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._answer(text)

    def _answer(self, text: str) -> None:
        try:
            turn = self._talk.say(text, _show)
        except KeyboardInterrupt:
            say(dim("\n[stopped]", sys.stderr))
            return
        except Unavailable:
            raise
        except NodeError as error:
            say(styled(f"\n{error.message}", "31", sys.stderr))
            return
        self._turns.append(turn)
        print()
        say(dim(f"{turn.summary()}\n", sys.stderr))

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        command = self._commands.get(name)
        if command is None:
            say(f"{name} is not a command; /help lists them.")
        else:
            command(argument.strip())

    def _clear(self, _: str) -> None:
        self._talk.messages[:] = [m for m in self._talk.messages if m["role"] == "system"]
        self._turns.clear()
        say("Forgotten.")

    def _system(self, text: str) -> None:
        if not text:
            current = [m["content"] for m in self._talk.messages if m["role"] == "system"]
            say(current[0] if current else "No system message.")
            return
        self._talk.messages[:] = [{"role": "system", "content": text}]
        self._turns.clear()

    def _save(self, name: str) -> None:
        if not name:
            say("Say where: /save FILE")
            return
        body = {"model": self._talk.model, "messages": self._talk.messages}
        try:
            Path(name).expanduser().write_text(
                json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        except OSError as error:
            say(f"Could not write {name}: {error.strerror}")
        else:
            say(f"Saved to {name}.")

    def _stats(self, _: str) -> None:
        prompt = sum(turn.prompt_tokens for turn in self._turns)
        cached = sum(turn.cached_tokens for turn in self._turns)
        answered = sum(turn.completion_tokens for turn in self._turns)
        share = f" ({100 * cached / prompt:.0f} %)" if prompt else ""
        say(
            f"{len(self._turns)} turns: {prompt} prompt tokens, {cached} of them cached{share}; "
            f"{answered} tokens answered."
        )


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _pipe_reader() -> Callable[[], str | None]:
    return lambda: sys.stdin.readline() or None


def _terminal_reader(paths: NodePaths) -> Callable[[], str | None]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory

    paths.create()
    history = paths.state / "chat-history"
    # The history holds the user's prompts.
    history.touch(mode=0o600)
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)), key_bindings=_keys(), multiline=True
    )

    def read() -> str | None:
        while True:
            try:
                return session.prompt("> ", prompt_continuation="  ")
            except KeyboardInterrupt:
                say(dim("(Ctrl-D or /exit leaves)", sys.stderr))
            except EOFError:
                return None

    return read


def _keys() -> KeyBindings:
    """Enter sends although the prompt is multi-line; Alt-Enter breaks the line."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
