"""Taking a model out of a wheel that a package index serves."""

from __future__ import annotations

import hashlib
import io
import zipfile
from base64 import b64encode

import pytest
from builder_models import GGUFBytes
from hub_models import FakeHub, fake_hub

from node.errors import NotFound, SourceError
from node.models import ModelStore, load_catalogue, pull

GGUF = GGUFBytes(data_bytes=20_000).encode()
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def wheel(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    return buffer.getvalue()


def test_the_gguf_of_a_wheel_is_installed_and_the_wheel_is_gone(
    store: ModelStore, hub: FakeHub
) -> None:
    body = wheel(**{"tiny/Tiny.gguf": _noise(), "tiny/__init__.py": b"raise SystemExit"})
    hub.put_wheel(WHEEL, body, "tiny-model")
    model = pull(store, "pypi:Tiny_Model==1.0=tiny:f32")
    assert (model.name, model.path.name, model.origin) == (
        "tiny:f32", "Tiny.gguf", "pypi:Tiny_Model==1.0",
    )  # fmt: skip
    assert model.sha256 == hashlib.sha256(_noise()).hexdigest()
    assert not list(store.partial.glob("*.part"))


def test_a_cut_wheel_is_resumed(store: ModelStore, hub: FakeHub) -> None:
    body = wheel(**{"tiny/Tiny.gguf": _noise()})
    hub.put_wheel(WHEEL, body, "tiny-model", cuts=[len(body) * 3 // 10])
    pull(store, "pypi:tiny-model==1.0")
    assert [s.headers.get("range") for s in hub.asked("GET")][1:] == [
        None,
        f"bytes={len(body) * 3 // 10}-",
    ]


def test_an_index_of_plain_html_works_too(store: ModelStore, hub: FakeHub) -> None:
    body = wheel(**{"tiny/Tiny.gguf": _noise()})
    hub.put_wheel(WHEEL, body, "tiny-model")
    link = f"../../files/{WHEEL}#sha256={hashlib.sha256(body).hexdigest()}"
    page = f'<html><a rel="x" href="{link}">{WHEEL}</a><a href="http://[">bad</a></html>'
    hub.put("/simple/tiny-model/", page.encode(), kind="text/html")
    assert pull(store, "pypi:tiny-model==1.0").sha256 == hashlib.sha256(_noise()).hexdigest()


def test_the_login_of_an_index_stays_there(
    store: ModelStore, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put_wheel(WHEEL, wheel(**{"t/T.gguf": _noise()}), "tiny-model")
    monkeypatch.setenv("PIP_INDEX_URL", hub.url.replace("//", "//me:s%40cret@") + "/simple")
    pull(store, "pypi:tiny-model==1.0")
    assert hub.seen[0].headers["authorization"] == f"Basic {b64encode(b'me:s@cret').decode()}"


def test_a_second_index_is_asked_when_the_first_has_nothing(
    store: ModelStore, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub() as second:
        second.put_wheel(WHEEL, wheel(**{"t/T.gguf": _noise()}), "tiny-model")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{second.url}/simple file:///opt/none")
        assert pull(store, "pypi:tiny-model==1.0").path.name == "T.gguf"


@pytest.mark.parametrize("spec", ["pypi:tiny-model==2.0", "pypi:other==1.0"])
def test_a_version_that_is_not_there_is_not_found(
    store: ModelStore, hub: FakeHub, spec: str
) -> None:
    hub.put_wheel(WHEEL, wheel(**{"t/T.gguf": _noise()}), "tiny-model")
    with pytest.raises(NotFound, match="no package index"):
        pull(store, spec)


@pytest.mark.parametrize(
    "member",
    [
        "../T.gguf",
        "/T.gguf",
        "a/../../T.gguf",
        "a\\..\\T.gguf",
        "C:/T.gguf",
        "a/.T.gguf",
        "ü/T.gguf",
    ],
)
def test_a_member_that_would_leave_its_folder_is_refused(
    store: ModelStore, hub: FakeHub, member: str
) -> None:
    hub.put_wheel(WHEEL, wheel(**{member: _noise()}), "tiny-model")
    with pytest.raises(SourceError, match="unsafe name"):
        pull(store, "pypi:tiny-model==1.0")
    assert store.list() == []


def test_a_member_that_swells_is_refused(store: ModelStore, hub: FakeHub) -> None:
    hub.put_wheel(WHEEL, wheel(**{"t/T.gguf": GGUF[:24] + bytes(100_000_000)}), "tiny-model")
    with pytest.raises(SourceError, match="swell"):
        pull(store, "pypi:tiny-model==1.0")


@pytest.mark.parametrize("members", [{"t/a.txt": b""}, {"t/A.gguf": GGUF, "t/B.gguf": GGUF}])
def test_a_wheel_must_hold_exactly_one_gguf(
    store: ModelStore, hub: FakeHub, members: dict[str, bytes]
) -> None:
    hub.put_wheel(WHEEL, wheel(**members), "tiny-model")
    with pytest.raises(NotFound, match="exactly one"):
        pull(store, "pypi:tiny-model==1.0")


def test_one_of_several_can_be_named(store: ModelStore, hub: FakeHub) -> None:
    hub.put_wheel(WHEEL, wheel(**{"t/A.gguf": _noise(), "t/B.gguf": _noise()}), "tiny-model")
    assert pull(store, "pypi:tiny-model==1.0/B.gguf").name == "b"


def test_a_wheel_with_other_bytes_than_the_index_says_is_discarded(
    store: ModelStore, hub: FakeHub
) -> None:
    hub.put_wheel(WHEEL, wheel(**{"t/T.gguf": _noise()}), "tiny-model", sha256="2" * 64)
    with pytest.raises(SourceError, match="discarded"):
        pull(store, "pypi:tiny-model==1.0")


@pytest.mark.parametrize("page", [b"{}", b"[]", b'{"files": [1]}', b"\xff", b"[" * 100_000])
def test_an_index_page_that_makes_no_sense_is_told(
    store: ModelStore, hub: FakeHub, page: bytes
) -> None:
    hub.put("/simple/tiny-model/", page, kind="application/json")
    with pytest.raises(SourceError, match="no sense"):
        pull(store, "pypi:tiny-model==1.0")


def test_a_damaged_wheel_is_told(store: ModelStore, hub: FakeHub) -> None:
    hub.put_wheel(WHEEL, b"PK no wheel at all", "tiny-model")
    with pytest.raises(SourceError, match="damaged"):
        pull(store, "pypi:tiny-model==1.0")


def test_the_catalogue_is_sound() -> None:
    from node.models import parse_source
    from node.models.names import check_name

    entries = load_catalogue()
    assert entries[0].name == "smollm2:135m" and len({e.name for e in entries}) == len(entries)
    for entry in entries:
        assert check_name(entry.name) and entry.licence and entry.description
        assert entry.size_bytes > 10**7 and entry.context_tokens >= 2048
        wanted = parse_source(entry.name)
        assert wanted.source.origin == entry.source and wanted.sha256 == entry.sha256


def _noise() -> bytes:
    """A good GGUF whose weights do not compress."""
    data = b"".join(hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(700))
    return GGUF[: len(GGUF) - 20_000] + data[:20_000]
