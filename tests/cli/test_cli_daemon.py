"""`ingle` against a running daemon with the small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.model

MODEL = "smollm2:135m"


def test_status_and_ps_show_the_loaded_model(daemon: Any, daemon_ingle: Any) -> None:
    status = json.loads(daemon_ingle("status", "--json").stdout)
    assert status["url"] == daemon.url
    assert [model["id"] for model in status["models"]] == [MODEL]
    assert MODEL in daemon_ingle("ps").stdout
    assert f"process {status['pid']}" in daemon_ingle("status").stdout


def test_run_streams_the_answer_to_stdout_alone(daemon_ingle: Any) -> None:
    done = daemon_ingle("run", "Say", "hello.", "--max-tokens", "8", "--temperature", "0")
    assert done.returncode == 0
    assert done.stdout.strip()
    assert done.stderr == ""


def test_run_json_has_the_account_of_the_turn(daemon_ingle: Any) -> None:
    arguments = ("run", "-", "--json", "--max-tokens", "4", "--temperature", "0")
    turn = json.loads(daemon_ingle(*arguments, text="Count to three.").stdout)
    assert turn["completion_tokens"] <= 4
    assert turn["prompt_tokens"] == turn["cached_tokens"] + turn["computed_tokens"]


def test_a_refused_request_is_usage_error(daemon_ingle: Any) -> None:
    done = daemon_ingle("run", "word " * 6000)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_an_unknown_model_is_4(daemon_ingle: Any) -> None:
    assert daemon_ingle("run", "hello", "--model", "no-such-model").returncode == 4


def test_the_demo_reuses_each_step_in_the_next(daemon_ingle: Any) -> None:
    done = daemon_ingle("demo", "--json")
    report = json.loads(done.stdout)
    turns = [step["turn"] for step in report["steps"]]
    assert len(turns) >= 4 and report["model"] == MODEL
    for before, after in zip(turns, turns[1:], strict=False):
        assert after["cached_tokens"] >= before["prompt_tokens"]
    assert report["totals"]["cached_tokens"] == sum(turn["cached_tokens"] for turn in turns)


def test_chat_works_through_a_pipe(daemon_ingle: Any, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    text = f"Hello!\n/frob\n/stats\n/save {saved}\n/exit\n"
    done = daemon_ingle("chat", "--max-tokens", "8", "--temperature", "0", text=text)
    assert done.returncode == 0
    assert "1 turns" in done.stderr and "/frob is not a command" in done.stderr
    roles = [message["role"] for message in json.loads(saved.read_text())["messages"]]
    assert roles == ["user", "assistant"]


def test_a_loaded_model_is_not_removed(daemon_ingle: Any) -> None:
    done = daemon_ingle("rm", MODEL)
    assert done.returncode == 1
    assert "ingle unload" in done.stderr


def test_show_with_plan_shows_the_arithmetic(daemon_ingle: Any) -> None:
    shown = json.loads(daemon_ingle("show", MODEL, "--plan", "--json").stdout)
    assert shown["architecture"] == "llama"
    assert shown["plan"]["gpu_layers"] >= 0
    assert "Plan" in daemon_ingle("show", MODEL, "--plan").stdout


def test_up_beside_a_running_daemon_changes_nothing(daemon: Any, daemon_ingle: Any) -> None:
    done = daemon_ingle("up", "--json")
    assert json.loads(done.stdout) == {
        "url": daemon.url,
        "pid": daemon.process.pid,
        "started": False,
    }


def test_a_model_is_unloaded_and_loaded_again(daemon_ingle: Any) -> None:
    assert daemon_ingle("unload", MODEL).returncode == 0
    assert json.loads(daemon_ingle("ps", "--json").stdout) == []
    assert daemon_ingle("load", MODEL, "--keep-alive", "600").returncode == 0
    assert [m["id"] for m in json.loads(daemon_ingle("ps", "--json").stdout)] == [MODEL]


def test_the_log_holds_no_prompt(daemon_ingle: Any) -> None:
    daemon_ingle("run", "canary-prompt", "--max-tokens", "1")
    done = daemon_ingle("logs", "-n", "1000")
    assert done.returncode == 0 and done.stdout
    assert "canary-prompt" not in done.stdout


def test_up_and_down_manage_a_daemon_of_their_own(ingle: Any) -> None:
    started = ingle("up", "--port", "0", "--json")
    try:
        assert started.returncode == 0, started.stderr
        assert json.loads(started.stdout)["started"] is True
        assert ingle("status").returncode == 0
    finally:
        stopped = ingle("down")
    assert stopped.stdout == "Stopped.\n"
    assert ingle("status").returncode == 3


def test_kv_shows_checks_and_forgets_what_the_daemon_keeps(daemon_ingle: Any) -> None:
    words = ("Please", "remember", "this.") * 40
    prompt = ("run", *words, "--json", "--max-tokens", "4", "--temperature", "0")
    assert daemon_ingle(*prompt).returncode == 0
    assert "on the disk" in daemon_ingle("kv", "flush").stdout
    stats = json.loads(daemon_ingle("kv", "stats", "--json").stdout)
    (model,) = stats["models"]
    assert model["id"] == MODEL and model["calibration"]["prefill_token_s"] > 0
    assert stats["ssd"]["files"] >= 2 and model["dram"]["blocks"] >= 2
    assert "measured: prefill" in daemon_ingle("kv", "stats").stdout
    (row,) = json.loads(daemon_ingle("kv", "ls", "--json").stdout)
    assert row["identity"]["model"] == MODEL and row["tokens"] > 100
    counts = json.loads(daemon_ingle("kv", "verify", "--json").stdout)
    assert counts["good"] == counts["files"] >= 2
    assert daemon_ingle("kv", "purge", row["namespace"][:6], "--yes").returncode == 0
    turn = json.loads(daemon_ingle(*prompt).stdout)
    assert turn["cached_tokens"] == 0, "nothing of it was left in any tier"
