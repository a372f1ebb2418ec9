"""Error responses in OpenAI's or Anthropic's form, and one table from exceptions to status codes."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from volley.errors import NonFiniteError, VolleyError
from volley.serve.worker import QueueFull, Stopped

ANTHROPIC = "/v1/messages"
"""Path prefix of Anthropic's Messages API."""
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """Error response. ``param`` names the field at fault."""

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

    def response(self, path: str = "") -> Response:
        """Return the response in OpenAI's form, or in Anthropic's for its endpoints."""
        body = self.as_anthropic() if path.startswith(ANTHROPIC) else self.body
        return JSON(body, self.status, self.headers)

    def as_anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        message, param = (self.body["error"][name] for name in ("message", "param"))
        if param is not None and param.split(".")[-1] not in str(message):  # this form has no field for it
            message = f"{param}: {message}"
        return {"type": "error", "error": {"type": kind, "message": message}}


class JSON(Response):
    """JSON response that escapes all non-ASCII characters, so that any client text can be encoded and stays on one line."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, status, headers)


def as_api_error(error: Exception) -> ApiError:
    """Return the error response for an exception."""
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
"""Exceptions that :func:`as_api_error` explains to a client. Any other exception is a bug."""
