"""The daemon's process: its files, its socket, its signals, a second one beside it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from node.config import load_config
from node.daemon import run
from node.errors import ConfigError, Conflict
from node.paths import NodePaths, node_paths

SERVE = """
import sys
from node.config import load_config
from node.daemon import run
from node.paths import node_paths
flags = {"api.port": "0", "models.discover": "false"}
sys.exit(run(load_config(flags=flags, environment={}), node_paths(sys.argv[1]), None))
"""


@contextmanager
def serving(home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A daemon process without models, and its URL."""
    command = [sys.executable, "-c", SERVE, str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[-1].removesuffix("/v1")
        finally:
            if process.poll() is None:
                process.kill()


def try_to_run(paths: NodePaths, port: int) -> None:
    flags = {"api.port": str(port), "models.discover": "false"}
    run(load_config(flags=flags, environment={}), paths, None)


def test_a_daemon_leaves_private_files_and_stops_when_told(tmp_path: Path) -> None:
    paths = node_paths(tmp_path)
    with serving(tmp_path) as (process, url):
        about = json.loads(paths.daemon_file.read_text())
        assert about["pid"] == process.pid and url.endswith(f":{about['port']}")
        for file in (paths.daemon_file, paths.admin_token_file, paths.log_file):
            assert os.name == "nt" or stat.S_IMODE(file.stat().st_mode) == 0o600
        assert httpx.get(url + "/health").json() == {"status": "ok"}
        headers = {"authorization": f"Bearer {paths.admin_token_file.read_text()}"}
        assert httpx.get(url + "/ingle/v1/status", headers=headers).json()["models"] == []
        assert httpx.post(url + "/ingle/v1/shutdown", headers=headers).status_code == 200
        assert process.wait(10) == 0
    assert not paths.daemon_file.exists() and not paths.admin_token_file.exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot send these signals to one process")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_stops_it_in_order(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with serving(tmp_path) as (process, _):
        process.send_signal(number)
        assert process.wait(10) == code
    assert not node_paths(tmp_path).daemon_file.exists()


def test_a_second_daemon_for_the_same_home_names_the_first(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, url):
        with pytest.raises(Conflict, match=f"process {process.pid}"):
            try_to_run(node_paths(tmp_path), 0)
        assert httpx.get(url + "/health").status_code == 200


def test_a_killed_daemon_does_not_keep_its_home(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, _):
        process.kill()
        process.wait(10)
        assert node_paths(tmp_path).daemon_file.exists()
    with serving(tmp_path) as (_, url):
        assert httpx.get(url + "/health").status_code == 200


def test_a_taken_port_names_its_holder(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(Conflict, match=rf"port {holder.getsockname()[1]} is taken by .*python"):
            try_to_run(node_paths(tmp_path), holder.getsockname()[1])


def test_an_exposed_node_without_key_does_not_start(tmp_path: Path) -> None:
    loaded = load_config(flags={"api.host": "0.0.0.0"}, environment={})
    with pytest.raises(ConfigError, match="api.key"):
        run(loaded, node_paths(tmp_path), None)
    assert not list(tmp_path.iterdir())


def test_the_daemon_imports_neither_llama_cpp_nor_torch() -> None:
    code = "import node.daemon, node.pool, sys; print({'llama_cpp', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
