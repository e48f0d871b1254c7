"""What may import what, and what must not be anywhere in the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cli", "node", "kvcache", "router")
ALLOWED = {
    "cli": {"cli", "node"},
    "node": {"node", "kvcache", "router"},
    "kvcache": {"kvcache"},
    "router": {"router"},
}
ONLY_IN = {
    "llama_cpp": {"node/engine/llama.py", "node/engine/llama_sampling.py"},
    "psutil": {"node/hardware.py"},
    "pynvml": {"node/hardware.py"},
}
MAX_LINES = 470


def sources() -> list[Path]:
    return sorted(
        path
        for folder in (*PACKAGES, "packaging", "tests")
        for path in (ROOT / folder).rglob("*.py")
    )


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules imported anywhere, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_module_level(tree: ast.Module) -> Iterator[str]:
    statements: list[ast.stmt] = list(tree.body)
    for statement in statements:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            continue
        if isinstance(statement, ast.If | ast.Try):
            statements += [s for s in ast.iter_child_nodes(statement) if isinstance(s, ast.stmt)]
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from imports(ast.Module([statement], []))


def product_sources() -> list[Path]:
    return [path for path in sources() if name_of(path).split("/")[0] in PACKAGES]


@pytest.mark.parametrize("path", product_sources(), ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    package = name_of(path).split("/")[0]
    used = {name.split(".")[0] for name in imports(ast.parse(path.read_text(encoding="utf-8")))}
    assert (used & {*PACKAGES, "tests", "packaging"}) <= ALLOWED[package]


@pytest.mark.parametrize("path", product_sources(), ids=name_of)
def test_foreign_libraries_have_one_home(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {name.split(".")[0] for name in imports(tree)}
    assert not {lib for lib, homes in ONLY_IN.items() if lib in used and name_of(path) not in homes}
    assert not {"pickle", "shelve", "marshal", "dill"} & used, "files are our own framed format"
    assert not {"torch", "llama_cpp"} & {
        name.split(".")[0] for name in at_module_level(tree) if name_of(path) not in _llama_home()
    }


def _llama_home() -> set[str]:
    return ONLY_IN["llama_cpp"]


@pytest.mark.parametrize("path", product_sources(), ids=name_of)
def test_nothing_evaluates_text(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", product_sources(), ids=name_of)
def test_secrets_are_not_compared_by_operator(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    compared = {
        ast.unparse(side).lower().rsplit(".", 1)[-1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq)
        for side in (node.left, *node.comparators)
    }
    assert not compared & {"api_key", "admin_token", "authorization", "secret", "password"}


def test_modules_are_short() -> None:
    lengths = {name_of(p): len(p.read_text(encoding="utf-8").splitlines()) for p in sources()}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_the_packaging_folder_does_not_shadow_the_library_of_that_name() -> None:
    assert not (ROOT / "packaging" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        ("node.daemon, node.api.app, node.pool", {"llama_cpp", "torch"}),
        ("cli.main", {"llama_cpp", "torch", "httpx", "rich", "node.daemon", "node.api", "numpy"}),
        ("kvcache, router", {"node", "cli", "llama_cpp", "torch"}),
    ],
)
def test_importing_stays_light(modules: str, forbidden: set[str]) -> None:
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not forbidden & set(loaded.stdout.split())


def test_showing_help_loads_no_more_than_the_command_line() -> None:
    code = (
        "import sys; from cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Commands" in shown.stdout
    assert not {"torch", "llama_cpp", "httpx", "node.daemon"} & set(shown.stderr.split())
