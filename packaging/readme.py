"""Fills the generated blocks of README.md: `readme.py` checks them, `readme.py --write` renews.

Run it with the project's own environment; it asks the code what commands, settings and routes
there are.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
README = ROOT / "README.md"

ROUTES = {
    "POST /v1/chat/completions": "chat, streamed or not, with tools and `response_format`",
    "POST /v1/completions": "plain text or token ids, streamed or not",
    "GET /v1/models": "installed models with their context length",
    "GET /v1/models/{name}": "one of them",
    "POST /tokenize": "text to token ids",
    "POST /detokenize": "token ids to text",
    "GET /health": "200, or 503 while a model is loading; needs no key",
    "GET /healthz": "the same",
    "GET /readyz": "the same",
    "GET /metrics": "Prometheus, prefix `inglenook_`",
    "GET /ingle/v1/status": "uptime, queue, loaded models (admin token)",
    "POST /ingle/v1/models/load": "load a model (admin token)",
    "POST /ingle/v1/models/unload": "unload it (admin token)",
    "GET /ingle/v1/kv": "computed state of loaded models, by tier (admin token)",
    "POST /ingle/v1/kv/flush": "bring it all to the disk (admin token)",
    "POST /ingle/v1/kv/purge": "forget what memory holds of it (admin token)",
    "POST /ingle/v1/shutdown": "stop the daemon (admin token)",
    "GET /ingle/v1/config": "settings with their sources (admin token)",
}


def render(text: str) -> str:
    """`text` with every generated block made anew."""
    for name, block in (
        ("commands", commands()),
        ("settings", settings_table()),
        ("routes", routes_table()),
        ("fields", fields()),
    ):
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text, found = pattern.subn(lambda m, b=block: f"{m[1]}{b}\n{m[2]}", text)  # type: ignore[misc]
        if found != 1:
            raise SystemExit(f"{README.name}: the block {name!r} is there {found} times, not once")
    return text


def commands() -> str:
    from typer.testing import CliRunner

    from cli.main import app

    environment = {"COLUMNS": "100", "TERMINAL_WIDTH": "100"}
    result = CliRunner().invoke(app, ["--help"], prog_name="ingle", env=environment)
    lines = [line.rstrip() for line in result.output.strip().splitlines()]
    return "\n".join(["```text", *lines, "```"])


def settings_table() -> str:
    from node.config import settings

    rows = [
        f"| `{row.key}` | {_default(row.default)} | {row.help.replace('|', chr(92) + '|')} |"
        for row in settings()
    ]
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])


def routes_table() -> str:
    rows = [f"| `{route}` | {ROUTES[route]} |" for route in sorted(served(), key=_position)]
    return "\n".join(["| route | what it does |", "| --- | --- |", *rows])


def served() -> list[str]:
    """`METHOD /path` of every route of the application."""
    from fastapi.routing import APIRoute

    from node.api import create_app
    from node.base import Pool
    from node.config import NodeConfig

    # Routes are only listed: nothing asks the pool for anything.
    app = create_app(
        cast(Pool, None), NodeConfig(), settings=(), admin_token="-", shutdown=lambda: None
    )
    return [
        f"{method} {route.path.replace(':path}', '}')}"
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    ]


def fields() -> str:
    from node.api.schemas import ChatBody, CompletionBody

    chat, plain = set(ChatBody.__struct_fields__), set(CompletionBody.__struct_fields__)
    return "\n".join(
        f"- {title}: {', '.join(f'`{name}`' for name in sorted(names))}"
        for title, names in (
            ("both", chat & plain),
            ("chat only", chat - plain),
            ("completions only", plain - chat),
        )
    )


def _position(route: str) -> int:
    known = list(ROUTES)
    if route not in known:
        raise SystemExit(f"{Path(__file__).name}: describe {route} in ROUTES")
    return known.index(route)


def _default(value: Any) -> str:
    """As one would write it in config.toml."""
    return "-" if value is None else f"`{json.dumps(value)}`"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    renewed = render(text)
    if "--write" in sys.argv[1:]:
        README.write_text(renewed, encoding="utf-8")
        return 0
    if renewed != text:
        print("README.md is stale: run packaging/readme.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
