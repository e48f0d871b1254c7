"""`ingle status`, `ps` and `logs`: what the daemon does, and what it wrote down."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.options import Json
from cli.output import age, mebi, print_json, print_table

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: ingle status --json")(status)
    app.command(epilog="Example: ingle ps")(ps)
    app.command(epilog="Example: ingle logs -n 200 -f")(logs)


def status(as_json: Json = False) -> None:
    """Is the daemon running, where, and what is it doing?"""
    about, url = _status()
    if as_json:
        print_json({"url": url, **about})
        return
    print(f"Inglenook {about['version']} runs on {url} (process {about['pid']})")
    print(f"up {age(about['uptime_s'])}, {about['running']} running, {about['waiting']} waiting")
    if about["models"]:
        print()
        _print_models(about["models"])
    else:
        print("no model is loaded; the first request loads one")


def ps(as_json: Json = False) -> None:
    """List the loaded models."""
    models = _status()[0]["models"]
    if as_json:
        print_json(models)
    else:
        _print_models(models)


def logs(
    lines: Annotated[int, typer.Option("-n", "--lines", help="Last lines to show.", min=0)] = 50,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Print the daemon's log. Prompts and answers are never in it."""
    from cli.tail import follow as follow_lines
    from cli.tail import last_lines
    from node.errors import NotFound
    from node.paths import node_paths

    path = node_paths().log_file
    if not path.exists():
        raise NotFound(f"no log yet: {path} is written once the daemon has run")
    for line in last_lines(path, lines):
        print(line)
    if follow:
        for line in follow_lines(path):
            print(line, flush=True)


def _status() -> tuple[dict[str, Any], str]:
    from cli.client import DaemonClient
    from node.paths import node_paths

    with DaemonClient(node_paths()) as client:
        return client.status(), client.about.url


def _print_models(models: list[dict[str, Any]]) -> None:
    print_table(
        ["MODEL", "STATE", "CONTEXT", "GPU", "MEMORY", "IN-USE", "IDLE", "UNLOADS-IN", "PID"],
        [
            (
                model["id"],
                model["state"],
                model["n_ctx"],
                f"{model['gpu_layers']} layers" if model["gpu_layers"] else "no",
                mebi(model["rss_bytes"]),
                model["in_use"],
                age(model["idle_s"]),
                "never" if model["expires_in_s"] is None else age(model["expires_in_s"]),
                model["pid"],
            )
            for model in models
        ],
        right="CONTEXT MEMORY IN-USE PID",
    )
