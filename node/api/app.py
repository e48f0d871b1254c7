"""The ASGI application of a node, put together from its routes and its guard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from node import __version__
from node.api.admin import add_admin_routes
from node.api.errors import http_exception_response
from node.api.gate import Gate
from node.api.guard import Guard
from node.api.routes import add_public_routes
from node.api.security import AccessRules, check_bind
from node.api.service import Service
from node.base import Pool
from node.config import NodeConfig, Setting

__all__ = ["create_app"]


def create_app(
    pool: Pool,
    config: NodeConfig,
    *,
    settings: Sequence[Setting],
    admin_token: str,
    shutdown: Callable[[], None],
) -> FastAPI:
    """Build the application.

    Args:
        settings: shown by the config route, with secrets blanked.
        admin_token: what the routes under /ingle/v1 ask for.
        shutdown: called once by the shutdown route; must return at once.

    Raises:
        ConfigError: the configuration would expose the node without a key.
    """
    check_bind(config.api)
    service = Service(pool, config, settings, shutdown, Gate(config.api.queue_limit))
    # No generated documentation: its pages load scripts from elsewhere.
    app = FastAPI(
        title="Inglenook",
        version=__version__,
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: http_exception_response},
    )
    add_public_routes(app, service)
    add_admin_routes(app, service)
    app.add_middleware(Guard, rules=AccessRules.from_config(config.api, admin_token))
    return app
