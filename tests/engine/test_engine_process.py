"""Worker processes that misbehave on their pipes."""

from __future__ import annotations

import asyncio
import io
import queue
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from node.engine import frames
from node.engine.core import EngineCore
from node.engine.messages import Detokenize
from node.engine.process import WorkerProcess
from node.engine.worker import Pipe, _read_commands


async def start(code: str) -> WorkerProcess:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=pipe, stdout=pipe, stderr=pipe, limit=1000
    )
    return WorkerProcess(process)


def test_a_line_beyond_the_limit_does_not_end_the_log() -> None:
    async def main() -> None:
        worker = await start("import sys; sys.stderr.write('x' * 300_000 + '\\nbye\\n')")
        await worker._read_stderr()
        assert worker.last_words.endswith("bye")
        await worker.stop()

    asyncio.run(main())


def test_a_worker_that_talks_nonsense_is_ended() -> None:
    async def main() -> None:
        worker = await start(
            "import sys; sys.stdout.buffer.write(b'\\1\\0\\0\\0\\xc1'); sys.stdout.flush();"
            "sys.stdin.read()"
        )
        codes: list[int] = []
        await asyncio.wait_for(worker._read_reports(lambda _: None, codes.append), 30)
        assert len(codes) == 1 and codes[0] != 0
        await worker.stop()

    asyncio.run(main())


@pytest.mark.model
def test_a_worker_that_cannot_answer_stops(core: EngineCore, tmp_path: Path) -> None:
    actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    (tmp_path / "closed").touch()
    with open(tmp_path / "closed", "rb") as not_writable:
        commands = io.BytesIO(frames.encode(Detokenize(1, (5,))))
        with pytest.raises(OSError):
            _read_commands(commands, core, Pipe(not_writable), actions)
    assert actions.get_nowait() is None
