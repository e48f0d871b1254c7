"""`ingle kv`: what is kept of computed state, where, and how to check or delete it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import Json
from cli.output import age, print_json, print_table, say, size

if TYPE_CHECKING:
    from node.plan import DiskTier

__all__ = ["app"]

app = typer.Typer(help="Computed state: device, DRAM and SSD.", no_args_is_help=True)

_NAMESPACE_DIGITS = 8


@app.command(epilog="Example: ingle kv stats --json")
def stats(as_json: Json = False) -> None:
    """Show what each tier holds, what it saved, what it refused and why, and measured costs."""
    models = _daemon_models()
    with _disk() as disk:
        ssd = disk.stats()
    if as_json:
        print_json({"ssd": ssd, "models": models})
        return
    print(f"SSD {ssd['path']}: {ssd['files']} files, {_of(ssd['bytes'], ssd['capacity_bytes'])}")
    print(f"written today: {_of(ssd['written_today_bytes'], ssd['write_bytes_per_day'])}")
    if not models:
        print("no model is loaded: nothing in DRAM or on the device")
    for model in models:
        _print_model(model)


@app.command(epilog="Example: ingle kv ls --json")
def ls(as_json: Json = False) -> None:
    """List the namespaces on the SSD: one for each model file, KV type, build and API key."""
    with _disk() as disk:
        rows = disk.namespaces()
    if as_json:
        print_json(rows)
        return
    print_table(
        ["NAMESPACE", "MODEL", "MEMORY", "KV", "FILES", "TOKENS", "SIZE", "LAST-USED"],
        [
            (
                row["namespace"][:_NAMESPACE_DIGITS],
                row["identity"].get("model"),
                row["identity"].get("memory"),
                row["identity"].get("type_k"),
                row["files"],
                row["tokens"],
                size(row["bytes"]),
                f"{age(max(0.0, time.time() - row['last_used_s']))} ago",
            )
            for row in rows
        ],
        right="FILES TOKENS SIZE",
    )


@app.command(epilog="Example: ingle kv verify --json")
def verify(as_json: Json = False) -> None:
    """Read every file on the SSD and check it; bad ones are deleted and computed again."""
    with _disk() as disk, _bar("checking") as show:
        counts = disk.verify(show)
    if as_json:
        print_json(counts)
        return
    print(
        f"{counts['files']} files: {counts['good']} good, {counts['bad']} bad and deleted", end=""
    )
    print(f", {counts['unreadable']} could not be read" if counts["unreadable"] else "")


@app.command(epilog="Example: ingle kv gc")
def gc(as_json: Json = False) -> None:
    """Make folder and index agree, and keep to the limits."""
    with _disk() as disk:
        counts = disk.gc()
    if as_json:
        print_json(counts)
        return
    print(
        f"removed {counts['drafts']} unfinished files and {counts['entries']} lost entries, "
        f"took up {counts['found']} files, evicted {counts['evicted']}"
    )


@app.command(epilog="Example: ingle kv purge 3f2a --yes")
def purge(
    namespace: Annotated[
        str, typer.Argument(metavar="[NAMESPACE]", help="First digits, as in `ingle kv ls`.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete computed state from every tier; it is computed again when it is needed."""
    with _disk() as disk:
        whole = _namespace(disk, namespace) if namespace else ""
        if not yes:
            what = f"the state of namespace {whole}" if whole else "all computed state"
            typer.confirm(f"Delete {what}?", abort=True, err=True)
        with _daemon() as client:
            if client is not None:
                client.kv_purge(whole)
        n_files = disk.purge(whole)
    print_json({"files": n_files}) if as_json else print(f"deleted {n_files} files")


@app.command(epilog="Example: ingle kv flush")
def flush(as_json: Json = False) -> None:
    """Bring everything computed to the SSD now."""
    from cli.client import DaemonClient
    from node.errors import Unavailable
    from node.paths import node_paths

    with DaemonClient(node_paths()) as client:
        done = client.kv_flush()
    if not done:
        raise Unavailable("not everything reached the disk in time; see `ingle kv stats`")
    print_json({"flushed": True}) if as_json else print("everything computed is on the disk")


@contextmanager
def _daemon() -> Iterator[Any]:
    """A client, or None when no daemon runs."""
    from cli.client import DaemonClient
    from node.errors import Unavailable
    from node.paths import node_paths

    try:
        client = DaemonClient(node_paths())
    except Unavailable:
        yield None
        return
    with client:
        yield client


@contextmanager
def _disk() -> Iterator[DiskTier]:
    """The SSD tier under the limits of the running daemon, else of the configuration."""
    from node.config import KVCacheConfig, load_config
    from node.paths import node_paths
    from node.plan import open_disk

    paths = node_paths()
    config = load_config(paths.config_file).config.kvcache
    with _daemon() as client:
        if client is not None:
            values = client.settings().items()
            config = KVCacheConfig(
                **{k.partition(".")[2]: v for k, v in values if k.startswith("kvcache.")}
            )
    disk = open_disk(config, paths)
    try:
        yield disk
    finally:
        disk.close()


def _daemon_models() -> list[dict[str, Any]]:
    with _daemon() as client:
        return [] if client is None else list(client.kv())


def _namespace(disk: DiskTier, start: str) -> str:
    from node.errors import InvalidRequest, NotFound

    found = [r["namespace"] for r in disk.namespaces() if r["namespace"].startswith(start.lower())]
    if not found:
        raise NotFound(f"no namespace begins with {start!r}; see `ingle kv ls`")
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} namespaces begin with {start!r}; give more digits")
    return str(found[0])


def _print_model(model: dict[str, Any]) -> None:
    device, tokens = model["device"], model["prompt_tokens"]
    print(f"\n{model['id']}")
    print(
        f"  device: {device['cells'] - device['cells_free']} of {device['cells']} cells, "
        f"{device['idle_sequences']} idle sequences"
    )
    dram = model.get("dram")
    if dram:
        print(f"  DRAM: {dram['blocks']} blocks, {_of(dram['bytes'], dram['capacity_bytes'])}")
    print("  prompt tokens: " + ", ".join(f"{n} {source}" for source, n in tokens.items()))
    if model.get("ssd") and model["ssd"]["narrow"]:
        print("  SSD too small for what goes through it: only state offered twice is kept")
    reasons = {**model.get("reasons", {}), **((model.get("ssd") or {}).get("reasons", {}))}
    if reasons:
        print("  not kept or not found: " + ", ".join(f"{n} {why}" for why, n in reasons.items()))
    costs = model.get("calibration")
    if costs:
        print(
            f"  measured: prefill {_us(costs['prefill_token_s'])} a token, "
            f"decode {_us(costs['decode_step_s'])} a step, "
            f"read {_us(costs['read_token_s'])} and restore {_us(costs['restore_token_s'])} a token"
        )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs"


def _of(n_bytes: int, limit_bytes: int) -> str:
    return f"{size(n_bytes)} of {size(limit_bytes)}"


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yields what is told of things done and things in all."""
    import sys

    if not sys.stderr.isatty():
        say(f"{what} …")
        yield None
        return
    from rich import progress
    from rich.console import Console

    with progress.Progress(console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
