"""Sends one job's answer, whole or as a stream; aborts the job when the client disconnects or its time is over."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from volley.serve.errors import JSON, as_api_error, took_too_long
from volley.serve.replies import Choice, Dialect, Usage
from volley.serve.worker import End, Failure, Job, Piece, Scored, Sketched, Worker

log = logging.getLogger("volley.serve")

LAST_WORDS_SECONDS = 5.0  # a client that is still reading receives the error within this time
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class AnswerResponse(Response):
    """ASGI response that sends its headers with the first event, so that an earlier failure gets its own status code."""

    def __init__(
        self,
        worker: Worker,
        job: Job,
        dialect: Dialect,
        *,
        stream: bool,
        timeout: float,
        started: float,
        last_words_seconds: float = LAST_WORDS_SECONDS,
    ) -> None:
        """Abort the job ``timeout`` seconds after ``started`` (monotonic clock), then allow ``last_words_seconds`` to send the
        error to the client."""
        self.worker = worker
        self.job = job
        self.dialect = dialect
        self.stream = stream
        self.timeout, self.started = timeout, started
        self.last_words_seconds = last_words_seconds
        self.background = None
        prompts = {id(prompt): (choice, prompt) for choice, prompt in reversed(list(enumerate(job.prompts)))}
        self._first_choices = {choice for choice, _ in prompts.values()}  # one for each prompt
        self.usage = Usage(prompt=sum(len(prompt) for _, prompt in prompts.values()))
        self.choices = [Choice() for _ in job.prompts]
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            self._begun = True
            await send(message)

        work = asyncio.create_task(self._stream(tell) if self.stream else self._whole(scope, receive, tell))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            left = max(0.0, self.started + self.timeout - time.monotonic())
            done, _ = await asyncio.wait((work, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            error = work.exception() if work in done else None
            if not done:
                await _cancel(work)
                self.worker.abort(self.job)
                error = took_too_long(self.timeout)
            if isinstance(error, Exception) and gone not in done:
                with contextlib.suppress(TimeoutError):  # the client may have stopped reading
                    async with asyncio.timeout(self.last_words_seconds):
                        await self._complain(error, scope, receive, send)
        finally:
            await _cancel(work, gone)
            self.worker.abort(self.job)
            self._note(scope)

    async def _events(self) -> AsyncIterator[Scored | Piece | Sketched | End]:
        """Yield the job's events until every choice has ended. Raises the error of a failed job."""
        unfinished = len(self.choices)
        while unfinished:
            event = await self.job.events.get()
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, End):
                unfinished -= 1
                self.usage.add(event.stats, is_first=event.choice in self._first_choices)
                self.choices[event.choice].finish_reason = event.finish_reason
            elif isinstance(event, Scored):
                self.choices[event.choice].prompt_scores = event.scores
            elif isinstance(event, Piece):
                self.usage.add_piece(event)
            yield event

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for event in self._events():
            if isinstance(event, Piece):
                self.choices[event.choice].add(event)
        await JSON(self.dialect.whole(self.choices, self.usage))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        dialect = self.dialect
        opened: set[int] = set()
        async for event in self._events():
            if not self._begun:
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            choice = self.choices[event.choice]
            parts = [] if event.choice in opened else list(dialect.opening(event.choice, choice))
            opened.add(event.choice)
            if isinstance(event, End):
                parts += dialect.ending(event, choice)
            elif isinstance(event, Piece):
                parts += dialect.piece(event, choice)
            if parts:
                usage = self.usage if dialect.continuous_usage else None
                await _send_events(send, [dialect.chunk([part], usage) for part in parts])
            if isinstance(event, Sketched):
                await _send_events(send, list(dialect.drafted(event)))
        await _send_events(send, dialect.closing(self.usage), more=False)

    async def _complain(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        known = as_api_error(error)
        if known.status == 500:
            log.error("an answer failed", exc_info=error)
        if not self._begun:
            await known.response(scope["path"])(scope, receive, send)
        elif self.stream:
            await _send_events(send, self.dialect.failing(known), more=False)

    def _note(self, scope: Scope) -> None:
        """Record what the access log says about this request."""
        usage = self.usage.to_json()
        scope.setdefault("state", {}).setdefault("fields", {}).update(
            {
                "prompt_tokens": usage["prompt_tokens"],
                "completion_tokens": usage["completion_tokens"],
                "acceptance_length": usage["completion_tokens_details"]["acceptance_length"],
                "finish_reason": [choice.finish_reason for choice in self.choices],
            }
        )


async def _send_events(send: Send, objects: list[Any], *, more: bool = True) -> None:
    body = "".join(map(_as_event, objects)).encode("ascii")
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _as_event(item: Any) -> str:
    """Return a server-sent event. An object with a ``type`` becomes an event of that name."""
    line = item if isinstance(item, str) else json.dumps(item, separators=(",", ":"))
    name = f"event: {item['type']}\n" if isinstance(item, dict) and "type" in item else ""
    return f"{name}data: {line}\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
