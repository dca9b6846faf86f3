"""RequestGate: what every request passes first. Request id, access log, API key, size of the body."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hfpaged.serving.api.errors import ApiError
from hfpaged.serving.api.metrics import Metrics

access_logger = logging.getLogger("hfpaged.access")

# What a load balancer asks for; it tells nothing about anybody.
WITHOUT_KEY = frozenset({"/health", "/health/live", "/health/ready"})
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
LONGEST_PATH = 200
TOO_LARGE = "the body is larger than this server takes"


class RequestGate:
    """ASGI middleware around the whole app, so that no route is outside.

    Args:
        api_key: clients must send it as a bearer token; None: anybody may come.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, body_bytes: int, api_key: str | None):
        self._app = app
        self._metrics = metrics
        self._body_bytes = body_bytes
        # Digests of equal length, so that comparing them tells nothing about the key's.
        self._key_digest = _digest(api_key) if api_key is not None else None
        self._known_paths = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"}
        self._known_paths |= {"/metrics", "/openapi.json", *WITHOUT_KEY}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        log: dict[str, Any] = {"request_id": _request_id(headers), "status": 0}
        scope.setdefault("state", {})["log"] = log
        began = time.perf_counter()

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                log["status"] = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = log["request_id"]
            await send(message)

        try:
            await self._pass(scope, headers, receive, send_noting)
        finally:
            self._write_log(scope, log, time.perf_counter() - began)

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if not self._may_enter(scope, headers):
            error = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            await error.response()(scope, receive, send)
            return
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._body_bytes:
            response = ApiError(413, TOO_LARGE, code="request_too_large").response()
            # Nobody is going to read the rest of it.
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        await self._app(scope, _LimitedBody(receive, self._body_bytes), send)

    def _may_enter(self, scope: Scope, headers: Headers) -> bool:
        # Browsers ask whether they may send a key before they send it.
        if self._key_digest is None or scope["path"] in WITHOUT_KEY or scope["method"] == "OPTIONS":
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(_digest(key.strip()), self._key_digest)

    def _write_log(self, scope: Scope, log: dict[str, Any], seconds: float) -> None:
        path = scope["path"]
        # A label for each path that somebody makes up would be a leak.
        self._metrics.responses.labels(path if path in self._known_paths else "other", str(log["status"])).inc()
        if not access_logger.isEnabledFor(logging.INFO):
            return
        client = scope.get("client")
        entry = {
            "time": time.time(),
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": path[:LONGEST_PATH],
            "seconds": round(seconds, 4),
            **log,
        }
        access_logger.info(msgspec.json.encode(entry).decode())


class _LimitedBody:
    """A `receive` that raises once the body is too long."""

    def __init__(self, receive: Receive, limit: int):
        self._receive = receive
        self._left = limit

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            # The one kind of error that FastAPI passes on from reading a body.
            raise HTTPException(413, TOO_LARGE)
        return message


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
