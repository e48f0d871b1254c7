"""A store of its own for each test, and downloads that do not wait between tries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_models import FakeHub, fake_hub

from node.models import ModelStore, download
from node.paths import NodePaths, node_paths


@pytest.fixture
def paths(tmp_path: Path) -> NodePaths:
    paths = node_paths(tmp_path / "home")
    paths.create()
    return paths


@pytest.fixture
def store(paths: NodePaths) -> ModelStore:
    return ModelStore(paths, discover=False)


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(download, "_MAX_WAIT_S", 0.001)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_waiting: None) -> Iterator[FakeHub]:
    """A hub and package index that the environment points to; no token, no proxy."""
    with fake_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("PIP_INDEX_URL", f"{served.url}/simple")
        for name in (
            *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "PIP_EXTRA_INDEX_URL"),
            *("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"),
        ):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
        yield served
