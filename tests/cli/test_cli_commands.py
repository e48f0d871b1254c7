"""`ingle` without a daemon: exit codes, one-line errors, JSON."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

VERBS = (
    "serve up down status ps run chat demo pull list show rm load unload logs config doctor kv "
    "bench"
).split()


def test_help_names_every_verb_and_each_has_an_example(ingle: Any) -> None:
    shown = ingle("--help").stdout
    for verb in VERBS:
        assert f"\n  {verb} " in shown
    for verb in ("serve", "run", "pull", "logs"):
        assert f"Example: ingle {verb}" in ingle(verb, "--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["ps", "--json"],
        ["run", "hello"],
        ["chat"],
        ["demo"],
        ["load", "any"],
        ["unload", "any"],
        ["kv", "flush"],
    ],
)
def test_without_a_daemon_the_exit_code_is_3_and_the_advice_one_line(
    ingle: Any, arguments: list[str]
) -> None:
    done = ingle(*arguments)
    assert done.returncode == 3
    assert done.stderr == "ingle: not running: start it with `ingle up`\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["show", "no-such-model"], 4, "no-such-model"),
        (["rm", "no-such-model"], 4, "no-such-model"),
        (["logs"], 4, "no log yet"),
        (["serve", "--set", "engine.n_ctx=many"], 2, "engine.n_ctx"),
        (["serve", "--set", "engine.odd=1"], 2, "engine.odd"),
        (["serve", "--port", "70000"], 2, "api.port"),
        (["serve", "--host", "0.0.0.0"], 2, "api.key"),
        (["pull", "file:there-is-no-such-file.gguf"], 4, "there-is-no-such-file"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(
    ingle: Any, arguments: list[str], exit_code: int, words: str
) -> None:
    done = ingle(*arguments)
    assert (done.returncode, done.stderr.count("\n")) == (exit_code, 1), done.stderr
    assert done.stderr.startswith("ingle: ") and words in done.stderr


@pytest.mark.parametrize("arguments", [["frob"], ["serve", "--set", "nonsense"], ["show"]])
def test_wrong_usage_is_2(ingle: Any, arguments: list[str]) -> None:
    done = ingle(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_verbose_adds_the_traceback(ingle: Any) -> None:
    assert "Traceback" in ingle("--verbose", "status").stderr


def test_down_without_a_daemon_is_done_already(ingle: Any) -> None:
    done = ingle("down")
    assert (done.returncode, done.stdout) == (0, "It was not running.\n")


def test_a_file_left_by_a_killed_daemon_does_not_look_like_a_running_one(
    ingle: Any, tmp_path: Path
) -> None:
    runtime = tmp_path / "home" / "run"
    runtime.mkdir(parents=True)
    (runtime / "daemon.lock").touch()
    (runtime / "daemon.json").write_text('{"pid": 1, "host": "127.0.0.1", "port": 1}')
    assert ingle("status").returncode == 3
    assert ingle("down").stdout == "It was not running.\n"


def test_a_taken_port_names_the_process_that_holds_it(ingle: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for verb in ("serve", "up"):
            done = ingle(verb, "--port", port)
            assert done.returncode == 1
            assert f"port {port} is taken by" in done.stderr
            assert "python" in done.stderr


def test_config_show_gives_value_and_source_but_not_the_key(ingle: Any, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "config"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[api]\nport = 5000\nkey = "canary-key"\n')
    done = ingle("config", "show", "--json", INGLE_ENGINE_N_CTX="2048")
    rows = {row["key"]: row for row in json.loads(done.stdout)}
    assert rows["api.port"]["value"] == 5000
    assert rows["api.port"]["source"].startswith("file ")
    assert rows["engine.n_ctx"]["source"] == "environment INGLE_ENGINE_N_CTX"
    assert "canary-key" not in done.stdout + ingle("config", "show").stdout


def test_list_is_empty_in_a_new_home_and_the_catalogue_is_not(ingle: Any) -> None:
    assert json.loads(ingle("list", "--json").stdout) == []
    assert "ingle pull" in ingle("list").stderr
    entries = json.loads(ingle("list", "--catalogue", "--json").stdout)
    assert "smollm2:135m" in {entry["name"] for entry in entries}
    assert all(entry["licence"] for entry in entries)


def test_doctor_reports_checks_with_advice(ingle: Any) -> None:
    done = ingle("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert {"python", "cpu, ram", "gpu", "llama.cpp", "disk", "models", "daemon"} <= set(checks)
    assert {check["level"] for check in checks.values()} <= {"ok", "warn", "fail"}
    assert checks["models"]["advice"] == "ingle pull smollm2:135m"
    assert done.returncode == (1 if "fail" in {c["level"] for c in checks.values()} else 0)


def test_home_option_wins_over_the_environment(ingle: Any, tmp_path: Path) -> None:
    folder = tmp_path / "other" / "config"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("[api]\nport = 5001\n")
    done = ingle("--home", str(tmp_path / "other"), "config", "show", "--json")
    assert 5001 in [row["value"] for row in json.loads(done.stdout)]


def test_version_is_printed(ingle: Any) -> None:
    assert ingle("--version").stdout.startswith("ingle ")


def test_kv_works_on_the_files_without_a_daemon(ingle: Any) -> None:
    stats = json.loads(ingle("kv", "stats", "--json").stdout)
    assert (stats["ssd"]["files"], stats["models"]) == (0, [])
    assert json.loads(ingle("kv", "ls", "--json").stdout) == []
    assert json.loads(ingle("kv", "verify", "--json").stdout)["files"] == 0
    assert "evicted 0" in ingle("kv", "gc").stdout
    assert json.loads(ingle("kv", "purge", "--yes", "--json").stdout) == {"files": 0}
    missing = ingle("kv", "purge", "abc", "--yes")
    assert missing.returncode == 4 and "ingle kv ls" in missing.stderr
    assert ingle("kv", "purge").returncode == 1, "nobody was there to say yes"
