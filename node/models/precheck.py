"""Checks a GGUF in a child process before llama.cpp sees it.

The child has a memory and a time limit, so that a header
made to exhaust either costs an error message and nothing else. Answers are kept as long as the
files do not change.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from node.errors import BadModelFile, NotFound
from node.models.gguf import read_header
from node.models.header import GGUFHeader

__all__ = ["check_gguf", "limit_this_process"]

_MEMORY_BYTES = 2**30
_CPU_S = 20
_WALL_S = 60.0
_REFUSED = 3
_CHILD = "import sys; from node.models.precheck import main; sys.exit(main(sys.argv[1:]))"

_FileState = tuple[tuple[str, int, int], ...]
# Replaced entries are equal, so threads may race here without harm.
_checked: dict[str, tuple[_FileState, GGUFHeader]] = {}


def check_gguf(path: Path) -> GGUFHeader:
    """The header of a model file, with all parts of a split one.

    Raises:
        BadModelFile: the file is not a GGUF that llama.cpp may be shown.
        NotFound: no such file.
    """
    path = Path(path).absolute()
    if not path.is_file():
        raise NotFound(f"model file {path.name} is gone; pull the model again")
    known = _checked.get(str(path))
    if known is not None and known[0] == _state(known[1].files):
        return known[1]
    header = _ask_child(path)
    _checked[str(path)] = (_state(header.files), header)
    return header


def main(arguments: list[str]) -> int:
    """The child. Writes the header, or the reason why there is none, as msgpack."""
    limit_this_process()
    try:
        answer = msgspec.msgpack.encode(read_header(Path(arguments[0])))
        code = 0
    except BadModelFile as error:
        answer, code = error.message.encode(errors="replace"), _REFUSED
    except MemoryError:
        answer, code = b"the header needs more memory than any real one", _REFUSED
    sys.stdout.buffer.write(answer)
    return code


def _ask_child(path: Path) -> GGUFHeader:
    # Not `-m`: the package has imported this module by then, and Python warns of that.
    command = [sys.executable, "-c", _CHILD, str(path)]
    # The child must find this very package, wherever the parent was started.
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": _joined(root, os.environ.get("PYTHONPATH"))}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BadModelFile(f"{path.name}: reading the header takes too long") from error
    if done.returncode == _REFUSED:
        raise BadModelFile(f"{path.name}: {done.stdout.decode(errors='replace')}")
    if done.returncode != 0:
        raise BadModelFile(
            f"{path.name}: the header check ended with code {done.returncode};"
            " the file is damaged or made to do harm"
        )
    return msgspec.msgpack.decode(done.stdout, type=GGUFHeader)


def limit_this_process() -> None:
    """Cap memory and CPU time, as far as the platform has such caps."""
    try:
        import resource
    except ImportError:  # Windows has no such limits; the parent's clock still holds
        return
    for kind, value in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_CORE, 0),
    ):
        try:
            hard = resource.getrlimit(kind)[1]
            top = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (top, hard))
        except (ValueError, OSError):  # macOS refuses RLIMIT_AS below what is mapped already
            continue


def _state(files: Iterable[str]) -> _FileState:
    state = []
    for file in files:
        try:
            stat = os.stat(file)
        except OSError:
            return ()
        state.append((file, stat.st_size, stat.st_mtime_ns))
    return tuple(state)


def _joined(*parts: str | None) -> str:
    return os.pathsep.join(part for part in parts if part)
