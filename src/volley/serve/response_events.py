"""Response objects of ``/v1/responses`` with their items, and the events that stream them."""

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from volley.params import SamplingParams
from volley.serve.call_reader import Part
from volley.serve.errors import ApiError
from volley.serve.events import EventDialect
from volley.serve.parsing import PlainText
from volley.serve.replies import Choice, Object, Usage
from volley.serve.responses import ResponsesRequest
from volley.serve.worker import Sketched

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponsesDialect(EventDialect):
    """Dialect of response objects and the events that stream them."""

    kind = chunk_kind = "response"
    prefix = "resp"

    def __init__(
        self,
        model: str,
        spell: Callable[[int], str],
        body: ResponsesRequest,
        params: SamplingParams,
        parser: PlainText,
    ) -> None:
        super().__init__(model, spell, parser)
        self._body, self._params = body, params
        self._items: list[Object] = []
        self._is_open = False  # the last item may receive more
        self._sent = 0
        self._created = int(time.time())
        self._finish_reason: str | None = None

    # -- called by AnswerResponse ----------------------------------------------------------------------------------------
    def opening(self, index: int, choice: Choice) -> Iterator[Object]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response(None))

    def drafted(self, event: Sketched) -> Iterator[Object]:
        """Yield an event of volley's own, because a canvas is not part of the answer. OpenAI's client passes it on."""
        draft = event.draft
        yield self._event("draft", step=draft.step, text=draft.text, token_ids=draft.token_ids)

    def closing(self, usage: Usage) -> list[Any]:
        response = self._response(usage)
        return [self._event(response["status"], response=response)]

    def failing(self, error: ApiError) -> list[Any]:
        failure = {"code": "server_error", "message": error.body["error"]["message"]}
        response = self._response(None) | {"status": "failed", "error": failure}
        return [self._event("failed", response=response)]

    # -- items ---------------------------------------------------------------------------------------------------------
    def _answer(self, usage: Usage) -> Object:
        return self._response(usage)

    def _end(self, finish_reason: str | None, choice: Choice) -> Iterator[Object]:
        self._finish_reason = finish_reason
        if not self._items:
            yield from self._take(Part("content", ""))
        yield from self._close("incomplete" if finish_reason == "length" else "completed")

    def _take(self, part: Part) -> Iterator[Object]:
        if part.kind == "call":
            yield from self._open("function_call", call_id=part.call_id, name=part.text, arguments="")
        elif part.kind == "arguments":
            self._items[-1]["arguments"] += part.text
            yield self._of_item("function_call_arguments.delta", delta=part.text)
        else:
            kind = "reasoning" if part.kind == "reasoning" else "message"
            if not self._is_open or self._items[-1]["type"] != kind:
                fields: Object = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
                yield from self._open(kind, **fields, content=[])
                yield from self._open_text(kind)
            self._items[-1]["content"][0]["text"] += part.text
            if kind == "reasoning":
                yield self._of_item("reasoning_text.delta", content_index=0, delta=part.text)
            else:
                yield self._of_item("output_text.delta", content_index=0, delta=part.text, logprobs=[])

    def _open(self, kind: str, **fields: Any) -> Iterator[Object]:
        yield from self._close("completed")
        item = {"id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._is_open = True
        yield self._event("output_item.added", output_index=len(self._items) - 1, item=_copy(item))

    def _open_text(self, kind: str) -> Iterator[Object]:
        part: Object = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"] = [part]
        yield self._of_item("content_part.added", content_index=0, part=dict(part))

    def _close(self, status: str) -> Iterator[Object]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._of_item("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            if item["type"] == "reasoning":
                yield self._of_item("reasoning_text.done", content_index=0, text=part["text"])
            else:
                yield self._of_item("output_text.done", content_index=0, text=part["text"], logprobs=[])
            yield self._of_item("content_part.done", content_index=0, part=dict(part))
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=_copy(item))

    # -- objects -------------------------------------------------------------------------------------------------------
    def _of_item(self, name: str, /, **fields: Any) -> Object:
        return self._event(name, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, name: str, /, **fields: Any) -> Object:
        self._sent += 1
        return {"type": f"response.{name}", "sequence_number": self._sent - 1, **fields}

    def _response(self, usage: Usage | None) -> Object:
        body, is_cut = self._body, self._finish_reason == "length"
        status = "in_progress" if usage is None else "incomplete" if is_cut else "completed"
        choice = body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump()
        form = body.text.format
        return {
            "id": self._frame["id"],
            "object": "response",
            "created_at": self._created,
            "model": self._frame["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "output": [_copy(item) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": self._params.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": choice,
            "tools": [tool.model_dump() for tool in body.tools],
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
            "metadata": {},
        }

    def _usage(self, usage: Usage) -> Object:
        own = usage.to_json()
        return {
            "input_tokens": own["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": own["completion_tokens"],
            "output_tokens_details": own["completion_tokens_details"]
            | {"reasoning_tokens": self._parser.reasoning_tokens},
            "total_tokens": own["total_tokens"],
        }


def _copy(item: Object) -> Object:
    """Return a copy of an item in its current state."""
    return {key: [dict(part) for part in value] if isinstance(value, list) else value for key, value in item.items()}
