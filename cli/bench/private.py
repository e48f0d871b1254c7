"""A daemon of the benchmark's own, in a temporary home, that can be killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from node.models import InstalledModel, ModelStore, pull
from node.paths import node_paths

__all__ = ["PrivateNode"]

_START_S = 120.0


class PrivateNode:
    """A context manager. Not started until `start`; settings may differ from start to start."""

    def __init__(self, model: InstalledModel) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="ingle-bench-", ignore_cleanup_errors=True
        )
        self.home = Path(self._folder.name)
        self.paths = node_paths(self.home)
        self.paths.create()
        self.model = model.name
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        pull(ModelStore(self.paths, discover=False), f"file:{model.path}={model.name}")

    def __enter__(self) -> PrivateNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, settings: Mapping[str, Any]) -> float:
        """Returns: seconds until it could answer. Raises: RuntimeError with its last words."""
        options = {"models.discover": "false", **settings}
        command = [sys.executable, "-m", "cli.main", "serve", "--home", str(self.home)]
        command += ["--port", "0", "--model", self.model]
        command += [f"--set={k}={v}" for k, v in options.items()]
        self.paths.daemon_file.unlink(missing_ok=True)
        output = self.home / "serve.out"
        started_s = time.monotonic()
        with open(output, "wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while time.monotonic() < started_s + _START_S and self._process.poll() is None:
            if self._is_ready():
                return time.monotonic() - started_s
            time.sleep(0.05)
        last_words = output.read_text(errors="replace")[-500:]
        raise RuntimeError(f"the benchmark's daemon did not start: {last_words}")

    def kill(self) -> None:
        """Daemon and worker at once, as a power cut would."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    def admin(self, method: str, path: str) -> dict[str, Any]:
        token = self.paths.admin_token_file.read_text().strip()
        response = httpx.request(
            method,
            f"{self.url}/ingle/v1/{path}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=60,
            trust_env=False,
        )
        answer: dict[str, Any] = response.raise_for_status().json()
        return answer

    def kv_bytes(self) -> int:
        """Bytes of all files of the SSD tier."""
        return sum(p.stat().st_size for p in self.paths.kv.rglob("*") if p.is_file())

    def _is_ready(self) -> bool:
        try:
            self.port = int(json.loads(self.paths.daemon_file.read_text())["port"])
            health = httpx.get(f"{self.url}/health", timeout=5, trust_env=False)
            return health.status_code == 200
        except (OSError, ValueError, KeyError, httpx.TransportError):
            return False
