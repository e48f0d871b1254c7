"""The header check in its child process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from builder_models import GGUFBytes, with_keys

from node.errors import BadModelFile, NotFound
from node.models import check_gguf, precheck


def test_the_child_sends_the_whole_header(model_path: Path) -> None:
    header = check_gguf(model_path)
    assert (header.architecture, header.n_layers, len(header.tensors)) == ("llama", 30, 272)
    assert header.tensors[0].shape == (576, 49_152)
    assert check_gguf(model_path) is header


def test_numbers_that_are_none_come_through(tmp_path: Path) -> None:
    nan = (6).to_bytes(4, "little") + b"\x00\x00\xc0\x7f"
    path = GGUFBytes(keys=with_keys(llama__odd=nan)).write(tmp_path / "m.gguf")
    odd = check_gguf(path).metadata["llama.odd"]
    assert isinstance(odd, float) and odd != odd


def test_a_refusal_names_the_file_but_not_its_folder(tmp_path: Path) -> None:
    path = GGUFBytes(n_tensors=2**63).write(tmp_path / "bad.gguf")
    with pytest.raises(BadModelFile, match="bad.gguf: the header claims") as caught:
        check_gguf(path)
    assert str(tmp_path) not in caught.value.message


def test_a_changed_file_is_checked_again(tmp_path: Path) -> None:
    path = GGUFBytes().write(tmp_path / "m.gguf")
    assert check_gguf(path).version == 3
    path.write_bytes(GGUFBytes(version=2, data_bytes=9000).encode())
    assert check_gguf(path).version == 2


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="pull the model again"):
        check_gguf(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    "child",
    [
        "import os; os.abort()",
        "raise SystemExit(1)",
        "import time; time.sleep(60)",
    ],
)
def test_a_child_that_dies_or_hangs_means_a_bad_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str
) -> None:
    monkeypatch.setattr(precheck, "_CHILD", child)
    monkeypatch.setattr(precheck, "_WALL_S", 1.0)
    with pytest.raises(BadModelFile, match=r"m\.gguf"):
        check_gguf(GGUFBytes().write(tmp_path / "m.gguf"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not enforce it")
def test_the_child_cannot_take_more_memory_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = (
        "import sys; from node.models import precheck;"
        "precheck.read_header = lambda path: bytearray(4 << 30);"
        "sys.exit(precheck.main(sys.argv[1:]))"
    )
    monkeypatch.setattr(precheck, "_CHILD", greedy)
    with pytest.raises(BadModelFile, match="more memory than any real one"):
        check_gguf(GGUFBytes().write(tmp_path / "m.gguf"))
