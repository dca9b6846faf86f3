"""ApiError: an answer that is an error, in the shape of the OpenAI API."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hfpaged.errors import (
    EngineBusyError,
    EngineDeadError,
    HfpagedError,
    InputError,
    InvalidScoresError,
    RequestTooLargeError,
    UnsupportedOptionError,
)
from hfpaged.text.surrogates import without_lone_surrogates

logger = logging.getLogger(__name__)

INVALID = "invalid_request_error"
LONGEST_NAME = 100


class ApiError(Exception):
    """Raised by a handler; becomes the response.

    Attributes:
        param: the request's field that it is about.
        code: short name of the reason.
    """

    def __init__(
        self, status: int, message: str, *, kind: str = INVALID, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code
        # Both may quote the request.
        self.message = without_lone_surrogates(message)
        self.param = None if param is None else without_lone_surrogates(param)

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole response."""
        headers = {"Retry-After": "1"} if self.status == 503 else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(msgspec.json.encode(self.body()), self.status, headers, "application/json")


def unsupported(param: str, message: str) -> ApiError:
    """A field, or a value of one, that the API has and this server does not."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def api_error_of(error: BaseException) -> ApiError:
    """What to answer when generation raised `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (EngineDeadError, EngineBusyError)):
        code = "engine_dead" if isinstance(error, EngineDeadError) else "overloaded"
        return ApiError(503, str(error), kind="server_error", code=code)
    if isinstance(error, RequestTooLargeError):
        return ApiError(400, str(error), param="max_tokens", code="context_length_exceeded")
    if isinstance(error, (InputError, UnsupportedOptionError, InvalidScoresError)):
        return ApiError(400, str(error))
    # Details may have paths or other people's data in them: they are for the log.
    logger.error("hfpaged: a request failed", exc_info=error)
    return ApiError(500, "the server failed to answer this request", kind="server_error", code="internal_error")


async def on_api_error(_: Request, error: ApiError) -> Response:
    return error.response()


async def on_engine_error(_: Request, error: HfpagedError) -> Response:
    return api_error_of(error).response()


async def on_http_error(_: Request, error: HTTPException) -> Response:
    return ApiError(error.status_code, str(error.detail)).response()


async def on_validation_error(_: Request, error: RequestValidationError) -> Response:
    """Name the first field that is wrong; the values stay out of it, they may be anything."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json").response()
    path = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(path)[:LONGEST_NAME] or None
    if first["type"] == "extra_forbidden":
        return unsupported(param, f"unknown or unsupported field {param!r}").response()
    return ApiError(400, f"{param or 'body'}: {first['msg']}", param=param, code="invalid_value").response()
