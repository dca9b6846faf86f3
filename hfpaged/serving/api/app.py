"""create_app: the server as an ASGI application."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response

import hfpaged
from hfpaged.errors import HfpagedError
from hfpaged.serving.api import chat, completions, models
from hfpaged.serving.api.connection_watch import ClientGoneError
from hfpaged.serving.api.errors import ApiError, on_api_error, on_engine_error, on_http_error, on_validation_error
from hfpaged.serving.api.gate import RequestGate
from hfpaged.serving.api.server_state import ServerState

CLIENT_GONE_STATUS = 499


def create_app(
    state: ServerState,
    *,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
) -> FastAPI:
    """The whole API over one engine.

    Args:
        api_key: that clients must send as a bearer token, on every route but /health.
        cors_origins: web pages of these origins may use the API; none by default.
        allowed_hosts: values of the Host header to answer; all if empty.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if state.template is not None:
            state.template.start()
        yield
        if state.template is not None:
            state.template.close()

    # The interactive pages load scripts from elsewhere, so they are off; the document itself is there.
    app = FastAPI(title="hfpaged", version=hfpaged.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = state
    for module in (models, completions, chat):
        app.include_router(module.router)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HfpagedError, on_engine_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])
    if allowed_hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts))
    app.add_middleware(RequestGate, metrics=state.metrics, body_bytes=state.limits.body_bytes, api_key=api_key)
    _describe_errors(app)
    return app


async def _on_client_gone(_: Request, __: ClientGoneError) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)


def _describe_errors(app: FastAPI) -> None:
    """Take FastAPI's own validation error, which this server does not answer with, out of the document."""
    document: dict[str, Any] = app.openapi()
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
