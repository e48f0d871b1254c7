"""Settings: which source wins, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node.config import NodeConfig, load_config, settings
from node.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_without_any_source_every_value_is_the_default() -> None:
    loaded = load_config(environment={})
    assert loaded.config == NodeConfig()
    assert {row.source for row in loaded.settings} == {"default"}


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[engine]\nn_ctx = 1024\nn_batch = 64\nthreads = 1\n")
    loaded = load_config(
        file,
        {"engine.n_ctx": "4096"},
        {"INGLE_ENGINE_N_CTX": "2048", "INGLE_ENGINE_N_BATCH": "128"},
    )
    engine = loaded.config.engine
    assert (engine.n_ctx, engine.n_batch, engine.threads) == (4096, 128, 1)
    sources = {row.key: row.source for row in loaded.settings}
    assert sources["engine.n_ctx"] == "flag"
    assert sources["engine.n_batch"] == "environment INGLE_ENGINE_N_BATCH"
    assert sources["engine.threads"] == f"file {file}"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("api.port", "0", 0),
        ("api.allowed_hosts", "a.lan, b.lan", ("a.lan", "b.lan")),
        ("engine.n_ctx", "auto", None),
        ("engine.kv_type", "q8_0", "q8_0"),
        ("engine.keep_alive_s", "0", 0.0),
        ("models.discover", "no", False),
        ("sampling.temperature", "0.5", 0.5),
    ],
)
def test_text_becomes_the_kind_of_the_key(key: str, text: str, value: Any) -> None:
    rows = load_config(flags={key: text}, environment={}).settings
    assert next(row.value for row in rows if row.key == key) == value


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("api.port", "70000"),
        ("api.port", "http"),
        ("engine.kv_type", "q4_0"),
        ("engine.n_ctx", "-1"),
        ("models.discover", "perhaps"),
        ("sampling.temperature", "nan"),
        ("engine.token_gap_ms", "inf"),
        ("engine.nctx", "1"),
    ],
)
def test_a_bad_value_or_key_is_an_error_that_names_the_key(key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags={key: text}, environment={})
    assert key in caught.value.message
    assert caught.value.param == key


@pytest.mark.parametrize(
    "text", ["[engine]\nn_ctx = 1.5\n", "engine = 1\n", "[engine\n", "[engine]\nodd = 1\n"]
)
def test_a_bad_file_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match="config.toml|engine.n_ctx"):
        load_config(file, environment={})


def test_every_setting_has_a_help_text() -> None:
    assert all(row.help.strip() for row in settings())
