"""The real small model, and a real daemon that serves it, for all tests that need them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import platformdirs
import pytest

# libgomp reads these when it loads; spinning threads would measure the scheduler instead of us.
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["GOMP_SPINCOUNT"] = "200"

from node.errors import NotFound
from node.models import ModelStore, pull
from node.paths import node_paths

MODEL = "smollm2:135m"


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model, pulled once into the user's cache folder."""
    home = os.environ.get("INGLE_TEST_CACHE") or platformdirs.user_cache_dir("inglenook-tests")
    paths = node_paths(home)
    paths.create()
    store = ModelStore(paths, discover=False)
    try:
        return store.find(MODEL).path
    except NotFound:
        return pull(store, MODEL).path


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running `ingle serve` with the small model installed in its home."""

    home: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_headers(self) -> dict[str, str]:
        token = node_paths(self.home).admin_token_file.read_text().strip()
        return {"Authorization": f"Bearer {token}"}

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, headers=self.admin_headers)

    def worker_pid(self) -> int:
        with self.client() as client:
            return int(client.get("/ingle/v1/status").json()["models"][0]["pid"])


StartDaemon = Callable[..., Daemon]


@pytest.fixture(scope="session")
def start_daemon(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartDaemon]:
    """Starts daemons in homes of their own: `start_daemon("engine.n_ctx=1024", …)`."""
    running: list[Daemon] = []

    def start(*settings: str) -> Daemon:
        daemon = _start(tmp_path_factory.mktemp("home"), model_path, settings)
        running.append(daemon)
        return daemon

    yield start
    for daemon in running:
        daemon.process.terminate()
    for daemon in running:
        daemon.process.wait(30)


@pytest.fixture(scope="session")
def daemon(start_daemon: StartDaemon) -> Daemon:
    """One daemon for all tests that leave it as they found it."""
    return start_daemon()


def _start(home: Path, model_path: Path, settings: tuple[str, ...]) -> Daemon:
    paths = node_paths(home)
    paths.create()
    pull(ModelStore(paths, discover=False), f"file:{model_path}={MODEL}")
    options = [f"--set={s}" for s in ("engine.n_ctx=4096", "models.discover=false", *settings)]
    with open(home / "serve.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "serve", "--home", str(home), "--port", "0"]
            + [f"--model={MODEL}", *options],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if paths.daemon_file.exists():
            port = json.loads(paths.daemon_file.read_text())["port"]
            if _healthy(port):
                return Daemon(home, port, process)
        time.sleep(0.1)
    process.kill()
    process.wait()
    raise AssertionError((home / "serve.log").read_text())


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False
