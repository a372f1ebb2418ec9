"""FastAPI application: OpenAI-compatible routes around a :class:`Service`."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

import volley
from volley.errors import did_you_mean
from volley.serve.answer import AnswerResponse
from volley.serve.anthropic import CountRequest, MessagesRequest
from volley.serve.config import ApiKeys, ServeConfig
from volley.serve.errors import EXPECTED, JSON, ApiError, as_api_error, took_too_long
from volley.serve.fields import first_problem
from volley.serve.gate import Gate, Refused
from volley.serve.metrics import HttpMetrics, render
from volley.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from volley.serve.replies import Dialect
from volley.serve.responses import ResponsesRequest
from volley.serve.service import Service
from volley.serve.worker import Job

T = TypeVar("T", ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest)
OpenJob = Callable[[Service, T, str], Awaitable[tuple[Job, Dialect]]]
"""Function ``open_job(service, body, client)`` that returns a request's job and the dialect that writes its answer."""


class Problem(BaseModel):
    """Contents of an error in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Body of an error in OpenAI's form."""

    error: Problem


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": "An error in OpenAI's form", "model": Error}
    for status in (400, 401, 404, 408, 413, 429, 500, 503, 504)
}


def create_app(service: Service, config: ServeConfig) -> FastAPI:
    """Create the application. Its lifespan starts and stops the model's worker."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start(asyncio.get_running_loop())
        for task in service.background_tasks:
            await task.start()
        try:
            yield
        finally:
            for task in service.background_tasks:
                await task.stop()
            await asyncio.to_thread(service.worker.stop)

    http = HttpMetrics()
    middleware = [Middleware(Gate, config, ApiKeys.load(config.api_key_file), http)]
    if config.cors_origins:
        cors = Middleware(CORSMiddleware, config.cors_origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    app = FastAPI(
        title="volley",
        version=volley.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        middleware=middleware,
        responses=_ERRORS,
    )
    _handle_errors(app)
    _add_routes(app, service, config)
    _add_token_routes(app, service)
    _add_status_routes(app, service, http)
    static = StaticFiles(directory=Path(__file__).parent / "static", html=True)
    app.mount("/dashboard", static)
    for operations in app.openapi()["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's default for invalid bodies; this server answers 400
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            route.methods.add("HEAD")  # load balancers send HEAD; documenting it apart would add nothing
    return app


def _add_routes(app: FastAPI, service: Service, config: ServeConfig) -> None:
    started = int(time.time())

    async def answer(body: T, request: Request, open_job: OpenJob[T]) -> Response:
        timeout = _timeout(config, request)
        service.check_name(body.model)
        if config.log_prompts:
            request.state.fields["body"] = body.model_dump(exclude_unset=True)
        started = time.monotonic()
        service.preparing += 1
        try:
            async with asyncio.timeout(timeout):
                job, dialect = await open_job(service, body, request.state.client)
        except TimeoutError:
            raise took_too_long(timeout) from None
        finally:
            service.preparing -= 1
        return AnswerResponse(service.worker, job, dialect, stream=body.stream, timeout=timeout, started=started)

    @app.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of server-sent events."""
        return await answer(body, request, Service.chat)

    @app.post("/v1/completions", response_class=Response)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts, whole or as a stream of server-sent events."""
        return await answer(body, request, Service.complete)

    @app.post("/v1/responses", response_class=Response)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation in the form of OpenAI's Responses API, whole or as a stream. No state is stored."""
        return await answer(body, request, Service.respond)

    @app.post("/v1/messages", response_class=Response)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation in the form of Anthropic's Messages API, whole or as a stream. Errors have that form too."""
        return await answer(body, request, Service.message)

    @app.post("/v1/messages/count_tokens", response_class=Response)
    async def count_tokens(body: CountRequest) -> Response:
        """Count the tokens of a conversation in the form of the Messages API."""
        return JSON(await service.count_tokens(body))

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """List the served model."""
        page = {
            "has_more": False,
            "first_id": service.model,
            "last_id": service.model,
        }  # paging fields of Anthropic's API
        return {"object": "list", "data": [service.card(started)], **page}

    @app.get("/v1/models/{model:path}", response_class=Response)
    async def one_model(model: str) -> Response:
        """Return the model with this name."""
        service.check_name(model)
        return JSON(service.card(started))


def _timeout(config: ServeConfig, request: Request) -> float:
    """Return the timeout of one request in seconds: the server's, or a shorter one from the client's header."""
    given, most = request.headers.get("x-request-timeout"), config.request_timeout
    if given is None:
        return most
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        message = f"the header x-request-timeout is {given!r}; give seconds, more than 0"
        raise ApiError(400, message, param="x-request-timeout")
    return min(seconds, most)


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", response_class=Response)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the token ids of a text or a conversation."""
        return JSON(await service.tokenize(body))

    @app.post("/detokenize", response_class=Response)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        return JSON(await service.detokenize(body))

    @app.get("/tokenizer_info", response_class=Response)
    async def tokenizer_info(model: str | None = None) -> Response:
        """Return the tokenizer's special tokens and chat template."""
        service.check_name(model)
        return JSON(service.tokenizer_info())


def _add_status_routes(app: FastAPI, service: Service, http: HttpMetrics) -> None:
    @app.get("/ping", response_class=Response)
    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """Report liveness: 200 while the engine's thread is alive. Any other status means that the server must be restarted."""
        is_alive = service.worker.is_alive
        return JSON({"status": "ok" if is_alive else "the engine has stopped"}, 200 if is_alive else 503)

    @app.get("/ready", response_class=Response)
    async def ready() -> Response:
        """Report readiness: 200 while new requests are accepted."""
        is_ready = service.worker.is_alive and not service.draining
        return JSON({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(render(http, service.model, service.metrics), media_type="text/plain; version=0.0.4")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": volley.__version__}

    @app.get("/", include_in_schema=False)
    @app.get("/dashboard", include_in_schema=False)
    async def dashboard() -> Response:
        return RedirectResponse("dashboard/")


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, param = first_problem(error.errors())
        return ApiError(400, message, param=param).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if isinstance(error, Refused):
            return error.error.response(request.url.path)
        explained = ApiError(error.status_code, _explained(error, request), headers=error.headers)
        return explained.response(request.url.path)

    @app.exception_handler(Exception)
    async def other(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.url.path)

    for kind in EXPECTED:
        app.add_exception_handler(kind, other)


_NOT_SERVED = {
    "/v1/embeddings": "embeddings are not served",
    "/v1/responses/": "responses are not kept; send the conversation with each request",
}


def _explained(error: HTTPException, request: Request) -> str:
    """Explain what is wrong with a request that matched no endpoint, and what to do instead."""
    path = request.url.path[:200]
    match error.status_code, error.__cause__:
        case 400, UnicodeDecodeError():
            return "the body is not UTF-8; send JSON in UTF-8"
        case 400, RecursionError():
            return "the body is nested too deeply to be read; nest it less deeply"
        case 404, _ if why := next((own for begin, own in _NOT_SERVED.items() if path.startswith(begin)), None):
            return f"there is nothing at {path}: {why}"
        case 404, _:
            paths = [own.path for own in request.app.routes if isinstance(own, APIRoute) and own.path != "/"]
            return f"there is nothing at {path}; {did_you_mean(path, paths) or '/openapi.json lists the paths'}"
        case 405, _:
            allowed = (error.headers or {}).get("Allow", "")
            return f"{path} does not take {request.method}; use {allowed}"
    return str(error.detail)
