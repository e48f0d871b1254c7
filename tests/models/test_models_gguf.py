"""The header parser against right, wrong and hostile files."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from builder_models import (
    ARRAY,
    BASICS,
    BOOL,
    STRING,
    TENSORS,
    U32,
    GGUFBytes,
    pair,
    tensor,
    text,
    u32,
    u64,
    with_keys,
    write_split,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from node.errors import BadModelFile
from node.models import ArrayInfo
from node.models.gguf import read_header, split_paths

MUTATIONS = 200
HUGE = 2**63 - 1


def test_the_real_model_is_read_with_all_it_says(model_path: Path) -> None:
    header = read_header(model_path)
    assert (header.architecture, header.n_layers, header.context_tokens) == ("llama", 30, 8192)
    assert header.n_heads_kv == (3,) * 30
    assert (header.key_length, header.value_length, header.n_vocab) == (64, 64, 49_152)
    assert header.metadata["tokenizer.ggml.tokens"] == ArrayInfo("string", 49_152)
    assert header.licence == "apache-2.0" and "<|im_start|>" in (header.chat_template or "")
    assert len(header.tensors) == 272 and header.size_bytes == model_path.stat().st_size


@pytest.mark.parametrize("version", [2, 3])
def test_a_small_file_is_read(tmp_path: Path, version: int) -> None:
    header = read_header(GGUFBytes(version=version).write(tmp_path / "m.gguf"))
    assert header.version == version
    assert [(t.name, t.type, t.size_bytes) for t in header.tensors] == [
        ("token_embd.weight", "F32", 768),
        ("blk.0.attn_k.weight", "F32", 8192),
    ]
    assert header.n_vocab == 3 and header.key_length == 16


def test_a_list_with_one_number_for_each_layer_is_kept(tmp_path: Path) -> None:
    file = GGUFBytes(keys=with_keys(llama__attention__head_count_kv=[0, 2]))
    assert read_header(file.write(tmp_path / "m.gguf")).n_heads_kv == (0, 2)


def _key(value: bytes) -> GGUFBytes:
    return GGUFBytes(keys=(*with_keys(), pair("x", value)))


def _tensor(*tensors: bytes, data_bytes: int = 4096) -> GGUFBytes:
    return GGUFBytes(tensors=tensors, data_bytes=data_bytes)


HOSTILE = {
    "other magic": (GGUFBytes(magic=b"GGML"), "not a GGUF"),
    "version 1": (GGUFBytes(version=1), "version 1"),
    "version 4": (GGUFBytes(version=4), "version 4"),
    "big endian": (GGUFBytes(version=0x03000000), "big-endian"),
    "huge key count": (GGUFBytes(n_keys=HUGE), "more than can be"),
    "huge tensor count": (GGUFBytes(n_tensors=HUGE), "more than can be"),
    "tensor count of all ones": (GGUFBytes(n_tensors=2**64 - 1), "more than can be"),
    "more keys than there are": (GGUFBytes(n_keys=len(BASICS) + 40), "key|cut off|unknown type"),
    "huge array": (_key(u32(ARRAY) + u32(U32) + u64(2**61)), "more than can be"),
    "array whose bytes overflow": (_key(u32(ARRAY) + u32(12) + u64(2**61 + 1)), "more than"),
    "array of arrays": (_key(u32(ARRAY) + u32(ARRAY) + u64(1) + u32(U32) + u64(1)), "unknown"),
    "array of nothing known": (_key(u32(ARRAY) + u32(77) + u64(1)), "unknown type 77"),
    "unknown value type": (_key(u32(99) + bytes(8)), "unknown type 99"),
    "truth value of 7": (_key(u32(BOOL) + b"\x07"), "truth value"),
    "huge string": (_key(u32(STRING) + u64(HUGE)), "string of"),
    "string past the end": (_key(u32(STRING) + u64(2**21) + b"abc"), "cut off"),
    "string that is no UTF-8": (_key(u32(STRING) + text(b"\xff\xfe")), "UTF-8"),
    "key that is no UTF-8": (GGUFBytes(keys=(*with_keys(), pair(b"\xff", 1))), "UTF-8"),
    "empty key": (GGUFBytes(keys=(*with_keys(), pair("", 1))), "empty"),
    "repeated key": (GGUFBytes(keys=(*with_keys(), pair("llama.block_count", 3))), "repeated"),
    "huge token": (
        GGUFBytes(keys=with_keys(tokenizer__ggml__tokens=["x" * 70_000])),
        "too long",
    ),
    "token past the end": (
        GGUFBytes(
            keys=with_keys(tokenizer__ggml__tokens=u32(ARRAY) + u32(STRING) + u64(3) + u64(2**40))
        ),
        "too long",
    ),
    "tensor past the end": (_tensor(tensor("t", (64, 64)), data_bytes=4096), "cut off or damaged"),
    "offset past the end": (_tensor(tensor("t", (8,), 0, 2**62)), "starts at"),
    "offset that wraps around": (_tensor(tensor("t", (8,), 0, 2**64 - 32)), "starts at"),
    "size that overflows": (_tensor(tensor("t", (2**32, 2**32))), "shape"),
    "size that overflows in bytes": (_tensor(tensor("t", (2**61, 1))), "cut off or damaged"),
    "dimension of zero": (_tensor(tensor("t", (0, 8))), "shape"),
    "negative dimension": (_tensor(tensor("t", (2**64 - 1, 2))), "shape"),
    "no dimensions": (_tensor(tensor("t" * 16, ())), "0 dimensions"),
    "five dimensions": (_tensor(tensor("t", (1, 1, 1, 1, 1))), "5 dimensions"),
    "half a block": (_tensor(tensor("t", (33,), 2)), "shape"),
    "removed type without block size": (_tensor(tensor("t", (32,), 4)), "unknown type 4"),
    "type beyond the table": (_tensor(tensor("t", (32,), 1000)), "unknown type 1000"),
    "repeated tensor": (
        _tensor(tensor("t", (8,)), tensor("t", (8,), 0, 32)),
        "empty or repeated",
    ),
    "nameless tensor": (_tensor(tensor("", (8, 1, 1))), "empty or repeated"),
    "overlong tensor name": (_tensor(tensor("t" * 64, (8,))), "tensor name"),
    "alignment of zero": (GGUFBytes(keys=with_keys(general__alignment=0)), "power of two"),
    "odd alignment": (GGUFBytes(keys=with_keys(general__alignment=24)), "power of two"),
    "alignment in words": (GGUFBytes(keys=with_keys(general__alignment="32")), "not a number"),
    "no architecture": (GGUFBytes(keys=with_keys(general__architecture=None)), "architecture"),
    "no layers": (GGUFBytes(keys=with_keys(llama__block_count=0)), "block_count"),
    "layers in words": (GGUFBytes(keys=with_keys(llama__block_count="two")), "block_count"),
    "a million layers": (GGUFBytes(keys=with_keys(llama__block_count=10**6)), "block_count"),
    "no context": (GGUFBytes(keys=with_keys(llama__context_length=0)), "context_length"),
    "negative heads": (
        GGUFBytes(keys=with_keys(llama__attention__head_count_kv=[-1, 2])),
        "head_count_kv",
    ),
    "projector": (GGUFBytes(keys=with_keys(general__type="mmproj")), "projector"),
    "no tensors": (GGUFBytes(tensors=()), "no tensors"),
    "part count of zero": (GGUFBytes(keys=with_keys(split__count=0)), "split.count"),
    "part without a part's name": (GGUFBytes(keys=with_keys(split__count=2)), "must be named"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, case: str) -> None:
    file, message = HOSTILE[case]
    with pytest.raises(BadModelFile, match=message):
        read_header(file.write(tmp_path / "m.gguf"))


def test_heads_of_zero_divide_nothing(tmp_path: Path) -> None:
    keys = with_keys(llama__attention__head_count=0, llama__attention__head_count_kv=0)
    assert read_header(GGUFBytes(keys=keys).write(tmp_path / "m.gguf")).key_length == 0


@pytest.mark.parametrize("keep", [0, 3, 8, 23, 40, 200])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUFBytes().encode()[:keep])
    with pytest.raises(BadModelFile):
        read_header(path)


def test_many_kept_arrays_hit_the_memory_cap(tmp_path: Path) -> None:
    array = u32(ARRAY) + u32(0) + u64(1024) + bytes(1024)
    keys = tuple(pair(f"k{i}", array) for i in range(3000))
    with pytest.raises(BadModelFile, match="more than"):
        read_header(GGUFBytes(keys=(*with_keys(), *keys)).write(tmp_path / "m.gguf"))


# Reads "offset hex" lines, changes the file so, reads its header, and puts the bytes back.
_READ_MUTATIONS = """
import sys
from pathlib import Path
from node.errors import BadModelFile
from node.models.gguf import read_header
from node.models.precheck import limit_this_process

limit_this_process()
with open(sys.argv[1], "r+b", buffering=0) as file:
    for line in sys.stdin:
        at, new = int(line.split()[0]), bytes.fromhex(line.split()[1])
        file.seek(at); old = file.read(len(new)); file.seek(at); file.write(new)
        try:
            header = read_header(Path(sys.argv[1]))
            print("read" if header.n_layers > 0 and header.tensors else "senseless")
        except BadModelFile:
            print("refused")
        file.seek(at); file.write(old)
"""


def test_200_mutated_headers_of_the_real_model_do_no_harm(tmp_path: Path, model_path: Path) -> None:
    header_bytes, path = 1_785_664, tmp_path / "m.gguf"
    with open(model_path, "rb") as source:
        path.write_bytes(source.read(header_bytes))
    os.truncate(path, model_path.stat().st_size)  # sparse: only the header is real
    chance = random.Random(4663)
    lines = "".join(_mutation(chance, header_bytes) for _ in range(MUTATIONS))
    child = [sys.executable, "-c", _READ_MUTATIONS, str(path)]
    done = subprocess.run(child, input=lines, capture_output=True, text=True)
    answers = done.stdout.split()
    assert (done.returncode, done.stderr, len(answers)) == (0, "", MUTATIONS)
    assert set(answers) == {"read", "refused"}


def _mutation(chance: random.Random, header_bytes: int) -> str:
    # Two thirds hit the counts, the keys or the table of tensors; the rest the vocabulary.
    start, end = chance.choice(
        [(4, 1500), (header_bytes - 18_000, header_bytes), (4, header_bytes)]
    )
    at = chance.randrange(start, end - 8)
    kind = chance.randrange(3)
    if kind == 0:
        new = bytes([chance.randrange(256)])
    elif kind == 1:
        new = chance.randbytes(chance.randrange(1, 8))
    else:
        new = u64(chance.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
    return f"{at} {new.hex()}\n"


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=400), prefix=st.booleans())
def test_any_bytes_are_a_header_or_a_bad_model_file(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, prefix: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes((b"GGUF" + u32(3) if prefix else b"") + data)
    with pytest.raises(BadModelFile):
        read_header(path)


def test_a_split_model_is_read_with_all_its_parts(tmp_path: Path) -> None:
    header = read_header(write_split(tmp_path))
    assert [Path(f).name for f in header.files] == [
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
    ]
    assert len(header.tensors) == 2
    assert header.size_bytes == sum(f.stat().st_size for f in tmp_path.iterdir())


def test_a_missing_part_is_told(tmp_path: Path) -> None:
    first = write_split(tmp_path)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(BadModelFile, match="cannot be read"):
        read_header(first)


@pytest.mark.parametrize(
    ("total", "second", "message"), [(3, 1, "all its tensors"), (2, 0, "another part")]
)
def test_parts_that_do_not_go_together_are_refused(
    tmp_path: Path, total: int, second: int, message: str
) -> None:
    with pytest.raises(BadModelFile, match=message):
        read_header(write_split(tmp_path, total=total, second=second))


def test_a_part_of_another_model_with_the_same_tensor_is_refused(tmp_path: Path) -> None:
    first = write_split(tmp_path)
    keys = with_keys(split__no=1, split__count=2, split__tensors__count=2)
    again = GGUFBytes(keys=keys, tensors=TENSORS[:1], data_bytes=768)
    again.write(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(BadModelFile, match="same name"):
        read_header(first)


def test_a_later_part_alone_asks_for_the_first(tmp_path: Path) -> None:
    first = write_split(tmp_path)
    with pytest.raises(BadModelFile, match="first part"):
        split_paths(first.with_name("m-00002-of-00002.gguf"))
    renamed = shutil.copy(first, tmp_path / "n-00002-of-00002.gguf")
    with pytest.raises(BadModelFile, match="first part"):
        read_header(Path(renamed))
