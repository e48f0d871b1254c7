"""Servers shared by the API tests; see `server_api` and `fakes_api`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_api import Node, run_node

from node.config import ApiConfig


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """No key; short keep-alive, small limits. Shared: leave it as you found it."""
    api = ApiConfig(
        keepalive_s=0.1,
        queue_limit=8,
        max_body_bytes=100_000,
        tokenizer_input_bytes=50_000,
        allowed_hosts=("den.home",),
        allowed_origins=("https://app.example",),
    )
    with run_node(api) as running:
        yield running


@pytest.fixture(scope="session")
def keyed_node() -> Iterator[Node]:
    """A node whose API asks for the key `sesame`."""
    with run_node(ApiConfig(key="sesame")) as running:
        yield running
