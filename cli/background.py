"""A daemon in the background: starting it detached, waiting for it, stopping it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cli.client import DaemonClient, DaemonFile, read_daemon_file
from cli.lock import lock_is_held
from cli.output import say
from node.errors import NodeError, Unavailable
from node.paths import NodePaths

__all__ = ["start", "stop"]

_LOOK_EVERY_S = 0.1
_GENTLE_S = 20.0
_TERM_S = 15.0
# Found wherever this file was: not by the caller's folder, which may hold a `cli` of its own.
_PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from cli.main import main; main()"


def start(
    paths: NodePaths, arguments: Sequence[str], load_timeout_s: float
) -> tuple[DaemonFile, bool]:
    """The running daemon, and whether this call started it.

    Raises:
        NodeError: it ended before it answered; with its exit code and its last words.
        Unavailable: it does not get ready in time.
    """
    process = _spawn(paths, arguments) if _answering(paths) is None else None
    _wait_ready(paths, process, load_timeout_s)
    about = _answering(paths)
    if about is None:
        raise _ended(paths, 1)
    return about, process is not None


def stop(paths: NodePaths) -> bool:
    """True when a daemon was running and is gone now.

    Raises:
        Unavailable: it did not go away.
    """
    about = read_daemon_file(paths.daemon_file)
    if not lock_is_held(paths):
        return False
    try:
        with DaemonClient(paths) as client:
            client.shutdown()
        if _wait_gone(paths, _GENTLE_S):
            return True
    except NodeError as error:
        say(f"It does not listen ({error.message}); sending it a signal.")
    # The lock is held, and only its holder writes the file: this pid is the daemon's.
    about = about or read_daemon_file(paths.daemon_file)
    if about is not None:
        os.kill(about.pid, signal.SIGTERM)
    if about is None or not _wait_gone(paths, _TERM_S):
        who = f"process {about.pid}" if about else "a process that holds daemon.lock"
        raise Unavailable(f"the daemon does not stop: end {who} by hand")
    return True


def _answering(paths: NodePaths) -> DaemonFile | None:
    try:
        with DaemonClient(paths) as client:
            client.health()
            return client.about
    except Unavailable:
        return None


def _spawn(paths: NodePaths, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    paths.create()
    if not lock_is_held(paths):
        # A daemon that was killed left it; from here on it must mean the new one.
        paths.daemon_file.unlink(missing_ok=True)
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-P", "-c", _PROGRAM, root, "serve", *arguments]
    with _first_words(paths).open("wb") as log:
        if sys.platform == "win32":
            flags = subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, creationflags=flags
            )
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _wait_ready(
    paths: NodePaths, process: subprocess.Popen[bytes] | None, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    told = False
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise _ended(paths, process.returncode)
        try:
            with DaemonClient(paths) as client:
                if client.health():
                    return
                if not told:
                    say("Loading the model …")
                told = True
        except Unavailable:
            if process is None:
                return
        time.sleep(_LOOK_EVERY_S)
    raise Unavailable(f"the daemon is not ready after {timeout_s:.0f} s; see `ingle logs`")


def _ended(paths: NodePaths, exit_code: int) -> NodeError:
    error = NodeError(f"the daemon ended at once: {_last_words(paths)}")
    error.exit_code = max(1, exit_code)
    return error


def _wait_gone(paths: NodePaths, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not lock_is_held(paths):
            return True
        time.sleep(_LOOK_EVERY_S)
    return False


def _first_words(paths: NodePaths) -> Path:
    """What the background process prints before its log is open, and its warnings."""
    return paths.state / "serve.out"


def _last_words(paths: NodePaths) -> str:
    lines = _first_words(paths).read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1].removeprefix("ingle: ") if lines else "it said nothing"
