"""Who may call what: Host, Origin, paths, keys, bodies. Each attack goes over a raw socket."""

from __future__ import annotations

import json

import pytest
from fastapi.routing import APIRoute
from server_api import ADMIN_TOKEN, Node, run_node

from node.api import check_bind, create_app
from node.api.security import OPEN_PATHS
from node.config import ApiConfig, NodeConfig
from node.errors import ConfigError


def routes(node: Node) -> list[tuple[str, str]]:
    """Every method and path of the application, plus some that nobody serves."""
    table = [route for route in node.app.routes if isinstance(route, APIRoute)]
    found = [(m, r.path.replace("{name:path}", "tiny:1b")) for r in table for m in r.methods or ()]
    assert ("POST", "/v1/chat/completions") in found and ("GET", "/ingle/v1/status") in found
    return [*found, ("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json"), ("PUT", "/health")]


def status(node: Node, method: str, path: str, *headers: str, body: bytes = b"") -> int:
    lines = [f"{method} {path} HTTP/1.1", *headers, f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, "Connection: close", "", ""])
    answer = node.raw(head.encode("latin-1") + body)
    return int(answer.split(b" ", 2)[1])


def test_a_foreign_host_is_refused_on_every_route(node: Node) -> None:
    for method, path in routes(node):
        assert status(node, method, path, "Host: evil.example") == 403, path


@pytest.mark.parametrize("trick", ["/", "?", "#", "@", "\\", " ", "/v1/models?", "@127.0.0.1", ","])
def test_characters_of_a_url_inside_the_host_are_refused_on_every_route(
    node: Node, trick: str
) -> None:
    for method, path in routes(node):
        assert status(node, method, path, f"Host: 127.0.0.1{trick}x") in (400, 403), path


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:4663",
        "127.0.0.1",
        "127.8.9.1:1",
        "[::1]:80",
        "den.home",
        "den.home:1",
    ],
)
def test_loopback_and_listed_hosts_are_served(node: Node, host: str) -> None:
    assert status(node, "GET", "/health", f"Host: {host}") == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1:80:80",
        "evil.example:127.0.0.1",
        "localhost.",
        "[::1",
        "[::1].evil.example",
        "0.0.0.0",
        "2130706433",
        "169.254.169.254",
        "user@localhost",
        "localhost:x",
        "den.home.evil",
    ],
)
def test_other_hosts_are_refused(node: Node, host: str) -> None:
    assert status(node, "GET", "/health", f"Host: {host}") in (400, 403)


def test_no_host_and_two_hosts_are_refused(node: Node) -> None:
    assert status(node, "GET", "/health") == 400
    assert status(node, "GET", "/health", "Host: localhost", "Host: localhost") == 400


def test_a_foreign_origin_is_refused_on_every_route(node: Node) -> None:
    origins = ["http://evil.example", "null", "http://localhost:3000", "https://app.example.evil"]
    for origin in origins:
        for method, path in routes(node):
            assert status(node, method, path, "Host: localhost", f"Origin: {origin}") == 403, path


def test_our_own_and_listed_origins_are_served(node: Node) -> None:
    own = f"localhost:{node.port}"
    assert status(node, "GET", "/health", f"Host: {own}", f"Origin: http://{own}") == 200
    assert status(node, "GET", "/health", "Host: localhost", "Origin: https://app.example") == 200


def test_a_listed_origin_gets_its_preflight_and_no_wildcard(node: Node) -> None:
    headers = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
    }
    response = node.client.options("/v1/chat/completions", headers=headers)
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert response.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert "access-control-allow-credentials" not in response.headers


def test_a_foreign_preflight_gets_no_allow_header(node: Node) -> None:
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    response = node.client.options("/v1/chat/completions", headers=headers)
    assert response.status_code == 403
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_with_a_key_only_health_is_open(keyed_node: Node) -> None:
    for method, path in routes(keyed_node):
        given = status(keyed_node, method, path, "Host: localhost")
        assert path in OPEN_PATHS or given == 401, (method, path)
        preflight = "Access-Control-Request-Method: POST"
        assert status(keyed_node, "OPTIONS", path, "Host: localhost", preflight) in (401, 405)


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", "Bearer sesam", "Bearer sesame2", "Basic sesame", "sesame"]
)
def test_a_wrong_key_is_refused(keyed_node: Node, given: str) -> None:
    headers = ("Host: localhost", f"Authorization: {given}")
    assert status(keyed_node, "GET", "/v1/models", *headers) == 401


def test_the_right_key_is_let_in(keyed_node: Node) -> None:
    headers = {"authorization": "Bearer sesame"}
    assert keyed_node.client.get("/v1/models", headers=headers).status_code == 200


def test_admin_routes_take_only_the_runtime_token(node: Node, keyed_node: Node) -> None:
    for one in (node, keyed_node):
        for method, path in routes(one):
            if path.startswith("/ingle/"):
                key = "Authorization: Bearer sesame"
                assert status(one, method, path, "Host: localhost", key) == 401
    token = f"Authorization: Bearer {ADMIN_TOKEN}"
    assert status(node, "GET", "/ingle/v1/status", "Host: localhost", token) == 200
    assert status(keyed_node, "GET", "/v1/models", "Host: localhost", token) == 401


@pytest.mark.parametrize(
    "path",
    [
        "//ingle/v1/status",
        "/health/../ingle/v1/status",
        "/health/%2e%2e/ingle/v1/status",
        "/health%2f..%2fmetrics",
        "/health%3f",
        "/health%23x",
        "/health%00",
        "/v1\\models",
        "/./metrics",
    ],
)
def test_odd_forms_of_a_path_reach_nothing(keyed_node: Node, path: str) -> None:
    assert status(keyed_node, "GET", path, "Host: localhost") in (400, 401, 404)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_what_a_form_can_send_is_not_read(node: Node, content_type: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = ("Host: localhost", f"Content-Type: {content_type}")
    assert status(node, "POST", "/v1/chat/completions", *headers, body=body) == 415


def test_compressed_bodies_are_refused(node: Node) -> None:
    headers = ("Host: localhost", "Content-Type: application/json", "Content-Encoding: gzip")
    assert status(node, "POST", "/v1/chat/completions", *headers, body=b"x") == 415


def test_a_body_over_the_limit_is_refused_by_its_announcement(node: Node) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = node.raw(head + b"Connection: close\r\nContent-Length: 100001\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413") and b"body_too_large" in answer


def test_a_body_over_the_limit_is_refused_while_it_arrives(node: Node) -> None:
    chunks = (b'{"content":"' + b"x" * 60_000, b"x" * 60_000 + b'"}')
    headers = {"content-type": "application/json"}
    response = node.client.post("/tokenize", content=iter(chunks), headers=headers)
    assert response.status_code == 413


def test_binding_beyond_loopback_needs_a_key() -> None:
    for host in ("0.0.0.0", "192.168.1.5", "::", "nas.home"):
        with pytest.raises(ConfigError, match=r"api\.key"):
            check_bind(ApiConfig(host=host))
        check_bind(ApiConfig(host=host, key="k"))
    for host in ("127.0.0.1", "localhost", "::1"):
        check_bind(ApiConfig(host=host))


def test_no_application_is_made_for_an_exposed_node(node: Node) -> None:
    config = NodeConfig(api=ApiConfig(host="0.0.0.0"))
    with pytest.raises(ConfigError):
        create_app(node.pool, config, settings=(), admin_token="t", shutdown=lambda: None)


def test_request_ids_are_kept_only_when_they_are_plain(node: Node) -> None:
    given = {"x-request-id": "abc-1.2_3"}
    assert node.client.get("/health", headers=given).headers["x-request-id"] == "abc-1.2_3"
    odd = {"x-request-id": "a b;drop"}
    assert node.client.get("/health", headers=odd).headers["x-request-id"] != "a b;drop"


def test_every_key_has_a_tenant_of_its_own() -> None:
    with run_node(ApiConfig(key="sesame", keys=("alpha", "beta"))) as running:
        tenants = []
        for key in ("sesame", "alpha", "beta", "alpha"):
            running.client.headers["authorization"] = f"Bearer {key}"
            assert running.chat("SAY a").status_code == 200
            tenants.append(running.pool.engine.requests[-1].tenant)
        assert len(set(tenants)) == 3 and tenants[1] == tenants[3]
        assert not any(key in tenant for key in ("sesame", "alpha") for tenant in tenants)
        running.client.headers["authorization"] = "Bearer gamma"
        assert running.chat("SAY a").status_code == 401


def test_without_keys_there_is_one_tenant_whatever_a_client_sends(node: Node) -> None:
    headers = {"authorization": "Bearer anything"}
    node.client.post(
        "/v1/chat/completions",
        json={"model": "tiny:1b", "messages": [{"role": "user", "content": "SAY a"}]},
        headers=headers,
    )
    assert node.pool.engine.requests[-1].tenant == ""
