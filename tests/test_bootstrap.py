"""The bootstrap script's decisions; what it installs is seen by running it."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "packaging" / "bootstrap.py"


@pytest.fixture(scope="module")
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    used = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert used <= set(sys.stdlib_module_names)


def test_arguments_behind_the_dashes_are_left_alone(bootstrap: ModuleType) -> None:
    options = bootstrap.parse(["run", "--exit", "--", "--port", "0", "--exit"])
    assert options.exit and not options.cuda
    assert options.rest == ["--port", "0", "--exit"]
    assert bootstrap.value_of("--port", options.rest) == "0"
    assert bootstrap.value_of("--home", ["--home=there"]) == "there"
    assert bootstrap.value_of("--home", options.rest) is None


@pytest.mark.parametrize(
    ("stamp", "dev", "cuda", "satisfied"),
    [
        ({}, False, False, False),
        ({"key": "old", "dev": True, "cuda": True}, False, False, False),
        ({"key": "k", "dev": True, "cuda": False}, False, False, True),
        ({"key": "k", "dev": False, "cuda": False}, True, False, False),
        ({"key": "k", "dev": True, "cuda": False}, True, True, False),
        ({"key": "k", "dev": False, "cuda": True}, False, False, True),
    ],
)
def test_an_environment_with_more_than_is_wanted_will_do(
    bootstrap: ModuleType, stamp: dict[str, object], dev: bool, cuda: bool, satisfied: bool
) -> None:
    wanted = {"key": "k", "dev": dev, "cuda": cuda}
    assert bootstrap.is_satisfied(stamp, wanted) is satisfied


def test_a_damaged_stamp_means_to_set_up_again(bootstrap: ModuleType, tmp_path: Path) -> None:
    stamp = tmp_path / "bootstrap.json"
    assert bootstrap.read_stamp(stamp) == {}
    stamp.write_text('{"key"')
    assert bootstrap.read_stamp(stamp) == {}
    stamp.write_text(json.dumps({"key": "k"}))
    assert bootstrap.read_stamp(stamp) == {"key": "k"}


@pytest.mark.parametrize(
    ("platform", "todo"),
    [
        ("linux", "build-essential"),
        ("linux", "gcc-c++"),
        ("darwin", "xcode-select --install"),
        ("win32", "Visual Studio Build Tools"),
    ],
)
def test_without_a_compiler_it_says_what_to_install(
    bootstrap: ModuleType, platform: str, todo: str
) -> None:
    assert todo in bootstrap.compiler_help(platform)


def test_an_old_python_is_told_so(bootstrap: ModuleType) -> None:
    bootstrap.check_python((3, 11))
    bootstrap.check_python((3, 14))
    with pytest.raises(bootstrap.BootstrapError, match="3.11 or newer.*this is 3.9"):
        bootstrap.check_python((3, 9))


@pytest.mark.parametrize(
    ("driver", "first"), [((12, 4), "cu125"), ((13, 1), "cu130"), ((12, 0), "cu125")]
)
def test_the_driver_chooses_the_wheels(
    bootstrap: ModuleType, driver: tuple[int, int], first: str
) -> None:
    assert bootstrap.cuda_indexes(driver)[0].endswith(first)
    assert all(int(url[-3:-1]) <= driver[0] for url in bootstrap.cuda_indexes(driver))


def test_without_a_driver_cuda_is_refused(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(bootstrap.BootstrapError, match="install the driver"):
        bootstrap.driver_cuda()


def test_a_page_that_cannot_be_had_is_no_error(bootstrap: ModuleType, tmp_path: Path) -> None:
    assert bootstrap.fetch((tmp_path / "page.html").as_uri()) == ""
    (tmp_path / "page.html").write_text("llama_cpp_python-1.2.3-py3-none-any.whl")
    assert "1.2.3" in bootstrap.fetch((tmp_path / "page.html").as_uri())


def test_every_direct_dependency_is_pinned_to_a_version_that_satisfies_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "packaging" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    pinned = {pin.partition("==")[0] for pin in pins}
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[^A-Za-z0-9._-]", text)[0].lower().replace("_", "-") for text in wanted}
    assert names <= pinned


def test_the_help_works_with_a_bare_python() -> None:
    shown = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), "run", "--help"], capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert "--cuda" in shown.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_ci_runs_exactly_the_bootstrap_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "python3 packaging/bootstrap.py test" in script.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(("flags", "amx"), [("fma avx amx_tile amx_int8", True), ("avx2", False)])
def test_processors_with_amx_are_compiled_for_without_it(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, amx: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags : {flags}\n")
    assert bootstrap.has_amx(cpuinfo) is amx
    assert not bootstrap.has_amx(tmp_path / "not there")
    monkeypatch.setattr(bootstrap, "has_amx", lambda: amx)
    monkeypatch.setenv("CFLAGS", "-O3")
    assert bootstrap.compiler_flags().get("CFLAGS", "").startswith("-O3 -mno-amx") is amx
