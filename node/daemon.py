"""The daemon's process: one per home, its files, its socket, its signals and its end.

Owns neither models (`node.pool`) nor routes (`node.api`). Never imports llama_cpp.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import logging.handlers
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, Any

from node import __version__
from node.api import NodeServer, check_bind, create_app
from node.base import Pool
from node.config import LoadedConfig
from node.errors import ConfigError, Conflict, NodeError, NotFound
from node.paths import NodePaths

__all__ = ["run"]

logger = logging.getLogger(__name__)

_LOG_BYTES = 2_000_000
_LOG_FILES = 5
_GRACE_S = 5
_LOCK_TRIES, _LOOK_AGAIN_S = 5, 0.05


def run(loaded: LoadedConfig, paths: NodePaths, model: str | None) -> int:
    """Serve until told to stop; the exit code. `model` is loaded while serving begins.

    Raises:
        ConfigError: the node would be reachable from outside without a key.
        Conflict: a daemon serves this home already, or another process has the port.
        NotFound: `model` is not installed.
    """
    check_bind(loaded.config.api)
    paths.create()
    with _only_daemon(paths), _logging_to(paths.log_file):
        with _listening(loaded.config.api.host, loaded.config.api.port) as listener:
            token = secrets.token_urlsafe(32)
            _write_private(paths.admin_token_file, token)
            try:
                with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                    return runner.run(_serve(loaded, paths, model, listener, token))
            finally:
                paths.daemon_file.unlink(missing_ok=True)
                paths.admin_token_file.unlink(missing_ok=True)


async def _serve(
    loaded: LoadedConfig,
    paths: NodePaths,
    model: str | None,
    listener: socket.socket,
    token: str,
) -> int:
    from node.models import ModelStore
    from node.pool import ModelPool

    store = ModelStore(paths, discover=loaded.config.models.discover)
    pool: Pool = ModelPool(store, loaded.config, paths)
    if model is not None:
        pool.resolve(model)

    def stop() -> None:
        server.should_exit = True

    app = create_app(
        pool, loaded.config, settings=loaded.settings, admin_token=token, shutdown=stop
    )
    server = NodeServer(
        app,
        on_started=lambda: _announce(loaded, paths, listener),
        on_deadline=pool.close,
        grace_s=_GRACE_S,
    )
    async with _preloading(pool, model):
        await server.serve(sockets=[listener])
    logger.info("stopped")
    return 130 if server.interrupted else 0


@contextlib.asynccontextmanager
async def _preloading(pool: Pool, model: str | None) -> AsyncIterator[None]:
    """Load the first model beside serving; close the pool at the end, whatever happened."""
    task = asyncio.create_task(_preload(pool, model))
    # Let the load begin, so that /health never says ok before it.
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pool.close()


async def _preload(pool: Pool, model: str | None) -> None:
    try:
        name = pool.resolve(model or "local")
    except NotFound as error:
        logger.warning("no model is loaded: %s", error.message)
        return
    try:
        await pool.load(name)
        logger.info("model %s is ready", name)
    except NodeError as error:
        logger.error("could not load %s: %s", name, error.message)
    except Exception:  # task boundary: the daemon serves on, the next request tries again
        logger.exception("could not load %s", name)


def _announce(loaded: LoadedConfig, paths: NodePaths, listener: socket.socket) -> None:
    host, port = loaded.config.api.host, listener.getsockname()[1]
    about = {
        "pid": os.getpid(),
        "host": host,
        "port": port,
        "version": __version__,
        "started_s": time.time(),
    }
    _write_private(paths.daemon_file, json.dumps(about))
    shown = f"[{host}]" if ":" in host else host
    logger.info("serving on %s port %d", host, port)
    print(f"Inglenook {__version__} serves on http://{shown}:{port}/v1", flush=True)


@contextlib.contextmanager
def _only_daemon(paths: NodePaths) -> Iterator[None]:
    """Hold the home's lock. The system lets go of it when the process ends, however it ends."""
    with (paths.runtime / "daemon.lock").open("a+") as lock:
        if not _lock_patiently(lock):
            raise Conflict(f"a daemon serves this home already{_described(paths.daemon_file)}")
        yield


def _lock_patiently(file: IO[str]) -> bool:
    """A client that looks whether we live holds the lock for an instant: try more than once."""
    for _ in range(_LOCK_TRIES):
        if _lock(file):
            return True
        time.sleep(_LOOK_AGAIN_S)
    return False


def _lock(file: IO[str]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _described(daemon_file: Path) -> str:
    try:
        about: dict[str, Any] = json.loads(daemon_file.read_text(encoding="utf-8"))
        return f": process {about['pid']} on port {about['port']}; `ingle down` stops it"
    except (OSError, ValueError, KeyError):
        return "; `ingle down` stops it"


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        # On Windows SO_REUSEADDR would let two processes have the same port.
        option = "SO_EXCLUSIVEADDRUSE" if sys.platform == "win32" else "SO_REUSEADDR"
        listener.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        try:
            listener.bind((host.strip("[]"), port))
            listener.listen(2048)
        except OSError as error:
            raise _cannot_listen(error, host, port) from error
        yield listener


def _cannot_listen(error: OSError, host: str, port: int) -> NodeError:
    # Windows says EACCES when another process holds the port exclusively.
    if error.errno not in (errno.EADDRINUSE, errno.EACCES) or 0 < port < 1024:
        return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}", param="api")
    from node.hardware import port_owner

    owner = port_owner(port) or "another process"
    return Conflict(f"port {port} is taken by {owner}; choose another with --port", param="port")


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Everything from INFO up into the rotating file, warnings also to the terminal."""
    to_file = logging.handlers.RotatingFileHandler(
        path, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES - 1, encoding="utf-8"
    )
    to_terminal = logging.StreamHandler()
    to_terminal.setLevel(logging.WARNING)
    root = logging.getLogger()
    level = root.level
    for handler in (to_file, to_terminal):
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        path.chmod(0o600)
        yield
    finally:
        root.setLevel(level)
        for handler in (to_file, to_terminal):
            root.removeHandler(handler)
            handler.close()


def _write_private(path: Path, text: str) -> None:
    """Atomically, readable by this user only from the first byte on."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return None
    return uvloop.new_event_loop
