"""Installing, finding and removing models on a real disk."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from builder_models import GGUFBytes, write_split
from hypothesis import given
from hypothesis import strategies as st

from node.errors import BadModelFile, Conflict, Forbidden, InvalidRequest, NodeError, NotFound
from node.models import InstalledModel, ModelStore, pull
from node.models.names import check_name, folder_name, name_from_file, name_from_folder
from node.paths import NodePaths, node_paths

TRAVERSAL = [
    "../x", "..", ".", "", "/etc/passwd", "a/b", "a\\b", "C:x", "a:b:c", "con", "NUL", "aux.gguf",
    "x\0y", "x\n", "-x", ".x", "x.", "a" * 70, "ü", "x:../y", "x:", ":x", "lpt1:tag", "a+b", "~",
]  # fmt: skip


def _add(
    store: ModelStore, folder: Path, name: str = "tiny:f32", origin: str = "test"
) -> InstalledModel:
    file = GGUFBytes().write(folder / "tiny.gguf")
    return store.add(name, [file], origin=origin, sha256="0" * 64, licence="mit")


@pytest.mark.parametrize("name", TRAVERSAL)
def test_a_name_that_could_leave_the_store_is_refused(store: ModelStore, name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_name(name)
    with pytest.raises(NodeError):
        store.find(name)


@given(st.text(alphabet="ab:/.\\+~%\0 C-_", max_size=12) | st.text(max_size=40))
def test_whatever_the_name_its_folder_is_inside_the_store(name: str) -> None:
    root = Path("/models").resolve()
    try:
        folder = folder_name(name)
    except InvalidRequest:
        return
    assert (root / folder).resolve().parent == root
    assert name_from_folder(folder) == name


@given(st.text(max_size=60))
def test_any_file_name_gives_a_good_model_name(file_name: str) -> None:
    assert check_name(name_from_file(f"{file_name}.gguf"))


@pytest.mark.parametrize(
    ("file_name", "name"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "qwen3-8b:q4_k_m"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct:q4_1"),
        ("gpt-oss-20b-mxfp4.gguf", "gpt-oss-20b:mxfp4"),
        ("Big-UD-Q4_K_XL-00001-of-00002.gguf", "big:ud-q4_k_xl"),
        ("plain.gguf", "plain"),
    ],
)
def test_a_model_is_named_after_its_file(file_name: str, name: str) -> None:
    assert name_from_file(file_name) == name


def test_an_added_model_is_listed_found_and_removed(store: ModelStore, tmp_path: Path) -> None:
    model = _add(store, tmp_path)
    assert store.list() == [model] and store.find("tiny:f32") == model
    assert store.find("tiny") == model
    assert model.path.is_relative_to(store.root) and not (tmp_path / "tiny.gguf").exists()
    assert store.remove("tiny") >= model.size_bytes
    assert store.list() == [] and not model.path.exists()


def test_a_missing_model_is_answered_with_the_nearest_names(
    store: ModelStore, tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match="no model is installed yet"):
        store.find("tiny")
    _add(store, tmp_path, "tiny:a")
    _add(store, tmp_path, "tiny:b")
    with pytest.raises(NotFound, match="tiny:a, tiny:b|tiny:b, tiny:a"):
        store.find("tiny")
    with pytest.raises(NotFound, match="tiny:a"):
        store.find("tinny:a")


def test_a_model_of_the_same_name_is_replaced(store: ModelStore, tmp_path: Path) -> None:
    old = _add(store, tmp_path, origin="old")
    new = _add(store, tmp_path, origin="new")
    assert [model.origin for model in store.list()] == ["new"]
    assert new.path == old.path
    assert not list(store.partial.glob("*.old")) and not list(store.partial.glob("*.new"))


def test_the_old_model_stays_when_the_new_one_cannot_be_put_together(
    store: ModelStore, tmp_path: Path
) -> None:
    old = _add(store, tmp_path, origin="old")
    with pytest.raises(BadModelFile):
        store.add(old.name, [tmp_path / "no plain name?.gguf"], origin="new")
    assert store.find(old.name).origin == "old" and old.path.is_file()


def test_a_file_is_registered_in_place(store: ModelStore, tmp_path: Path) -> None:
    file = GGUFBytes().write(tmp_path / "mine-Q8_0.gguf")
    model = pull(store, f"file:{file}")
    assert (model.name, model.path, model.source) == ("mine:q8_0", file, "file")
    store.remove(model.name)
    assert store.list() == [] and file.is_file()


def test_a_registered_file_that_went_away_is_left_out(
    store: ModelStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = GGUFBytes().write(tmp_path / "mine.gguf")
    pull(store, f"file:{file}=other:name")
    file.unlink()
    with caplog.at_level(logging.WARNING):
        assert store.list() == []
    assert "mine.gguf is gone" in caplog.text


def test_a_split_model_is_registered_with_all_parts(store: ModelStore, tmp_path: Path) -> None:
    model = pull(store, f"file:{write_split(tmp_path)}=halves")
    assert len(model.files) == 2
    assert model.size_bytes == sum(file.stat().st_size for file in model.files)


@pytest.mark.parametrize(
    "change",
    [
        {"files": ["../../outside.gguf"]},
        {"files": ["/etc/passwd"]},
        {"files": ["sub/x.gguf"]},
        {"files": []},
        {"source": "elsewhere"},
        {"source": "file"},
        {"name": "other"},
        {"format": 99},
        {"created_s": None},
    ],
)
def test_a_manifest_that_was_tampered_with_is_left_out(
    store: ModelStore, tmp_path: Path, change: dict[str, object]
) -> None:
    model = _add(store, tmp_path)
    manifest = model.path.parent / "model.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    assert store.list() == []


def test_files_of_other_programs_are_not_removed(
    paths: NodePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hf" / "hub" / "models--o--r" / "snapshots" / "1"
    folder.mkdir(parents=True)
    file = GGUFBytes().write(folder / "theirs.gguf")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Forbidden, match="huggingface"):
        ModelStore(paths).remove("theirs")
    assert file.is_file()


def test_two_pulls_of_one_model_do_not_meet(store: ModelStore) -> None:
    with store.locked("tiny"), pytest.raises(Conflict, match="another process"):
        with store.locked("tiny"):
            raise AssertionError("the lock was given twice")
    with store.locked("tiny"):
        pass


def test_the_store_is_the_users_alone(tmp_path: Path) -> None:
    paths = node_paths(tmp_path / "home")
    paths.create()
    store = ModelStore(paths, discover=False)
    model = _add(store, tmp_path)
    assert model.path.parent.stat().st_mode & 0o077 == 0


def test_downloads_nobody_came_back_for_are_removed(store: ModelStore) -> None:
    store.partial.mkdir()
    old, new = store.partial / "a.part", store.partial / "b.part"
    for file in (old, new):
        file.write_bytes(b"x")
    os.utime(old, (1, 1))
    store.forget_old_partials()
    assert new.exists() and not old.exists()
