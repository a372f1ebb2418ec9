"""Errors as OpenAI's API words them: one body, one table from exceptions to statuses."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from volley.errors import NonFiniteError, VolleyError
from volley.serve.worker import QueueFull, Stopped


class ApiError(Exception):
    """An answer other than success. ``param`` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = dict(headers or {})

    def response(self) -> Response:
        return JSON(self.body, self.status, self.headers)


class JSON(Response):
    """Escapes everything outside ASCII, so that nothing a client sent can fail to be encoded or split a line."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, status, headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about an exception."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            after = {"Retry-After": str(error.retry_after)}
            return ApiError(429, str(error), kind="requests", code="rate_limit_exceeded", headers=after)
        case Stopped():
            return engine_dead() if error.is_dead else shutting_down(1)
        case NonFiniteError():
            return ApiError(500, str(error), kind="server_error", code="not_finite")
        case VolleyError():
            return ApiError(400, str(error), param=error.field)
    return ApiError(500, "the request failed inside the server; its log says why", kind="server_error")


def took_too_long(seconds: float) -> ApiError:
    message = f"the request took longer than the {seconds:g} s that the server, or its header x-request-timeout, allows"
    return ApiError(504, message, kind="server_error", code="timeout")


def engine_dead() -> ApiError:
    return ApiError(503, "the engine has stopped; restart the server", kind="server_error", code="engine_dead")


def shutting_down(retry_after: float) -> ApiError:
    return ApiError(
        503,
        "the server is shutting down and takes no new requests",
        kind="server_error",
        code="shutting_down",
        headers={"Retry-After": str(max(1, round(retry_after))), "Connection": "close"},
    )


EXPECTED = (ApiError, QueueFull, Stopped, VolleyError)
"""What :func:`as_api_error` has a client's answer for; anything else is a bug."""
