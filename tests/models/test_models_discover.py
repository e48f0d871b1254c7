"""Finding the models of other programs, and not being led astray by them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from builder_models import GGUFBytes, write_split

from node.models import ModelStore, pull
from node.models.discover import discover
from node.paths import NodePaths

DIGEST = "ab" * 32
MODEL = "application/vnd.ollama.image.model"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with nothing in it."""
    home = tmp_path / "user"
    home.mkdir()
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(home))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "ollama"))
    return home


def ollama(
    home: Path,
    layers: object,
    name: str = "registry.ollama.ai/library/qwen3/8b",
    blob: str = DIGEST,
) -> Path:
    manifest = home / "ollama" / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"layers": layers}))
    blobs = home / "ollama" / "blobs"
    blobs.mkdir(exist_ok=True)
    return GGUFBytes().write(blobs / f"sha256-{blob}")


def hub_file(home: Path, name: str, repo: str = "models--owner--Some-GGUF") -> Path:
    root = home / ".cache" / "huggingface" / "hub" / repo
    blob, link = root / "blobs" / f"b-{name}", root / "snapshots" / "rev1" / name
    for folder in (blob.parent, link.parent):
        folder.mkdir(parents=True, exist_ok=True)
    GGUFBytes().write(blob)
    link.symlink_to(os.path.relpath(blob, link.parent))
    return link


def test_nothing_is_found_where_nothing_is(home: Path) -> None:
    assert discover() == []


def test_a_model_of_ollama_is_used_in_place(home: Path) -> None:
    blob = ollama(
        home,
        [{"mediaType": "x", "digest": "y"}, {"mediaType": MODEL, "digest": f"sha256:{DIGEST}"}],
    )
    (model,) = discover()
    assert (model.name, model.path, model.source) == ("qwen3:8b", blob, "ollama")
    assert model.sha256 == DIGEST and not model.ours


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:../../../../etc/passwd",
        "../../outside",
        "sha256-" + "../" * 21 + "x",
        f"sha256:{DIGEST}/../x",
        f"sha256:{DIGEST.upper()}",
        f"sha256:{DIGEST}\n",
        f"md5:{DIGEST}",
        "",
        None,
        7,
        ["sha256:" + DIGEST],
    ],
)
def test_a_digest_that_is_none_is_not_followed(home: Path, digest: object) -> None:
    ollama(home, [{"mediaType": MODEL, "digest": digest}])
    GGUFBytes().write(home / "outside")
    assert discover() == []


@pytest.mark.parametrize("layers", [None, 3, [None], [{}], [[]], {"a": 1}, []])
def test_a_manifest_that_makes_no_sense_is_left_out(home: Path, layers: object) -> None:
    ollama(home, layers)
    assert discover() == []


def test_models_in_the_hugging_face_cache_are_found_by_their_links(home: Path) -> None:
    link = hub_file(home, "Some-Q4_K_M.gguf")
    (model,) = discover()
    assert (model.name, model.path, model.source) == ("some:q4_k_m", link, "huggingface")
    assert model.origin == "hf:owner/Some-GGUF/Some-Q4_K_M.gguf"


def test_a_link_out_of_its_repository_is_not_followed(home: Path, tmp_path: Path) -> None:
    link = hub_file(home, "Some-Q4_K_M.gguf")
    link.unlink()
    link.symlink_to(GGUFBytes().write(tmp_path / "secret.gguf"))
    assert discover() == []


def test_projectors_and_later_parts_and_other_files_are_left_out(home: Path) -> None:
    folder = home / ".lmstudio" / "models" / "pub" / "repo"
    folder.mkdir(parents=True)
    write_split(folder)
    GGUFBytes().write(folder / "mmproj-F16.gguf")
    (folder / "fake.gguf").write_bytes(b"<html>not a model</html>")
    (folder / "notes.txt").write_text("GGUF")
    (model,) = discover()
    assert (model.name, len(model.files), model.source) == ("m", 2, "lmstudio")


def test_an_incomplete_split_is_left_out(home: Path) -> None:
    folder = home / ".lmstudio" / "models"
    folder.mkdir(parents=True)
    write_split(folder).with_name("m-00002-of-00002.gguf").unlink()
    assert discover() == []


def test_names_are_unique_and_one_file_is_listed_once(home: Path) -> None:
    hub_file(home, "Some-Q4_K_M.gguf")
    hub_file(home, "Some-Q4_K_M.gguf", repo="models--other--Some")
    folder = home / ".lmstudio" / "models"
    folder.mkdir(parents=True)
    (folder / "Same.gguf").symlink_to(hub_file(home, "Third.gguf"))
    assert sorted(m.name for m in discover()) == ["some:q4_k_m", "some:q4_k_m-2", "third"]


def test_a_pulled_model_hides_the_same_file_elsewhere(home: Path, paths: NodePaths) -> None:
    link = hub_file(home, "Some-Q4_K_M.gguf")
    store = ModelStore(paths)
    assert [m.source for m in store.list()] == ["huggingface"]
    pull(store, f"file:{link}=mine")
    assert [(m.name, m.source) for m in store.list()] == [("mine", "file")]
    assert ModelStore(paths, discover=False).find("mine").path == link
