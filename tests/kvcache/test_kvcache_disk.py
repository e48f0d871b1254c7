from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvcache import DiskLimits, DiskTier
from kvcache.blockfile import SUFFIX, Entry
from kvcache.keys import BlockHash, Namespace, Tokens, child_hash, root_hash

NAMESPACE = Namespace("0123456789abcdef" * 2)
PAYLOAD_BYTES = 16_000
CAP_BYTES = 2_500_000
needs_permissions = pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() == 0, reason="root and Windows ignore the mode"
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def make_tier(folder: Path, max_bytes: int = 10**7, **limits: int) -> DiskTier:
    return DiskTier(folder, DiskLimits(max_bytes, **limits), Clock())


def make_entry(seed: int, parent: BlockHash | None = None, start: int = 0) -> Entry:
    tokens: Tokens = np.arange(seed, seed + 64, dtype=np.int32)
    behind = root_hash(NAMESPACE) if parent is None else parent
    name = child_hash(NAMESPACE, behind, tokens)
    return Entry(NAMESPACE, name, behind, "block", start, tokens, PAYLOAD_BYTES)


def payload(entry: Entry) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    random = np.random.default_rng(int(entry.tokens[0]))
    return random.integers(0, 256, PAYLOAD_BYTES, np.uint8)


def put(tier: DiskTier, entry: Entry) -> str:
    return tier.write(entry, payload(entry))


def reads(tier: DiskTier, entry: Entry) -> bool:
    data = tier.read(entry)
    return data is not None and np.array_equal(data, payload(entry))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*/*/*{SUFFIX}"))


def bytes_in(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def test_what_was_written_is_found_after_a_restart(tmp_path: Path) -> None:
    entry = make_entry(1)
    first = make_tier(tmp_path)
    assert put(first, entry) == "stored"
    assert put(first, entry) == "present"
    first.close()
    second = make_tier(tmp_path)
    found = second.find(NAMESPACE, entry.hash)
    assert found is not None and np.array_equal(found.tokens, entry.tokens)
    assert reads(second, entry)
    assert [e.hash for e in second.children(NAMESPACE, entry.parent)] == [entry.hash]


def test_folders_and_files_are_private(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "kv")
    tier.describe(NAMESPACE, {"model": "x"})
    put(tier, make_entry(1))
    for path in (tmp_path / "kv").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 or path.name.startswith("index.db-"), path


def test_a_longer_piece_supersedes_the_tail(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    tail, longer = make_entry(1), make_entry(2)
    put(tier, tail)
    assert tier.write(longer, payload(longer), supersedes=tail.hash) == "stored"
    assert tier.find(NAMESPACE, tail.hash) is None
    assert [p.stem for p in files(tmp_path)] == [longer.hash.hex()]


@pytest.mark.parametrize("at", [0, 20, 100, 200, 400, 3000])
def test_a_flipped_byte_is_a_miss_and_the_file_goes(tmp_path: Path, at: int) -> None:
    tier, entry = make_tier(tmp_path), make_entry(1)
    put(tier, entry)
    [path] = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert tier.read(entry) is None
    assert not path.exists() and tier.find(NAMESPACE, entry.hash) is None
    assert tier.reasons["bad_file"] == 1
    assert put(tier, entry) == "stored"


@pytest.mark.parametrize("size", [0, 10, 90, 500])
def test_a_cut_file_is_a_miss_and_goes(tmp_path: Path, size: int) -> None:
    tier, entry = make_tier(tmp_path), make_entry(1)
    put(tier, entry)
    os.truncate(files(tmp_path)[0], size)
    assert tier.read(entry) is None
    assert files(tmp_path) == [] and tier.reasons["bad_file"] == 1


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    tier, one, two = make_tier(tmp_path), make_entry(1), make_entry(2)
    put(tier, one)
    put(tier, two)
    by_name = {p.stem: p for p in files(tmp_path)}
    by_name[two.hash.hex()].replace(by_name[one.hash.hex()])
    assert tier.read(one) is None
    assert tier.reasons["bad_file"] == 1


def test_a_missing_file_is_a_miss(tmp_path: Path) -> None:
    tier, entry = make_tier(tmp_path), make_entry(1)
    put(tier, entry)
    files(tmp_path)[0].unlink()
    assert tier.read(entry) is None
    assert tier.reasons["file_gone"] == 1 and tier.find(NAMESPACE, entry.hash) is None


def damage_index(path: Path, how: str) -> None:
    if how == "deleted":
        for one in path.parent.glob("index.db*"):
            one.unlink()
    elif how == "future":
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    elif how == "no table":
        with sqlite3.connect(path) as db:
            db.execute("DROP TABLE totals")
        db.close()
    else:
        path.write_bytes(b"this is not a database " * 500)


@pytest.mark.parametrize("how", ["deleted", "future", "no table", "garbage"])
def test_a_lost_index_is_made_anew_from_the_files(tmp_path: Path, how: str) -> None:
    tier = make_tier(tmp_path)
    entries = [make_entry(i) for i in range(5)]
    for entry in entries:
        put(tier, entry)
    tier.close()
    damage_index(tmp_path / "index.db", how)
    bad = files(tmp_path)[0]
    os.truncate(bad, 50)
    again = make_tier(tmp_path)
    good = [e for e in entries if e.hash.hex() != bad.stem]
    assert all(reads(again, e) for e in good)
    assert not bad.exists() and again.stats()["files"] == 4
    assert again.reasons["index_rebuilt"] == (how != "deleted")


def test_an_index_damaged_while_in_use_costs_nothing_but_a_miss(tmp_path: Path) -> None:
    tier, entry = make_tier(tmp_path), make_entry(1)
    put(tier, entry)
    with open(tmp_path / "index.db", "r+b") as file:
        file.write(b"\xff" * 4096)
    os.truncate(tmp_path / "index.db-wal", 0)
    for i in range(2, 6):
        put(tier, make_entry(i))
        tier.find(NAMESPACE, entry.hash)
    assert tier.find(NAMESPACE, entry.hash) is not None


@needs_permissions
def test_lost_permission_is_counted_and_the_files_stay(tmp_path: Path) -> None:
    tier, entry = make_tier(tmp_path), make_entry(1)
    put(tier, entry)
    path = files(tmp_path)[0]
    path.chmod(0)
    assert tier.read(entry) is None
    assert path.exists() and tier.reasons["read_failed"] == 1
    path.chmod(0o600)
    assert tier.read(entry) is not None


def test_a_folder_that_cannot_be_made_means_no_tier(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    tier, entry = make_tier(tmp_path / "file" / "kv"), make_entry(1)
    assert tier.find(NAMESPACE, entry.hash) is None
    assert put(tier, entry) == "failed"
    assert tier.reasons["open_failed"] == 1
    assert tier.stats()["files"] == 0


def test_ten_times_the_cap_stays_under_it_after_every_write(tmp_path: Path) -> None:
    cap = CAP_BYTES
    tier = make_tier(tmp_path, cap)
    for i in range(10 * cap // PAYLOAD_BYTES):
        entry = make_entry(i)
        tier.write(entry, payload(entry), priority=1.0)
        assert bytes_in(tmp_path) <= cap
    stats = tier.stats()
    assert stats["evicted"] > 1000 and stats["files"] > 40


def test_the_caps_hold_for_files_of_other_namespaces_too(tmp_path: Path) -> None:
    cap = CAP_BYTES
    other = Namespace("f" * 32)
    tier = make_tier(tmp_path, cap)
    for i in range(200):
        one = make_entry(i)
        entry = Entry(other, one.hash, one.parent, "block", 0, one.tokens, PAYLOAD_BYTES)
        tier.write(entry, payload(entry), priority=1.0)
    for i in range(200):
        put(tier, make_entry(1000 + i))
        assert bytes_in(tmp_path) <= cap


def test_the_free_space_floor_makes_the_cache_give_way(tmp_path: Path) -> None:
    volume, floor = 3_500_000, 1_000_000
    others = 0

    def free_bytes() -> int:
        return volume - others - bytes_in(tmp_path)

    tier = DiskTier(tmp_path, DiskLimits(10**7, floor), Clock(), free_bytes)
    for i in range(400):
        entry = make_entry(i)
        tier.write(entry, payload(entry), priority=1.0)
        assert free_bytes() >= floor
    others = 2_400_000
    assert put(tier, make_entry(9999)) == "no_space"
    assert tier.reasons["no_space"] == 1


def test_a_prefix_is_never_evicted_before_what_hangs_on_it(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, CAP_BYTES)
    parent, start = root_hash(NAMESPACE), 0
    for i in range(400):
        entry = make_entry(i, parent, start)
        tier.write(entry, payload(entry), priority=1.0)
        parent, start = (entry.hash, start + 64) if i % 20 else (root_hash(NAMESPACE), 0)
        for one in [e for p in files(tmp_path) if (e := tier.find(NAMESPACE, name(p)))]:
            if one.start:
                assert tier.find(NAMESPACE, one.parent) is not None


def name(path: Path) -> BlockHash:
    return BlockHash(bytes.fromhex(path.stem))


def test_the_write_budget_of_a_day_leaves_room_for_what_is_used_again(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, write_bytes_per_day=200_000)
    cold = [put(tier, make_entry(i)) for i in range(12)]
    assert cold.count("stored") == 9 and cold[-1] == "write_budget"
    hot = make_entry(100)
    assert tier.write(hot, payload(hot), priority=1.0) == "stored"
    assert tier.stats()["written_today_bytes"] <= 200_000
    assert tier.reasons["write_budget"] == 3


def test_a_clock_that_jumps_back_breaks_nothing(tmp_path: Path) -> None:
    clock = Clock()
    tier = DiskTier(tmp_path, DiskLimits(CAP_BYTES), clock)
    for i in range(300):
        clock.now_s += random.Random(i).choice([-10, 1, 10]) * 86_400.0
        entry = make_entry(i)
        assert tier.write(entry, payload(entry), priority=1.0) == "stored"
        assert reads(tier, entry)


def test_a_tier_that_is_too_small_lets_in_only_what_comes_twice(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, CAP_BYTES)
    outcomes = [put(tier, make_entry(i)) for i in range(600)]
    assert "narrow" in outcomes and tier.stats()["narrow"]
    late = make_entry(5000)
    assert [put(tier, late), put(tier, late)] == ["narrow", "stored"]


def test_a_full_disk_is_counted_and_leaves_nothing(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    tier, entry = make_tier(tmp_path), make_entry(1)
    limit = f"ulimit -f 4; exec {sys.executable} -c"  # blocks of 1024 bytes
    code = _WRITER.format(folder=str(tmp_path), n=3, big=PAYLOAD_BYTES * 10)
    done = subprocess.run(["bash", "-c", f'{limit} "$0"', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == [] and list(tmp_path.rglob("*.tmp")) == []
    assert put(tier, entry) == "stored"


_WRITER = """
import signal, sys
sys.path[:0] = ["tests/helpers", "tests/kvcache", "."]
if hasattr(signal, "SIGXFSZ"):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from pathlib import Path
import numpy as np
import test_kvcache_disk as t
from kvcache.blockfile import Entry
tier = t.make_tier(Path({folder!r}))
for i in range({n}):
    e = t.make_entry(i)
    big = {big}
    data = np.resize(t.payload(e), big) if big else t.payload(e)
    e = Entry(e.namespace, e.hash, e.parent, e.kind, e.start, e.tokens, len(data))
    tier.write(e, data)
    print(i, flush=True)
"""


def start_writer(folder: Path, n: int) -> subprocess.Popen[str]:
    code = _WRITER.format(folder=str(folder), n=n, big=0)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_writer_killed_at_any_moment_leaves_only_whole_files(tmp_path: Path) -> None:
    random_s = random.Random(7)
    for _ in range(50):
        folder = tmp_path / "kv"
        pid = os.fork()
        if pid == 0:  # a writer without the start of an interpreter
            tier = make_tier(folder)
            for _ in range(10_000):
                entry = make_entry(random_s.randrange(10**6))
                tier.write(entry, payload(entry), priority=1.0)
            os._exit(0)
        time.sleep(random_s.uniform(0.005, 0.06))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    tier = make_tier(tmp_path / "kv")
    tier._clock.now_s += 3600  # type: ignore[attr-defined]
    tier.gc()
    for path in files(tmp_path / "kv"):
        found = tier.find(NAMESPACE, name(path))
        assert found is not None and reads(tier, found)
    assert tier.stats()["files"] == len(files(tmp_path / "kv")) > 0


def test_two_processes_share_one_folder(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, 60) for _ in range(2)]
    assert [w.wait(60) for w in writers] == [0, 0]
    for writer in writers:
        writer.communicate()
    tier = make_tier(tmp_path)
    assert tier.stats()["files"] == 60 == len(files(tmp_path))
    assert tier.verify() == {"files": 60, "good": 60, "bad": 0, "unreadable": 0}


def test_verify_deletes_what_is_bad(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    for i in range(4):
        put(tier, make_entry(i))
    os.truncate(files(tmp_path)[0], 700)
    seen: list[tuple[int, int]] = []
    counts = tier.verify(lambda done, total: seen.append((done, total)))
    assert counts == {"files": 4, "good": 3, "bad": 1, "unreadable": 0}
    assert seen[-1] == (4, 4) and tier.stats()["files"] == 3


def test_gc_makes_folder_and_index_agree(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    for i in range(4):
        put(tier, make_entry(i))
    files(tmp_path)[0].unlink()
    stray = files(tmp_path)[0]
    draft = stray.with_name("x.tmp")
    draft.touch()
    os.utime(draft, (1, 1))
    tier._index.remove(NAMESPACE, name(stray))  # type: ignore[union-attr]
    assert tier.gc() == {"drafts": 1, "entries": 1, "found": 1, "evicted": 0}
    assert tier.stats()["files"] == 3 == len(files(tmp_path))


def test_purge_leaves_no_state(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    for i in range(4):
        put(tier, make_entry(i))
    assert tier.purge(Namespace("f" * 32)) == 0
    assert tier.purge() == 4
    assert files(tmp_path) == [] and tier.stats()["files"] == 0


def test_namespaces_are_described(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    tier.describe(NAMESPACE, {"fingerprint": "abc"})
    put(tier, make_entry(1))
    [row] = tier.namespaces()
    assert row["files"] == 1 and row["tokens"] == 64
    assert row["identity"] == {"fingerprint": "abc"}
