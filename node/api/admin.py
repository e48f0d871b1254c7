"""The admin routes under /ingle/v1; the guard has checked the runtime token before they run."""

from __future__ import annotations

import os
import time
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from node import __version__
from node.api.fields import checked
from node.api.schemas import LoadBody, PurgeBody, UnloadBody
from node.api.security import ADMIN_PREFIX
from node.api.service import Service
from node.api.stream import json_response, read_json
from node.config import SECRET_KEYS, Setting
from node.engine.messages import Stats

__all__ = ["add_admin_routes"]


def add_admin_routes(app: FastAPI, service: Service) -> None:

    @app.get(ADMIN_PREFIX + "/status")
    async def status() -> Response:
        return json_response(
            {
                "version": __version__,
                "pid": os.getpid(),
                "started_s": service.started_s,
                "uptime_s": time.time() - service.started_s,
                "loading": service.pool.loading,
                "waiting": service.gate.waiting,
                "running": service.gate.running,
                "models": await service.pool.states(),
            }
        )

    @app.post(ADMIN_PREFIX + "/models/load")
    async def load(request: Request) -> Response:
        body = checked(await read_json(request.receive), LoadBody)
        model_id = await service.pool.load(service.resolve(body.model), body.keep_alive_s)
        return json_response({"model": model_id})

    @app.post(ADMIN_PREFIX + "/models/unload")
    async def unload(request: Request) -> Response:
        body = checked(await read_json(request.receive), UnloadBody)
        return json_response({"model": await service.pool.unload(service.resolve(body.model))})

    @app.get(ADMIN_PREFIX + "/kv")
    async def kv() -> Response:
        models = [_kv(s.id, s.stats) for s in await service.pool.states() if s.stats is not None]
        return json_response({"models": models})

    @app.post(ADMIN_PREFIX + "/kv/flush")
    async def flush(request: Request) -> Response:
        await read_json(request.receive, empty_ok=True)
        return json_response({"flushed": await service.pool.flush_cache()})

    @app.post(ADMIN_PREFIX + "/kv/purge")
    async def purge(request: Request) -> Response:
        body = checked(await read_json(request.receive, empty_ok=True), PurgeBody)
        return json_response({"purged": await service.pool.purge_cache(body.namespace)})

    @app.post(ADMIN_PREFIX + "/shutdown")
    async def shutdown(request: Request) -> Response:
        await read_json(request.receive, empty_ok=True)
        service.shutdown()
        return json_response({"status": "stopping"})

    @app.get(ADMIN_PREFIX + "/config")
    async def config() -> Response:
        return json_response({"settings": [_setting(row) for row in service.settings]})


def _kv(model_id: str, stats: Stats) -> dict[str, Any]:
    """Device, DRAM and SSD of one model; prompt tokens by where their state came from."""
    lower = stats.dram_tokens_total + stats.ssd_tokens_total
    return {
        "id": model_id,
        "device": {
            "cells": stats.cells_total,
            "cells_free": stats.cells_free,
            "idle_sequences": stats.idle_sequences,
        },
        "prompt_tokens": {
            "device": stats.cached_tokens_total - lower,
            "dram": stats.dram_tokens_total,
            "ssd": stats.ssd_tokens_total,
            "computed": stats.prompt_tokens_total - stats.cached_tokens_total,
        },
        **stats.cache,
    }


def _setting(row: Setting) -> dict[str, Any]:
    shown = row._asdict()
    if row.key in SECRET_KEYS and row.value:
        shown["value"] = "(set)"
    return shown
