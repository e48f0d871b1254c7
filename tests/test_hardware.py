"""What the machine says of itself, on the machine the tests run on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from node.hardware import (
    OthersLoad,
    detect_hardware,
    pid_alive,
    port_owner,
    process_rss_bytes,
)


def test_this_machine_has_cores_and_memory() -> None:
    hardware = detect_hardware()
    assert 1 <= hardware.cpu_cores <= hardware.cpu_threads
    assert 0 < hardware.ram_free_bytes <= hardware.ram_total_bytes
    assert all(0 <= gpu.free_bytes <= gpu.total_bytes for gpu in hardware.gpus)


def test_this_process_has_memory_and_a_finished_one_has_none() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert (process_rss_bytes(os.getpid()) or 0) > 2**20
    assert process_rss_bytes(child.pid) is None
    assert pid_alive(os.getpid()) and not pid_alive(child.pid) and not pid_alive(-1)


def test_a_taken_port_names_the_process_that_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        owner = port_owner(server.getsockname()[1])
    if owner is None:
        pytest.skip("this system does not show who listens")
    assert owner == f"{psutil.Process().name()} (pid {os.getpid()})"


def test_a_free_port_has_no_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert port_owner(port) is None


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_own_work_is_not_counted_as_load_of_others() -> None:
    load = OthersLoad()
    assert load.busy_cores((os.getpid(),)) == 0.0
    others = OthersLoad()
    others.busy_cores(())
    _spin(0.5)
    mine, all_of_it = load.busy_cores((os.getpid(),)), others.busy_cores(())
    assert all_of_it - mine > 0.5


def test_a_new_pid_does_not_spoil_the_figure() -> None:
    load = OthersLoad()
    load.busy_cores(())
    time.sleep(0.25)
    assert load.busy_cores((os.getpid(),)) == 0.0
    assert load.busy_cores((os.getpid(),)) == 0.0  # too soon: repeats the last value
    time.sleep(0.25)
    assert 0.0 <= load.busy_cores((os.getpid(),)) <= (os.cpu_count() or 1) + 0.5
