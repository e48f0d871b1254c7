"""Every setting of a node, its default, where its value came from, and nothing else.

Precedence: flag > environment (`INGLE_SECTION_KEY`) > `config.toml` > default, resolved in
`load_config`. An unknown key or a value of the wrong kind is an error that names it.
"""

from __future__ import annotations

import math
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from node.errors import ConfigError

__all__ = [
    "ApiConfig",
    "EngineConfig",
    "KVCacheConfig",
    "ModelsConfig",
    "NodeConfig",
    "SECRET_KEYS",
    "SamplingConfig",
    "Setting",
    "load_config",
    "settings",
]


SECRET_KEYS = frozenset({"api.key", "api.keys"})  # never shown


def _key(default: Any, text: str, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": text, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class ApiConfig:
    host: str = _key("127.0.0.1", "Address to listen on. Anything but loopback needs `api.key`.")
    port: int = _key(4663, "TCP port; 0 takes a free one.", 0, 65535)
    key: str | None = _key(None, "Key that clients must send as `Authorization: Bearer KEY`.")
    keys: tuple[str, ...] = _key(
        (), "More keys. Callers with different keys never share computed state."
    )
    allowed_hosts: tuple[str, ...] = _key((), "More names accepted in the Host header.")
    allowed_origins: tuple[str, ...] = _key((), "Browser origins accepted, as scheme://host:port.")
    queue_limit: int = _key(512, "Requests that may wait before new ones get 429.", 1, 100_000)
    max_body_bytes: int = _key(32 * 2**20, "Largest request body.", 1024)
    keepalive_s: float = _key(10.0, "Longest silence of a stream before a comment line.", 0.1, 15)
    tokenizer_input_bytes: int = _key(8 * 2**20, "Largest text of one prompt.", 1024)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    n_ctx: int | None = _key(None, "Context cells of a model; default: from the plan.", 64, 2**24)
    n_batch: int = _key(512, "Most tokens computed in one step.", 16, 16384)
    max_sequences: int = _key(64, "Sequences a model holds at once, live and idle.", 1, 255)
    threads: int | None = _key(None, "CPU threads; default: follow the machine's load.", 1, 1024)
    gpu_layers: int | None = _key(None, "Layers on the GPU; default: from the plan.", 0, 10_000)
    kv_type: Literal["f16", "q8_0"] | None = _key(None, "Type of the KV cache; default: the plan.")
    keep_alive_s: float = _key(1800.0, "Idle time after which a model is unloaded; 0: never.", 0)
    token_gap_ms: float = _key(100.0, "Gap between tokens that long prompts should respect.", 1)
    load_timeout_s: float = _key(300.0, "Longest time a model may take to load.", 1)
    memory_limit_bytes: int | None = _key(None, "RAM all loaded models may use; default: free.", 1)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    dram: bool = _key(True, "Keep computed state in main memory.")
    dram_bytes: int | None = _key(None, "Its size for each loaded model; default: 25 % of RAM.", 0)
    ssd: bool = _key(True, "Keep computed state on disk, across restarts.")
    ssd_bytes: int | None = _key(
        None, "Most bytes of all files there; default: 20 GB, at most 20 % of what it could use.", 0
    )
    ssd_free_floor_bytes: int = _key(5 * 10**9, "Free space that is never used up.", 0)
    ssd_write_bytes_per_day: int = _key(100 * 10**9, "Most bytes written in a day.", 0)
    path: str | None = _key(None, "Folder of the files; default: `kv` in the cache folder.")
    flush_interval_s: float = _key(2.0, "Longest time computed state is on no disk.", 0.1, 3600)
    snapshot_blocks: int = _key(
        8, "Snapshots of state that cannot be cut: one in so many blocks of 64 tokens.", 1, 4096
    )
    ssd_read_bytes_per_s: float = _key(0.0, "Pretend the disk reads no faster; 0: do not.", 0)


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    default: str = _key("smollm2:135m", "Model used when a request names `local` or `auto`.")
    discover: bool = _key(True, "Find GGUF files that other programs downloaded.")


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    temperature: float = _key(0.8, "Used when a request does not say.", 0, 5)
    top_p: float = _key(0.95, "Used when a request does not say.", 0, 1)
    top_k: int = _key(40, "Used when a request does not say; 0: off.", 0, 10_000_000)
    min_p: float = _key(0.05, "Used when a request does not say.", 0, 1)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """All sections. Build it with `load_config`; the default is `NodeConfig()`."""

    api: ApiConfig = ApiConfig()
    engine: EngineConfig = EngineConfig()
    kvcache: KVCacheConfig = KVCacheConfig()
    models: ModelsConfig = ModelsConfig()
    sampling: SamplingConfig = SamplingConfig()


class Setting(NamedTuple):
    """One key with its value and where that came from: flag, environment, file or default."""

    key: str
    value: Any
    source: str
    default: Any
    help: str


class LoadedConfig(NamedTuple):
    config: NodeConfig
    settings: tuple[Setting, ...]


def load_config(
    file: Path | None = None,
    flags: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Resolve every key.

    Args:
        file: `config.toml`; a missing file is an empty one.
        flags: `section.key` → text, as given on the command line.
        environment: defaults to the process environment.

    Raises:
        ConfigError: unknown key, wrong type or out of bounds; names the key and the source.
    """
    flags = flags or {}
    environment = os.environ if environment is None else environment
    from_file = _read_file(file)
    known = {f"{section}.{f.name}" for section, cls in _sections() for f in fields(cls)}
    for name, where in [(k, "flag") for k in flags] + [(k, str(file)) for k in from_file]:
        if name not in known:
            raise ConfigError(f"{where}: unknown key {name!r}; see `ingle config show`", param=name)

    rows: list[Setting] = []
    sections: dict[str, Any] = {}
    for section, cls in _sections():
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for f in fields(cls):
            name = f"{section}.{f.name}"
            variable = "INGLE_" + name.upper().replace(".", "_")
            raw, source = f.default, "default"
            if name in flags:
                raw, source = flags[name], "flag"
            elif variable in environment:
                raw, source = environment[variable], f"environment {variable}"
            elif name in from_file:
                raw, source = from_file[name], f"file {file}"
            if source != "default":
                raw = _cast(name, raw, hints[f.name], f.metadata, source)
            values[f.name] = raw
            rows.append(Setting(name, raw, source, f.default, f.metadata["help"]))
        sections[section] = cls(**values)
    return LoadedConfig(NodeConfig(**sections), tuple(rows))


def settings() -> tuple[Setting, ...]:
    """Every key with its default, for help texts and the README."""
    return load_config(environment={}).settings


def _sections() -> Sequence[tuple[str, type[Any]]]:
    hints = typing.get_type_hints(NodeConfig)
    return [(f.name, hints[f.name]) for f in fields(NodeConfig)]


def _read_file(file: Path | None) -> dict[str, Any]:
    if file is None or not file.exists():
        return {}
    try:
        parsed = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{file}: {error}") from error
    flat: dict[str, Any] = {}
    for section, body in parsed.items():
        if not isinstance(body, dict):
            raise ConfigError(f"{file}: {section!r} must be a [section]", param=section)
        flat.update({f"{section}.{key}": value for key, value in body.items()})
    return flat


def _cast(name: str, raw: Any, hint: Any, metadata: Mapping[str, Any], source: str) -> Any:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = typing.get_args(hint) if union else (hint,)
    optional = type(None) in kinds
    kind = next(k for k in kinds if k is not type(None))
    if optional and isinstance(raw, str) and raw.lower() in ("", "none", "auto"):
        return None
    try:
        value = _convert(raw, kind)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} = {raw!r} ({source}): {error}", param=name) from error
    low, high = metadata["low"], metadata["high"]
    if low is not None and value < low or high is not None and value > high:
        raise ConfigError(
            f"{name} = {value!r} ({source}): must be "
            + (f"between {low} and {high}" if high is not None else f"at least {low}"),
            param=name,
        )
    return value


def _convert(raw: Any, kind: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        if raw not in typing.get_args(kind):
            raise ValueError("must be one of " + ", ".join(typing.get_args(kind)))
        return raw
    if typing.get_origin(kind) is tuple:
        items = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(items, list) or not all(isinstance(i, str) for i in items):
            raise TypeError("must be a list of strings")
        return tuple(item.strip() for item in items if item.strip())
    if kind is bool:
        truth = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if str(raw).lower() not in truth:
            raise ValueError("must be true or false")
        return truth[str(raw).lower()]
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise TypeError(f"must be {kind.__name__}")
    if kind is str and not isinstance(raw, str):
        raise TypeError("must be a string")
    if kind is int and isinstance(raw, float):
        raise TypeError("must be a whole number")
    value = kind(raw)
    if kind is float and not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value
