"""`ingle config show`: every setting, its value and where that came from."""

from __future__ import annotations

from typing import Any

import typer

from cli.options import Json
from cli.output import dim, print_json, print_table

__all__ = ["app"]

app = typer.Typer(help="Settings of this node.", no_args_is_help=True)


@app.callback()
def _config() -> None:
    """Keeps `show` a verb of its own while it is the only one."""


@app.command(epilog="Example: ingle config show --json")
def show(as_json: Json = False) -> None:
    """Print each setting with its source: flag, environment, file or default.

    Set a key in config.toml as `key = value` under `[section]`, in the environment as
    INGLE_SECTION_KEY, or for one run as `ingle serve --set section.key=value`.
    """
    from node.config import load_config
    from node.paths import node_paths

    paths = node_paths()
    rows = load_config(paths.config_file).settings
    if as_json:
        print_json([{**row._asdict(), "value": _shown(row.key, row.value)} for row in rows])
        return
    print_table(
        ["KEY", "VALUE", "SOURCE"],
        [(row.key, _text(_shown(row.key, row.value)), row.source) for row in rows],
    )
    exists = "" if paths.config_file.exists() else " (not there yet)"
    print(dim(f"\nFile: {paths.config_file}{exists}"))


def _shown(key: str, value: Any) -> Any:
    from node.config import SECRET_KEYS

    return "(set)" if key in SECRET_KEYS and value else value


def _text(value: Any) -> str:
    if value is None:
        return "(not set)"
    if isinstance(value, tuple):
        return ", ".join(value) or "(none)"
    return str(value).lower() if isinstance(value, bool) else str(value)
