"""`ingle serve`, `up` and `down`: the daemon in the foreground, in the background, and its end."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import Home, Json, Model, Settings, parse_settings
from cli.output import print_json, say

__all__ = ["register"]

Host = Annotated[
    str, typer.Option("--host", help="Address to listen on [api.host].", show_default=False)
]
Port = Annotated[
    str, typer.Option("--port", help="TCP port, 0 for a free one [api.port].", show_default=False)
]


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: ingle serve --model smollm2:135m --set engine.n_ctx=8192")(serve)
    app.command(epilog="Example: ingle up --model smollm2:135m")(up)
    app.command(epilog="Example: ingle down")(down)


def serve(
    model: Model = "",
    host: Host = "",
    port: Port = "",
    settings: Settings = [],  # noqa: B006 - Typer copies defaults
    home: Home = "",
) -> None:
    """Run the daemon here, until Ctrl-C."""
    from node.config import load_config
    from node.paths import node_paths

    paths = node_paths()
    loaded = load_config(paths.config_file, _flags(host, port, settings, model))
    # Only now: it is by far the slowest import, and a wrong flag should be told at once.
    from node import daemon

    raise typer.Exit(daemon.run(loaded, paths, model or None))


def up(
    model: Model = "",
    host: Host = "",
    port: Port = "",
    settings: Settings = [],  # noqa: B006 - Typer copies defaults
    home: Home = "",
    as_json: Json = False,
) -> None:
    """Start the daemon in the background and wait until it answers.

    Does nothing when it runs already.
    """
    from cli.background import start
    from node.config import load_config
    from node.paths import node_paths

    paths = node_paths()
    flags = _flags(host, port, settings, model)
    config = load_config(paths.config_file, flags).config
    arguments = [f"--set={key}={value}" for key, value in flags.items()]
    arguments += [f"--model={model}"] if model else []
    about, started = start(paths, arguments, config.engine.load_timeout_s)
    if as_json:
        print_json({"url": about.url, "pid": about.pid, "started": started})
        return
    if not started:
        say("It was running already; options of this call have no effect.")
    print(f"Inglenook answers on {about.url}/v1 (process {about.pid}).")
    say("Talk to it with `ingle chat`, stop it with `ingle down`.")


def down() -> None:
    """Stop the daemon and wait until it is gone."""
    from cli.background import stop
    from node.paths import node_paths

    print("Stopped." if stop(node_paths()) else "It was not running.")


def _flags(host: str, port: str, settings: list[str], model: str) -> dict[str, str]:
    flags = parse_settings(settings)
    if model:
        flags["models.default"] = model
    if host:
        flags["api.host"] = host
    if port:
        flags["api.port"] = port
    return flags
