"""Pulling from a hub: a real server on a real socket, with what goes wrong on real networks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from builder_models import GGUFBytes, write_split
from hub_models import FakeHub, fake_hub

from node.errors import BadModelFile, InvalidRequest, NodeError, NoSpace, NotFound, SourceError
from node.models import ModelStore, Progress, parse_source, pull

REPO, FILE = "owner/repo-GGUF", "Tiny-Q4_K_M.gguf"
SPEC = f"hf:{REPO}/{FILE}"
BODY = GGUFBytes(data_bytes=3_000_000).encode()
SHA256 = hashlib.sha256(BODY).hexdigest()
THIRTY_PERCENT = len(BODY) * 3 // 10


def test_a_model_arrives_with_progress_and_the_right_digest(
    store: ModelStore, hub: FakeHub
) -> None:
    hub.put_model(REPO, FILE, BODY)
    told: list[Progress] = []
    model = pull(store, SPEC, told.append)
    assert (model.name, model.sha256, model.source) == ("tiny:q4_k_m", SHA256, "pulled")
    assert model.path.read_bytes() == BODY
    assert told[-1] == Progress(FILE, len(BODY), len(BODY))
    assert [p.done_bytes for p in told] == sorted(p.done_bytes for p in told)
    assert not list(store.partial.glob("*.part"))


def test_a_second_pull_fetches_nothing(store: ModelStore, hub: FakeHub) -> None:
    hub.put_model(REPO, FILE, BODY)
    assert pull(store, SPEC) == pull(store, SPEC)
    assert len(hub.asked("GET")) == 1


def test_a_newer_file_on_the_hub_replaces_the_old(store: ModelStore, hub: FakeHub) -> None:
    hub.put_model(REPO, FILE, BODY)
    pull(store, SPEC)
    newer = GGUFBytes(version=2).encode()
    hub.put_model(REPO, FILE, newer)
    assert pull(store, SPEC).path.read_bytes() == newer


def test_a_cut_at_thirty_percent_is_resumed_at_once(store: ModelStore, hub: FakeHub) -> None:
    hub.put_model(REPO, FILE, BODY, cuts=[THIRTY_PERCENT])
    assert pull(store, SPEC).sha256 == SHA256
    first, second = hub.asked("GET")
    assert "range" not in first.headers
    assert second.headers["range"] == f"bytes={THIRTY_PERCENT}-"


def test_a_network_that_stays_down_is_resumed_by_the_next_pull(
    store: ModelStore, hub: FakeHub
) -> None:
    served = hub.put_model(REPO, FILE, BODY, cuts=[THIRTY_PERCENT] + [0] * 5)
    with pytest.raises(SourceError, match=r"broke off at .* run the same command again"):
        pull(store, SPEC)
    served.cuts.clear()
    hub.seen.clear()
    assert pull(store, SPEC).sha256 == SHA256
    assert [s.headers["range"] for s in hub.asked("GET")] == [f"bytes={THIRTY_PERCENT}-"]


def test_a_server_that_cannot_resume_sends_it_all_again(store: ModelStore, hub: FakeHub) -> None:
    hub.put_model(REPO, FILE, BODY, cuts=[THIRTY_PERCENT], ignore_range=True)
    assert pull(store, SPEC).sha256 == SHA256


def test_a_file_without_known_digest_is_resumed_too(store: ModelStore, hub: FakeHub) -> None:
    hub.put_model(REPO, FILE, BODY, sha256=None, cuts=[THIRTY_PERCENT])
    assert pull(store, SPEC).sha256 == SHA256


def test_wrong_bytes_are_discarded_and_the_old_model_stays(store: ModelStore, hub: FakeHub) -> None:
    hub.put_model(REPO, FILE, BODY)
    pull(store, SPEC)
    hub.put_model(REPO, FILE, BODY[:-1] + b"!", sha256="1" * 64)
    with pytest.raises(SourceError, match="discarded"):
        pull(store, SPEC)
    assert store.find("tiny:q4_k_m").path.read_bytes() == BODY
    assert not list(store.partial.glob("*.part")) and not list(store.partial.glob("*.files"))


def test_a_hostile_model_is_discarded_and_the_old_one_stays(
    store: ModelStore, hub: FakeHub
) -> None:
    hub.put_model(REPO, FILE, BODY)
    pull(store, SPEC)
    hub.put_model(REPO, FILE, GGUFBytes(n_tensors=2**63).encode())
    with pytest.raises(BadModelFile, match="more than can be"):
        pull(store, SPEC)
    assert store.find("tiny:q4_k_m").path.read_bytes() == BODY


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    store: ModelStore, hub: FakeHub
) -> None:
    hub.put_model(REPO, FILE, BODY, size=10**18)
    with pytest.raises(NoSpace, match="make room"):
        pull(store, SPEC)
    assert hub.asked("GET") == []


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{other}/stolen",
        "http://localhost:{other}/stolen",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]:{other}/",
        "http://[::ffff:127.0.0.1]:{other}/",
        "http://[64:ff9b::7f00:1]/",
        "http://0.0.0.0:{other}/",
        "http://10.0.0.1/",
        "http://192.168.1.1/",
        "http://2130706433:{other}/",
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "http://[::1",
        "http://127.0.0.1:99999/",
        "//127.0.0.1:{other}/",
    ],
)
def test_a_redirect_into_this_machine_or_network_is_refused(
    store: ModelStore, hub: FakeHub, target: str
) -> None:
    with fake_hub() as other:
        other.put("/stolen", BODY)
        where = target.replace("{other}", other.url.rpartition(":")[2])
        hub.put_model(REPO, FILE, BODY, redirect=where)
        with pytest.raises(SourceError, match="refused|redirects to|address|location header"):
            pull(store, SPEC)
        assert other.seen == []


def test_a_redirect_inside_the_hub_is_followed(store: ModelStore, hub: FakeHub) -> None:
    hub.put_model(REPO, FILE, BODY, redirect="/storage/1")
    hub.put("/storage/1", BODY)
    assert pull(store, SPEC).sha256 == SHA256


def test_a_circle_of_redirects_ends(store: ModelStore, hub: FakeHub) -> None:
    hub.put_model(REPO, FILE, BODY, redirect=f"/{REPO}/resolve/main/{FILE}")
    with pytest.raises(SourceError, match="circle"):
        pull(store, SPEC)


def test_a_token_reaches_the_hub_and_nobody_else(
    store: ModelStore, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from node.models import address

    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    with fake_hub() as storage:
        storage.put("/blob", BODY)
        hub.put_model(REPO, FILE, BODY, redirect=f"{storage.url}/blob")
        # Both servers are on this machine, which the rules would refuse.
        monkeypatch.setattr(address, "_NEVER", ())
        pull(store, SPEC)
    assert all(seen.headers["authorization"] == "Bearer hf_canary" for seen in hub.seen)
    assert storage.seen and not any("canary" in str(seen) for seen in storage.seen)


def test_compressed_answers_are_never_inflated(store: ModelStore, hub: FakeHub) -> None:
    hub.put_model(REPO, FILE, bytes(50_000_000), gzipped=True)
    with pytest.raises(SourceError, match="gzip data that was not asked for"):
        pull(store, SPEC)
    assert all(seen.headers["accept-encoding"] == "identity" for seen in hub.seen)


def test_more_bytes_than_announced_are_not_read(store: ModelStore, hub: FakeHub) -> None:
    hub.put_model(REPO, FILE, BODY, size=1000)
    with pytest.raises(NodeError):
        pull(store, SPEC)
    assert sum(f.stat().st_size for f in store.partial.rglob("*") if f.is_file()) <= 1000


@pytest.mark.parametrize(
    ("status", "code", "token", "error", "message"),
    [
        (401, "GatedRepo", "", SourceError, "accept its terms at .*set HF_TOKEN"),
        (403, "GatedRepo", "hf_x", SourceError, "accept its terms"),
        (401, "RepoNotFound", "", NotFound, "does not exist .* or is private"),
        (401, "", "hf_x", SourceError, "refused HF_TOKEN"),
        (404, "RepoNotFound", "", NotFound, "check the name"),
        (404, "EntryNotFound", "", NotFound, "has no file Tiny"),
        (404, "RevisionNotFound", "", NotFound, "has no revision"),
        (418, "", "", SourceError, "status 418"),
        (503, "", "", SourceError, "answered 503"),
    ],
)
def test_a_refusal_says_what_to_do(
    store: ModelStore,
    hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    token: str,
    error: type[NodeError],
    message: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.put_model(REPO, FILE, BODY, status=status, error_code=code)
    with pytest.raises(error, match=message):
        pull(store, SPEC)


def test_a_hub_that_cannot_be_reached_is_told(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, no_waiting: None
) -> None:
    with fake_hub() as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.url)
    with pytest.raises(SourceError, match="cannot be reached"):
        pull(store, SPEC)


def test_a_split_model_arrives_with_all_its_parts(
    store: ModelStore, hub: FakeHub, tmp_path: Path
) -> None:
    first = write_split(tmp_path)
    for part in sorted(tmp_path.glob("m-*.gguf")):
        hub.put_model(REPO, part.name, part.read_bytes())
    model = pull(store, f"hf:{REPO}/{first.name}=split:two")
    assert [file.name for file in model.files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert pull(store, f"hf:{REPO}/{first.name}=split:two") == model
    assert len(hub.asked("GET")) == 2


@pytest.mark.parametrize(
    "spec",
    [
        "hf:owner/../../etc/x.gguf",
        "hf:owner/repo/../x.gguf",
        "hf:../repo/x.gguf",
        "hf:owner/repo/x.bin",
        "hf:owner/repo",
        "hf:http://127.0.0.1/x.gguf",
        "hf:o/r/x.gguf@../main",
        "hf:o/r/x.gguf?download=true",
        "hf:o/r/x.gguf=../name",
        "pypi:dist",
        "pypi:dist==1/../x.gguf",
        "pypi:../dist==1",
        "pypi:dist==1 --index-url=http://evil",
    ],
)
def test_a_source_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_source(spec)


def test_an_unknown_name_is_answered_with_the_catalogue() -> None:
    with pytest.raises(NotFound, match=r"smollm2:135m.*hf:OWNER/REPO/FILE.gguf"):
        parse_source("smolm2")
