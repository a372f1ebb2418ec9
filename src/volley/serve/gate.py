"""Middleware for every HTTP request: API keys, body limits, request ids and the access log."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from volley.serve.config import ApiKeys, ServeConfig
from volley.serve.errors import ANTHROPIC, ApiError, as_api_error
from volley.serve.fields import IGNORED, ignored_names
from volley.serve.metrics import HttpMetrics

log = logging.getLogger("volley.serve")

_GUARDED = ("/v1/", "/tokenize", "/detokenize")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, config: ServeConfig, keys: ApiKeys, metrics: HttpMetrics) -> None:
        self.app = app
        self.config = config
        self.keys = keys
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, started = Headers(scope=scope), time.monotonic()
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["fields"] = {}
        ignored: dict[str, str] = {}
        IGNORED.set(None if self.config.strict else ignored)
        status = 499  # logged if the client disconnects before the answer begins

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = request_id
                if scope["path"].startswith(ANTHROPIC):
                    answered["request-id"] = request_id
                if ignored:
                    answered["x-volley-ignored"] = ignored_names(ignored)
                    names = [f"{name} ({remedy})" if remedy else name for name, remedy in ignored.items()]
                    told = {"request_id": request_id, "path": scope["path"], "ignored": names}
                    log.warning("unknown fields were ignored", extra={"fields": told})
            await send(message)

        try:
            try:
                key = self._check(scope, headers)
                scope["state"]["client"] = key or (scope.get("client") or [""])[0]
                await self.app(scope, self._limited(receive), tell)
            except ApiError as error:
                await error.response(scope["path"])(scope, receive, tell)
            except Exception as error:
                if status != 499:  # the answer has begun
                    raise
                log.error("a request failed", exc_info=error)
                await as_api_error(error).response(scope["path"])(scope, receive, tell)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", None) or ("/dashboard" if scope["path"].startswith("/dashboard") else "other")
            self.metrics.requests.labels(path, status).inc()
            fields = {"request_id": request_id, "method": scope["method"], "path": scope["path"], "status": status}
            fields["seconds"] = round(time.monotonic() - started, 4)
            if path not in ("/health", "/ping", "/ready", "/metrics"):
                log.info("request", extra={"fields": fields | scope["state"]["fields"]})

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """Return the API key; empty if none is required."""
        key = ""
        if scope["path"].startswith(_GUARDED) and scope["method"] != "OPTIONS":
            key = self._check_client(headers)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.config.max_body_bytes:
            raise too_large(self.config.max_body_bytes)
        return key

    def _check_client(self, headers: Mapping[str, str]) -> str:
        """Check the API key."""
        key = ""
        if self.keys:
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            given = [bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip()]
            key = next((own for own in given if own and self.keys.accepts(own)), "")
            if not key:
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        return key

    def _limited(self, receive: Receive) -> Receive:
        """Receive the body within its limits of size and time, and pass on all later messages."""
        received, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self.config.receive_timeout

        async def limited() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise Refused(
                    ApiError(408, "the body did not arrive in time", code="timeout", headers={"Connection": "close"})
                ) from None
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if received > self.config.max_body_bytes:
                    raise Refused(too_large(self.config.max_body_bytes))
            return message

        return limited


class Refused(HTTPException):
    """API error raised while FastAPI reads a body: FastAPI passes only this exception type on."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status)
        self.error = error


def too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than the {limit} bytes this server takes", headers={"Connection": "close"}
    )
