"""Options and arguments that several commands share, and completion of model names."""

from __future__ import annotations

import os
from typing import Annotated

import typer

__all__ = [
    "Home",
    "Installed",
    "Json",
    "Model",
    "Settings",
    "complete_models",
    "parse_settings",
    "use_home",
    "verbosity",
]


class _Verbosity:
    """Set once by the root command, before any other runs."""

    on = False


verbosity = _Verbosity()


def use_home(folder: str) -> str:
    """Everything below, child processes included, finds its files under `folder`."""
    if folder:
        os.environ["INGLE_HOME"] = os.path.abspath(os.path.expanduser(folder))
    return folder


def complete_models(incomplete: str) -> list[str]:
    from node.errors import NodeError

    try:
        from node.models import ModelStore
        from node.paths import node_paths

        names = [model.name for model in ModelStore(node_paths()).list()]
    except (NodeError, OSError):  # a shell that completes must not see a traceback
        return []
    return [name for name in names if name.startswith(incomplete)]


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """`section.key=value` texts as flags for `load_config`, which checks keys and values."""
    flags = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"{pair!r} is not section.key=value", param_hint="--set")
        flags[key.strip()] = value.strip()
    return flags


Home = Annotated[
    str,
    typer.Option(
        "--home",
        metavar="DIR",
        help="Keep everything under DIR. Default: INGLE_HOME, else the platform's own folders.",
        callback=use_home,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Any key of `ingle config show`; may be given several times.",
    ),
]
Installed = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Name of an installed model, as in `ingle list`.",
        autocompletion=complete_models,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help="Installed model; default: `models.default`.",
        autocompletion=complete_models,
        show_default=False,
    ),
]
