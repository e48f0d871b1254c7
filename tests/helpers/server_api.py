"""A real server on a free port over the fakes of `fakes_api`, and a client for it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from fakes_api import FakePool
from fastapi import FastAPI

from node.api import NodeServer, create_app
from node.config import ApiConfig, NodeConfig, load_config

ADMIN_TOKEN = "admin-token-of-the-test"


@dataclass
class Node:
    """A running server and what the test may look at."""

    url: str
    port: int
    pool: FakePool
    app: FastAPI
    client: httpx.Client
    shutdowns: list[bool] = field(default_factory=list)

    def chat(self, text: str, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        body = {"model": "tiny:1b", "messages": messages, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def admin(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        return self.client.request(method, f"/ingle/v1/{path}", headers=headers, **more)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the server's side of something; fails after five seconds."""
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline, "the server never got there"
            time.sleep(0.002)

    def raw(self, request: bytes, timeout_s: float = 5) -> bytes:
        """The whole response to bytes on a socket of our own."""
        with socket.create_connection(("127.0.0.1", self.port), timeout_s) as connection:
            connection.sendall(request)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)


@contextmanager
def run_node(api: ApiConfig) -> Iterator[Node]:
    pool, ready = FakePool(), threading.Event()
    stops: list[bool] = []
    app = create_app(
        pool,
        NodeConfig(api=api),
        settings=load_config(flags={"api.key": "k" * 20}, environment={}).settings,
        admin_token=ADMIN_TOKEN,
        shutdown=lambda: stops.append(True),
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = NodeServer(app, on_started=ready.set, on_deadline=pool.close, grace_s=0.2)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=5, trust_env=False) as client:
        node = Node(url, port, pool, app, client, stops)
        assert ready.wait(5)
        yield node
        server.should_exit = True
        thread.join(5)
    listener.close()
