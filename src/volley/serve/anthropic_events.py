"""Response objects of ``/v1/messages`` in Anthropic's form, and the events that stream them."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from volley.serve.call_reader import Part
from volley.serve.errors import ApiError
from volley.serve.events import EventDialect
from volley.serve.parsing import PlainText
from volley.serve.replies import Choice, Object, Usage

_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class MessagesDialect(EventDialect):
    kind = chunk_kind = "message"
    prefix = "msg"

    def __init__(
        self,
        model: str,
        spell: Callable[[int], str],
        prompt: Sequence[int],
        stops: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        parser: PlainText,
    ) -> None:
        """Create the dialect. ``decode`` returns the text of tokens including special ones; ``stops`` are searched in it."""
        super().__init__(model, spell, parser)
        self._prompt, self._stops, self._decode = prompt, stops, decode
        self._blocks: list[Object] = []
        self._inputs: list[str] = []
        """JSON input of each block; empty for blocks without input."""
        self._is_open = False  # the last block may receive more
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def opening(self, index: int, choice: Choice) -> Iterator[Object]:
        yield {"type": "message_start", "message": self._message(self._usage(Usage(prompt=len(self._prompt))))}
        yield {"type": "ping"}

    def closing(self, usage: Usage) -> list[Any]:
        end = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return [{"type": "message_delta", "delta": end, "usage": self._usage(usage)}, {"type": "message_stop"}]

    def failing(self, error: ApiError) -> list[Any]:
        return [error.as_anthropic()]

    # -- blocks --------------------------------------------------------------------------------------------------------
    def _take(self, part: Part) -> Iterator[Object]:
        if part.kind == "call":
            yield from self._open({"type": "tool_use", "id": part.call_id, "name": part.text, "input": {}})
            return
        if part.kind == "arguments":
            self._inputs[-1] += part.text
            yield self._added({"type": "input_json_delta", "partial_json": part.text})
            return
        kind = "thinking" if part.kind == "reasoning" else "text"
        if not self._is_open or self._blocks[-1]["type"] != kind:
            block = (
                {"type": "thinking", "thinking": "", "signature": ""}
                if kind == "thinking"
                else {"type": kind, kind: ""}
            )
            yield from self._open(block)
        self._blocks[-1][kind] += part.text
        name, field = _DELTAS[kind]
        yield self._added({"type": name, field: part.text})

    def _end(self, finish_reason: str | None, choice: Choice) -> Iterator[Object]:
        if not self._blocks:
            yield from self._open({"type": "text", "text": ""})
        yield from self._close()
        self._stop_sequence = self._found(choice) if finish_reason == "stop" else None
        if finish_reason == "length":
            self._stop_reason = "max_tokens"
        elif self._stop_sequence is not None:
            self._stop_reason = "stop_sequence"
        else:
            self._stop_reason = "tool_use" if self._parser.num_calls else "end_turn"

    def _found(self, choice: Choice) -> str | None:
        """Return the stop sequence that ended the answer. The choice's tokens still contain it; its text does not."""
        if not self._stops:
            return None
        text = self._decode(choice.token_ids)
        places = {stop: text.find(stop) for stop in self._stops}
        return min(
            (stop for stop, at in places.items() if at >= 0),
            key=lambda stop: (places[stop] + len(stop), places[stop]),
            default=None,
        )

    def _open(self, block: Object) -> Iterator[Object]:
        yield from self._close()
        self._blocks.append(block)
        self._inputs.append("")
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _added(self, delta: Object) -> Object:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[Object]:
        if self._is_open:
            self._is_open = False
            if self._blocks[-1]["type"] == "tool_use":
                self._blocks[-1]["input"] = _object(self._inputs[-1])
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    # -- objects -------------------------------------------------------------------------------------------------------
    def _answer(self, usage: Usage) -> Object:
        return self._message(self._usage(usage))

    def _message(self, usage: Object) -> Object:
        return {
            "id": self._frame["id"],
            "type": "message",
            "role": "assistant",
            "model": self._frame["model"],
            "content": [dict(block) for block in self._blocks],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": usage,
        }

    def _usage(self, usage: Usage) -> Object:
        """Return token counts. Anthropic counts cached prompt tokens apart from the others."""
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
            "output_tokens_details": {"thinking_tokens": self._parser.reasoning_tokens},
        }


def _object(text: str) -> Object:
    """Parse the input of a call; return an empty object if the answer was cut within it."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
