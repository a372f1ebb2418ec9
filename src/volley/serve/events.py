"""Answers as a series of events, shared by the Responses and the Messages API."""

from collections.abc import Callable, Iterator, Sequence

from volley.serve.call_reader import Part
from volley.serve.parsing import PlainText
from volley.serve.replies import Choice, Dialect, Object, Usage
from volley.serve.worker import End, Piece


class EventDialect(Dialect):
    """Dialect of requests with one answer. A whole answer is built from the events that would stream it."""

    def __init__(self, model: str, spell: Callable[[int], str], parser: PlainText) -> None:
        """Create the dialect. ``parser`` splits the answer into parts."""
        super().__init__(model, spell)
        self._parser = parser

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Object:
        (choice,) = choices
        for _ in [*self._read(choice.texts), *self._finish(choice.finish_reason, choice)]:
            pass
        return self._answer(usage)

    def chunk(self, choices: list[Object], usage: Usage | None = None) -> Object:
        (event,) = choices
        return event

    def piece(self, piece: Piece, sent: Choice) -> Iterator[Object]:
        yield from self._read([chunk.text for chunk in piece.chunks])
        sent.add(piece)

    def ending(self, end: End, sent: Choice) -> Iterator[Object]:
        yield from self._finish(end.finish_reason, sent)

    def _read(self, texts: Sequence[str]) -> Iterator[Object]:
        for part in self._parser.read(texts):
            yield from self._take(part)

    def _finish(self, finish_reason: str | None, choice: Choice) -> Iterator[Object]:
        for part in self._parser.finish():
            yield from self._take(part)
        yield from self._end(finish_reason, choice)

    def _take(self, part: Part) -> Iterator[Object]:
        """Yield the events of one part of the answer."""
        raise NotImplementedError

    def _end(self, finish_reason: str | None, choice: Choice) -> Iterator[Object]:
        """Yield the events that end the answer."""
        raise NotImplementedError

    def _answer(self, usage: Usage) -> Object:
        """Return the whole answer, once it has ended."""
        raise NotImplementedError
