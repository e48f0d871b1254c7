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


@app.command(epilog="Example: ingle bench kv --scenario S1 --scenario S4 --json")
def kv(
    scenario: Annotated[
        list[str], typer.Option(help="S1 to S9, `ready`; may be given several times. Default: all.")
    ] = [],  # noqa: B006
    model: Annotated[str, typer.Option(help="Installed model to measure with.")] = "smollm2:135m",
    runs: Annotated[int, typer.Option(help="Runs a scenario; the median counts.", min=1)] = 1,
    base_url: Annotated[str, typer.Option(help="Measure the server there instead.")] = "",
    arm: Annotated[str, typer.Option(help="Name of that server in the results.")] = "",
    restart_command: Annotated[
        str, typer.Option(help="Shell command that kills that server and starts it anew.")
    ] = "",
    fixed_answers: Annotated[
        bool, typer.Option(help="Answers of one token repeated, for models with random weights.")
    ] = False,
    throttle: Annotated[
        str, typer.Option(help="Speeds of the disk against computing to try, as 0.5,1,2.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Prompt tokens computed when agents pause, alternate, fork, and are restarted."""
    from cli.bench.kv import run
    from cli.bench.kv_scenarios import SCENARIOS
    from node.models import ModelStore
    from node.paths import node_paths

    unknown = [name for name in scenario if name not in SCENARIOS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(SCENARIOS)}")
    try:
        ratios = [float(part) for part in throttle.split(",") if part]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--throttle") from error
    report = run(
        ModelStore(node_paths()).find(model),
        scenario or ([] if ratios else list(SCENARIOS)),
        runs,
        _say,
        base_url=base_url,
        arm=arm,
        restart_command=restart_command,
        fixed_answers=fixed_answers,
        throttle=ratios,
    )
    print(report.json() if as_json else report.table())


def _say(text: str) -> None:
    print(text, file=sys.stderr)
