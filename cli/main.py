"""The `ingle` command: all verbs in one place, and how an error leaves the program.

Commands import what they need when they run: `ingle --help` must stay fast.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from cli import bench, chat, config, demo, doctor, kv, models, options, serve, status
from node import __version__
from node.errors import NodeError

__all__ = ["app", "main"]

app = typer.Typer(
    name="ingle",
    help="Run small language models on your own machine, behind an OpenAI-compatible API.",
    epilog="First steps: ingle pull smollm2:135m; ingle up; ingle chat",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _commands in (serve, status, models, chat, demo, doctor):
    _commands.register(app)
app.add_typer(config.app, name="config")
app.add_typer(kv.app, name="kv")
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ingle {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    home: options.Home = "",
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show tracebacks and more detail.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    options.verbosity.on = verbose


def main() -> None:
    """Run a command; a library error becomes one line on stderr and its own exit code."""
    _speak_utf8()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except NodeError as error:
        _fail(error.message, error.exit_code)
    except BrokenPipeError:
        # The reader of our output left (`ingle logs | head`); Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # the process boundary: a user gets a line, not a traceback
        _fail(f"{type(error).__name__}: {error} (`ingle --verbose …` shows where)", 1)


def _speak_utf8() -> None:
    """Also through a pipe on Windows; a name that cannot be encoded must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")


def _fail(message: str, exit_code: int) -> None:
    if options.verbosity.on:
        import traceback

        traceback.print_exc()
    print(f"ingle: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
