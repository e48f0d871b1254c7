"""What `ingle doctor` checks. Each check returns a verdict and never raises for what it finds."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from dataclasses import dataclass

from cli.client import DaemonClient
from cli.output import size
from node.config import NodeConfig, load_config
from node.errors import NodeError, Unavailable
from node.hardware import detect_hardware, port_owner
from node.models import ModelStore, check_gguf
from node.paths import NodePaths
from node.plan import llama_build, plan_here

__all__ = ["Check", "run_checks"]

_LOW_DISK_BYTES = 5 * 10**9
_LOW_RAM_BYTES = 2 * 10**9
_COMPILERS = ("c++", "g++", "clang++", "cl")


@dataclass(frozen=True, slots=True)
class Check:
    """`level` is ok, warn or fail; `advice` says what to do; `lines` are details."""

    name: str
    level: str
    detail: str
    advice: str = ""
    lines: tuple[str, ...] = ()


def run_checks(paths: NodePaths) -> list[Check]:
    """All checks in order. A configuration that does not load is one failed check."""
    checks = [_python(), _platform(), _memory(), _gpu(), _llama_cpp(), _compiler(), _disk(paths)]
    try:
        config = load_config(paths.config_file).config
    except NodeError as error:
        return [*checks, Check("config", "fail", error.message, f"edit {paths.config_file}")]
    checks.append(Check("config", "ok", str(paths.config_file)))
    store = ModelStore(paths, discover=config.models.discover)
    return [*checks, _models(store, config), _plan(store, config), _daemon(paths, config)]


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _platform() -> Check:
    return Check("platform", "ok", f"{platform.platform()}, {platform.machine()}")


def _memory() -> Check:
    hardware = detect_hardware()
    detail = (
        f"{hardware.cpu_cores} cores ({hardware.cpu_threads} threads), "
        f"{size(hardware.ram_free_bytes)} of {size(hardware.ram_total_bytes)} RAM free"
    )
    if hardware.ram_free_bytes < _LOW_RAM_BYTES:
        return Check("cpu, ram", "warn", detail, "close something, or take a small model")
    return Check("cpu, ram", "ok", detail)


def _gpu() -> Check:
    gpus = detect_hardware().gpus
    if not gpus:
        return Check("gpu", "ok", "no NVIDIA card; models run on the CPU")
    return Check(
        "gpu",
        "ok",
        "; ".join(f"{g.name}, {size(g.free_bytes)} of {size(g.total_bytes)} free" for g in gpus),
    )


def _llama_cpp() -> Check:
    """In a process of its own: neither this one nor the daemon ever loads the library."""
    about = llama_build()
    if "error" in about:
        return Check("llama.cpp", "fail", str(about["error"]), "run packaging/bootstrap.py again")
    offload = "with" if about["gpu_offload"] else "without"
    detail = f"llama-cpp-python {about['version']}, {offload} GPU support"
    lines = (str(about["system_info"]).strip(),)
    if detect_hardware().gpus and not about["gpu_offload"]:
        advice = "get the CUDA build: python3 packaging/bootstrap.py run --cuda"
        return Check("llama.cpp", "warn", f"{detail}, although there is a card", advice, lines)
    return Check("llama.cpp", "ok", detail, lines=lines)


def _compiler() -> Check:
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        return Check("compiler", "ok", "none; only needed to build llama.cpp anew")
    return Check("compiler", "ok", found)


def _disk(paths: NodePaths) -> Check:
    folder = next(p for p in (paths.models, *paths.models.parents) if p.exists())
    usage = shutil.disk_usage(folder)
    detail = f"{size(usage.free)} of {size(usage.total)} free at {paths.models}"
    if not os.access(folder, os.W_OK):
        return Check("disk", "fail", f"cannot write to {folder}", "choose another with --home")
    if usage.free < _LOW_DISK_BYTES:
        return Check("disk", "warn", detail, "make room before pulling larger models")
    return Check("disk", "ok", detail)


def _models(store: ModelStore, config: NodeConfig) -> Check:
    models = store.list()
    if not models:
        return Check("models", "warn", "none", f"ingle pull {config.models.default}")
    by_source: dict[str, int] = {}
    for model in models:
        by_source[model.source] = by_source.get(model.source, 0) + 1
    counts = ", ".join(f"{count} {source}" for source, count in sorted(by_source.items()))
    return Check("models", "ok", f"{len(models)} ({counts})")


def _plan(store: ModelStore, config: NodeConfig) -> Check:
    try:
        model = store.find(config.models.default)
        plan = plan_here(check_gguf(model.path), config.engine)
    except NodeError as error:
        return Check("plan", "warn", error.message)
    return Check("plan", "ok", f"of {model.name} on this machine:", lines=plan.lines)


def _daemon(paths: NodePaths, config: NodeConfig) -> Check:
    try:
        with DaemonClient(paths) as client:
            status = client.status()
            return Check("daemon", "ok", f"runs on {client.about.url}, process {status['pid']}")
    except Unavailable:
        return _port(config)
    except NodeError as error:
        return Check("daemon", "fail", error.message, "ingle down; ingle up")


def _port(config: NodeConfig) -> Check:
    port = config.api.port
    with socket.socket(socket.AF_INET6 if ":" in config.api.host else socket.AF_INET) as probe:
        if sys.platform != "win32":
            # As the daemon does: a port that is merely in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.api.host.strip("[]"), port))
        except OSError as error:
            who = port_owner(port) or error.strerror
            advice = "choose another: ingle up --port N"
            return Check("daemon", "warn", f"not running, and port {port} is taken: {who}", advice)
    return Check("daemon", "ok", f"not running; port {port} is free", "ingle up")
