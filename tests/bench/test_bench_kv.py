"""`bench kv`: the floor is what no earlier request had, and the node reaches it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.bench.kv import _load, run
from cli.bench.ledger import Ledger
from cli.main import app
from node.models import InstalledModel, ModelStore, pull
from node.paths import node_paths

pytestmark = pytest.mark.model


@pytest.fixture
def model(model_path: Path, tmp_path: Path) -> InstalledModel:
    paths = node_paths(tmp_path)
    paths.create()
    return pull(ModelStore(paths, discover=False), f"file:{model_path}=small")


def test_the_floor_counts_tokens_that_no_request_had(model: InstalledModel) -> None:
    ledger = Ledger(_load(model))
    try:
        talk = [{"role": "user", "content": "Tell me of rivers."}]
        tokens = ledger.tokens(talk)
        assert ledger.floor(tokens) == len(tokens)
        ledger.note(tokens, "Rivers flow.", cut_short=False)
        assert ledger.floor(tokens) == 1, "the last token is computed for its logits"
        longer = [*talk, {"role": "assistant", "content": "Rivers flow."}, talk[0]]
        had = len(tokens) + len(ledger.tokenize(["Rivers flow."], add_bos=False))
        assert ledger.floor(ledger.tokens(longer)) == len(ledger.tokens(longer)) - had
        ledger.forget()
        assert ledger.floor(tokens) == len(tokens)
    finally:
        ledger.close()


def test_a_restart_costs_only_what_is_new(model: InstalledModel) -> None:
    said: list[str] = []
    report = run(model, ["S4"], 1, said.append)
    rows = {(row["scenario"], row["metric"]): row for row in json.loads(report.json())["results"]}
    s4 = rows["S4", "prompt_tokens_computed"]
    assert s4["floor"] <= s4["value"] <= s4["floor"] + 2 * s4["turns"]
    assert said[0].startswith("S4: ")


@pytest.mark.parametrize("arguments", [["--scenario", "S99"], ["--throttle", "fast"]])
def test_wrong_options_are_named(arguments: list[str]) -> None:
    done: Any = CliRunner().invoke(app, ["bench", "kv", *arguments])
    assert done.exit_code == 2 and arguments[1] in done.output
