"""Where a node keeps its things: one folder under `--home`, or the platform's own places."""

from __future__ import annotations

import os
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
        # Not `user_runtime_dir` on a headless Linux: /run/user/UID may not exist there.
        Path(dirs.user_runtime_dir)
        if Path(dirs.user_runtime_dir).parent.exists()
        else Path(dirs.user_state_dir) / "run",
    )
