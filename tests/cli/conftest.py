from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Ingle = Callable[..., subprocess.CompletedProcess[str]]


def call(
    home: Path, *arguments: str, text: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("INGLE_")}
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **clean,
            "INGLE_HOME": str(home),
            "INGLE_MODELS_DISCOVER": "false",
            "COLUMNS": "100",
            **environment,
        },
        timeout=120,
    )


@pytest.fixture
def ingle(tmp_path: Path) -> Ingle:
    """Runs `ingle` in a home of its own, with nothing from the user's configuration."""
    return lambda *arguments, **more: call(tmp_path / "home", *arguments, **more)


@pytest.fixture
def daemon_ingle(daemon: object) -> Ingle:
    """Runs `ingle` in the home of the running daemon."""
    home: Path = daemon.home  # type: ignore[attr-defined]
    return lambda *arguments, **more: call(home, *arguments, **more)
