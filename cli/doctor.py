"""`ingle doctor`: looks at the machine and the node, and says what to do about what it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from cli.options import Json
from cli.output import print_json, styled

if TYPE_CHECKING:
    from cli.checks import Check

__all__ = ["register"]

_STYLES = {"ok": "32", "warn": "33", "fail": "31"}


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: ingle doctor --json")(doctor)


def doctor(as_json: Json = False) -> None:
    """Check this machine, its models and the daemon.

    Exits with 1 when something is broken.
    """
    from cli.checks import run_checks
    from node.paths import node_paths

    checks = run_checks(node_paths())
    if as_json:
        print_json(checks)
    else:
        _print(checks)
    if any(check.level == "fail" for check in checks):
        raise typer.Exit(1)


def _print(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        level = styled(f"{check.level:<4}", _STYLES[check.level])
        print(f"{level}  {check.name:<{width}}  {check.detail}")
        if check.advice:
            print(f"{'':<4}  {'':<{width}}  → {check.advice}")
        for line in check.lines:
            print(f"{'':<4}  {'':<{width}}    {line}")
