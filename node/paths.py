"""Where a node keeps its things: one folder under `--home`, or the platform's own places."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs

__all__ = ["NodePaths", "node_paths"]

_APP = "inglenook"


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Folders of one node. `create` makes them; nothing else does."""

    config: Path
    data: Path
    cache: Path
    state: Path
    runtime: Path

    @property
    def config_file(self) -> Path:
        return self.config / "config.toml"

    @property
    def models(self) -> Path:
        return self.data / "models"

    @property
    def kv(self) -> Path:
        return self.cache / "kv"

    @property
    def calibration_file(self) -> Path:
        """JSON: what moving and computing state costs on this machine, by model."""
        return self.state / "calibration.json"

    @property
    def log_file(self) -> Path:
        return self.state / "node.log"

    @property
    def daemon_file(self) -> Path:
        """JSON with pid, host, port and version of the running daemon."""
        return self.runtime / "daemon.json"

    @property
    def admin_token_file(self) -> Path:
        return self.runtime / "admin-token"

    def create(self) -> None:
        """Make every folder, readable by this user only."""
        for folder in (self.config, self.data, self.cache, self.state, self.runtime, self.models):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def node_paths(home: str | os.PathLike[str] | None = None) -> NodePaths:
    """Paths under `home`, else under `INGLE_HOME`, else the platform's own folders."""
    root = home or os.environ.get("INGLE_HOME")
    if root:
        base = Path(root).expanduser().absolute()
        return NodePaths(
            base / "config", base / "data", base / "cache", base / "state", base / "run"
        )
    dirs = platformdirs.PlatformDirs(_APP, appauthor=False)
    return NodePaths(
        Path(dirs.user_config_dir),
        Path(dirs.user_data_dir),
        Path(dirs.user_cache_dir),
        Path(dirs.user_state_dir),
        _runtime_dir(dirs),
    )


def _runtime_dir(dirs: platformdirs.PlatformDirs) -> Path:
    """A headless Linux may lack /run/user/UID; a folder beside the state is then safer than the
    one that platformdirs takes in /tmp, which another user may have made."""
    if not sys.platform.startswith("linux"):
        return Path(dirs.user_runtime_dir)
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    return base / _APP if base.is_dir() else Path(dirs.user_state_dir) / "run"
