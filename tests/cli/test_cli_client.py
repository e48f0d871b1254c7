"""The client of the daemon's API: addresses, event streams, errors as errors of the node."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from cli.client import DaemonClient, DaemonFile, _error, _events, read_daemon_file
from node.errors import EngineError, NodeError, NotFound, Overloaded, Unavailable
from node.paths import node_paths


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("fd00::2", "http://[fd00::2]:1"),
        ("desk.lan", "http://desk.lan:1"),
    ],
)
def test_the_address_is_one_that_can_be_connected_to(host: str, url: str) -> None:
    assert DaemonFile(7, host, 1).url == url


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid":1,"host":"h","port":"x"}'])
def test_a_damaged_daemon_file_is_no_daemon(tmp_path: Path, text: str) -> None:
    file = tmp_path / "daemon.json"
    assert read_daemon_file(file) is None
    file.write_text(text)
    assert read_daemon_file(file) is None


def test_without_a_daemon_there_is_no_client(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="ingle up"):
        DaemonClient(node_paths(tmp_path))


def test_events_are_the_data_lines_up_to_done() -> None:
    lines = [": keep-alive", "", 'data: {"a": 1}', "", 'data:{"a": 2}', "data: [DONE]", "data: x"]
    assert list(_events(iter(lines))) == [{"a": 1}, {"a": 2}]


def test_an_error_in_the_stream_is_raised_after_what_came_before() -> None:
    events = _events(iter(['data: {"a": 1}', 'data: {"error": {"message": "worker died"}}']))
    assert next(events) == {"a": 1}
    with pytest.raises(EngineError, match="worker died"):
        next(events)


def test_a_stream_without_an_end_is_an_error() -> None:
    with pytest.raises(Unavailable, match="broke off"):
        list(_events(iter(['data: {"a": 1}'])))


BODY = '{"error": {"message": "why", "code": "c", "param": "p"}}'


@pytest.mark.parametrize(
    ("status", "headers", "text", "kind"),
    [
        (404, {}, BODY, NotFound),
        (429, {"retry-after": "7"}, BODY, Overloaded),
        (500, {}, BODY, EngineError),
        (500, {}, "<html>", NodeError),
    ],
)
def test_a_status_becomes_the_error_with_its_exit_code(
    status: int, headers: dict[str, str], text: str, kind: type[NodeError]
) -> None:
    error = _error(httpx.Response(status, headers=headers, text=text))
    assert type(error) is kind
    if kind is not NodeError:
        assert error.message == "why"
    if isinstance(error, Overloaded):
        assert error.retry_after_s == 7
