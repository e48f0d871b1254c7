"""The README says what the code does: generated blocks are fresh, named functions exist."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def life_of_a_request() -> list[str]:
    found = re.search(r"<!-- begin life -->\n(.*?)<!-- end life -->", README, re.DOTALL)
    assert found is not None
    return found[1].strip().splitlines()


def resolve(name: str) -> object:
    """The longest importable prefix, then attributes."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{name} is nothing that can be imported")


def test_the_life_of_a_request_has_ten_lines_that_name_existing_functions() -> None:
    lines = life_of_a_request()
    assert [line.split(".")[0] for line in lines] == [str(n) for n in range(1, 11)]
    for line in lines:
        names = re.findall(r"`([a-z_]+(?:\.\w+)+)`", line)
        assert names, line
        for name in names:
            assert callable(resolve(name)), name


def test_generated_blocks_are_fresh() -> None:
    checked = subprocess.run(
        [sys.executable, str(ROOT / "packaging" / "readme.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr


def test_the_exit_codes_are_all_explained() -> None:
    from node import errors

    kinds = [getattr(errors, name) for name in errors.__all__]
    for code in {0, 130} | {kind.exit_code for kind in kinds}:
        assert re.search(rf"^\| {code} \| \w", README, re.MULTILINE), code


def test_the_two_commands_are_there() -> None:
    for command in ("run", "test"):
        assert f"python3 packaging/bootstrap.py {command}" in README
