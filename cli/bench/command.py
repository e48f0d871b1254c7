"""The `ingle bench` commands: options, progress, and where the report goes."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Measure this node on this machine.", no_args_is_help=True)


@app.command(epilog="Example: ingle bench engine --json > engine.json")
def engine(
    model: Annotated[str, typer.Option(help="Installed model to measure with.")] = "smollm2:135m",
    runs: Annotated[int, typer.Option(help="Runs a scenario; the median counts.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """What the worker and HTTP cost on top of a bare decode loop; decode on a busy core."""
    from cli.bench.engine import run
    from node.models import ModelStore
    from node.paths import node_paths

    store = ModelStore(node_paths())
    report = asyncio.run(run(store.find(model), runs, _say))
    print(report.json() if as_json else report.table())


def _say(text: str) -> None:
    print(text, file=sys.stderr)
