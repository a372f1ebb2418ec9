"""Turn a request's output tokens into text, chunks of streamed text, and drafts of its canvas."""

from collections.abc import Sequence

from volley.decode.canvas import Canvas
from volley.decode.detokenize import Detokenizer
from volley.decode.stops import StopFinder
from volley.results import MASKED, CanvasDraft, FinishReason, TextChunk


class TextWriter:
    def __init__(
        self, detokenizer: Detokenizer, stop_token_ids: frozenset[int], stops: StopFinder | None = None
    ) -> None:
        """Write the text of one request, which hides ``stop_token_ids`` and ends before the strings of ``stops``."""
        self.detokenizer, self.stops = detokenizer, stops
        self.text = ""
        self.chunks: list[TextChunk] = []
        self.is_streamed = True
        """True if chunks may be taken. Otherwise none are made, and the tokens of a step become text together."""
        self.waiting: list[tuple[int, bool]] = []
        """Output tokens without text so far, each with True if it comes from a draft."""
        self._stop_token_ids = stop_token_ids
        self._emitted = 0  # characters that chunks hold
        self._shown = (0, 0)  # start and step of the canvas when its draft was last streamed
        self._drafted: tuple[str, list[int | None]] = ("", [])  # the draft that was streamed last

    def write(self, finish_reason: FinishReason | None) -> FinishReason | None:
        """Make the text of the waiting tokens, with a chunk for each. A token whose text fails keeps waiting.

        Return ``finish_reason``, or "stop" if a stop string ends the text.
        """
        if not self.is_streamed and self.stops is None:
            self._write_together(finish_reason)
        while self.waiting:
            token, from_draft = self.waiting[0]
            known = len(self.text)
            if token in self._stop_token_ids:
                self.text += self.detokenizer.flush()
            else:
                is_last = len(self.waiting) == 1 and finish_reason in ("stop", "length")
                self.text += self.detokenizer.push(token, last=is_last)
            if self.stops is not None and (end := self.stops.find(self.text, known, token)) is not None:
                self.text, finish_reason = self.text[:end], "stop"
            # An end that may begin a stop string is held back.
            ready = len(self.text) if finish_reason or self.stops is None else self.stops.ready(self.text)
            self.chunks.append(TextChunk(self.text[self._emitted : ready], [token], from_draft))
            self._emitted = max(self._emitted, ready)
            del self.waiting[0]
        return finish_reason

    def _write_together(self, finish_reason: FinishReason | None) -> None:
        tokens = [token for token, _ in self.waiting]
        if tokens and tokens[-1] in self._stop_token_ids:
            self.text += self.detokenizer.push_all(tokens[:-1]) + self.detokenizer.flush()
        elif tokens:
            self.text += self.detokenizer.push_all(tokens, last=finish_reason in ("stop", "length"))
        self.waiting.clear()

    def take(self) -> list[TextChunk]:
        """Return the chunks since the last call."""
        chunks, self.chunks = self.chunks, []
        return chunks

    def draft(self, canvas: Canvas, tokens: Sequence[int | None]) -> CanvasDraft | None:
        """Return a draft of the answer's ``tokens`` in ``canvas``; ``None`` if no pass has changed them since the last one."""
        now = (canvas.start, canvas.step)
        if canvas.step == 0 or now == self._shown:
            return None
        if canvas.start != self._shown[0]:  # text has replaced the last draft
            self._drafted = ("", [])
        self._shown = now
        end = next((place for place, token in enumerate(tokens) if token in self._stop_token_ids), len(tokens))
        shown = list(tokens[:end])
        text = self.text[self._emitted :] + self.detokenizer.peek(shown, MASKED)
        if (text, shown) == self._drafted:
            return None
        self._drafted = (text, shown)
        return CanvasDraft(canvas.step, text, shown)
