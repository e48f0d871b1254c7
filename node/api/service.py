"""What every route needs: the pool, the settings, the gate and the metrics of one node."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from node import __version__
from node.api.gate import Gate
from node.api.metrics import Metrics
from node.base import Pool
from node.config import NodeConfig, Setting
from node.errors import NotFound

__all__ = ["FINGERPRINT", "Service"]

FINGERPRINT = f"inglenook-{__version__}"


@dataclass(frozen=True, slots=True)
class Service:
    pool: Pool
    config: NodeConfig
    settings: Sequence[Setting]
    shutdown: Callable[[], None]
    gate: Gate
    metrics: Metrics = field(default_factory=Metrics)
    started_s: float = field(default_factory=time.time)

    def resolve(self, name: str) -> str:
        """The id of an installed model, with the error clients of OpenAI expect."""
        try:
            return self.pool.resolve(name)
        except NotFound as error:
            raise NotFound(error.message, param="model", code="model_not_found") from error
