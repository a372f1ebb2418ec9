"""Response objects and chunks of OpenAI's completion endpoints, with draft statistics in the usage."""

import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

from volley.decode.sampling import Score
from volley.results import GenerationStats
from volley.serve.call_reader import Part
from volley.serve.errors import ApiError
from volley.serve.parsing import PlainText
from volley.serve.worker import End, Piece, Sketched

Object = dict[str, Any]


@dataclass
class Choice:
    """One answer, extended token by token."""

    text: str = ""
    texts: list[str] = field(default_factory=list)
    """Text of each token."""
    token_ids: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_scores: list[Score] | None = None

    def add(self, piece: Piece) -> None:
        self.texts += [chunk.text for chunk in piece.chunks]
        self.text += "".join(chunk.text for chunk in piece.chunks)
        self.token_ids += [token for chunk in piece.chunks for token in chunk.token_ids]
        self.scores += piece.scores


@dataclass
class Usage:
    """Token counts of one HTTP request over all choices."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    accepted: int = 0
    drafted: int = 0
    cycles: int = 0
    cycle_tokens: int = 0
    answered: int = 0
    """Output tokens of complete choices. The counts below cover complete choices too."""
    denoising_steps: int = 0
    canvases: int = 0
    passes: int = 0

    def add_piece(self, piece: Piece) -> None:
        self.completion += len(piece.chunks)
        self.accepted += sum(chunk.from_draft for chunk in piece.chunks)

    def add(self, stats: GenerationStats, *, is_first: bool) -> None:
        """Add a complete choice. Only a prompt's first choice reports how much of the prompt was cached."""
        self.cached += stats.cached_tokens if is_first else 0
        self.drafted += sum(stats.block_sizes) - len(stats.block_sizes)
        self.cycles += len(stats.accepted_lengths)
        self.cycle_tokens += sum(stats.accepted_lengths)
        self.answered += stats.output_tokens
        self.denoising_steps += stats.denoising_steps
        self.canvases += stats.canvases
        self.passes += stats.denoising_steps + stats.commit_passes

    def to_json(self) -> Object:
        """Return the usage as JSON. ``acceptance_length`` (τ, tokens gained per decoding cycle) and the fields on canvases are
        volley's own."""
        details = {}
        if self.denoising_steps:
            details = {
                "denoising_steps": self.denoising_steps,
                "canvases": self.canvases,
                "tokens_per_pass": round(self.answered / self.passes, 4),
                "tokens_per_forward": round(self.answered / self.denoising_steps, 4),
            }
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": max(0, self.drafted - self.accepted),  # counted at the end
                "acceptance_length": round(self.cycle_tokens / self.cycles, 4) if self.cycles else 1.0,
                **details,
            },
        }


class Dialect:
    """Response format of one endpoint: whole answers, and chunks of a stream."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(
        self,
        model: str,
        spell: Callable[[int], str],
        *,
        logprobs: bool = False,
        mark_draft: bool = False,
        include_usage: bool = False,
        continuous_usage: bool = False,
        prompts: Sequence[Sequence[int]] = (),
        prompt_logprobs: int | None = None,
        token_ids: bool = False,
    ) -> None:
        """Create the dialect. ``spell`` returns the text of a single token.

        With ``include_usage`` a stream ends with the usage; with ``continuous_usage`` every chunk has the usage so far.
        ``prompts`` holds each choice's prompt. With ``prompt_logprobs`` a whole answer has the log-probabilities of the prompt's
        tokens and of that many alternatives each. With ``token_ids`` the token ids of prompts and answers are included.
        """
        self.prompts, self.prompt_logprobs, self.token_ids = prompts, prompt_logprobs, token_ids
        self.continuous_usage = include_usage and continuous_usage
        self.spell = spell
        self.logprobs = logprobs
        self.mark_draft = mark_draft
        self.include_usage = include_usage
        self._frame = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Object:
        answers = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._frame, "object": self.kind, "choices": answers, "usage": self._usage(usage)}

    def chunk(self, choices: list[Object], usage: Usage | None = None) -> Object:
        chunk = {**self._frame, "object": self.chunk_kind, "choices": choices}
        return chunk | {"usage": usage and self._usage(usage)} if self.include_usage else chunk

    def _usage(self, usage: Usage) -> Object:
        return usage.to_json()

    def _of_prompt(self, index: int, choice: Choice) -> Object:
        """Return the fields of a whole answer that describe a choice's prompt."""
        own: Object = {"prompt_token_ids": list(self.prompts[index])} if self.token_ids else {}
        if self.prompt_logprobs is not None:
            own["prompt_logprobs"] = self._prompt_logprobs(self.prompts[index], choice, self.prompt_logprobs)
        return own

    def _ids(self, part: Choice) -> Object:
        return {"token_ids": part.token_ids} if self.token_ids else {}

    @property
    def _tells_tokens(self) -> bool:
        """Return whether a chunk describes tokens even if their text is empty."""
        return self.logprobs or self.mark_draft or self.token_ids

    def _prompt_logprobs(self, prompt: Sequence[int], choice: Choice, num_likeliest: int) -> list[Object | None]:
        """Return the prompt's log-probabilities in vLLM's form: each token and the likeliest ones with ranks; ``None`` for the
        first token."""
        assert choice.prompt_scores is not None, "a whole answer comes after its prompt"
        told: list[Object | None] = [None]
        for token, (logprob, rank, top) in zip(prompt[1:], choice.prompt_scores, strict=True):
            own = {token: self._ranked(token, logprob, rank)}
            for place, (likely, value) in enumerate(top[:num_likeliest], start=1):
                own.setdefault(likely, self._ranked(likely, value, place))
            told.append({str(one): ranked for one, ranked in own.items()})
        return told

    def _ranked(self, token: int, logprob: float, rank: int) -> Object:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.spell(token)}

    def opening(self, index: int, choice: Choice) -> Iterator[Object]:
        """Yield the first chunks of a choice, sent before its first token."""
        yield from ()

    def closing(self, usage: Usage) -> list[Any]:
        """Return the chunks that end a stream."""
        return [*([self.chunk([], usage)] if self.include_usage else []), "[DONE]"]

    def failing(self, error: ApiError) -> list[Any]:
        """Return the chunks that end a failed stream."""
        return [error.body, "[DONE]"]

    def piece(self, piece: Piece, sent: Choice) -> Iterator[Object]:
        """Yield the choices of chunks that stream ``piece``; ``sent`` was streamed before. Only ``mark_draft`` needs several
        chunks."""
        start = 0
        for drafted, group in groupby(piece.chunks, key=lambda chunk: self.mark_draft and chunk.from_draft):
            chunks, part = list(group), Choice()
            run = Piece(piece.choice, chunks, piece.scores[start : (start := start + len(chunks))])
            part.add(run)
            marked = {"from_draft": drafted} if self.mark_draft else {}
            yield from (delta | marked for delta in self._deltas(piece.choice, part, sent))
            sent.add(run)

    def drafted(self, event: Sketched) -> Iterator[Object]:
        """Yield chunks without a choice, because a canvas is not part of the answer yet."""
        draft = event.draft
        told = {"index": event.choice, "step": draft.step, "text": draft.text, "token_ids": draft.token_ids}
        yield {**self.chunk([]), "draft": told}

    def ending(self, end: End, sent: Choice) -> Iterator[Object]:
        """Yield the choices of a choice's last chunks."""
        raise NotImplementedError

    def _deltas(self, index: int, part: Choice, sent: Choice) -> Iterator[Object]:
        """Yield the choices of chunks that stream ``part``."""
        raise NotImplementedError

    def _choice(self, index: int, choice: Choice) -> Object:
        raise NotImplementedError


class ChatDialect(Dialect):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self,
        model: str,
        spell: Callable[[int], str],
        *,
        bytes_of: Callable[[int], list[int] | None],
        parsers: Sequence[PlainText],
        is_named: bool = False,
        **options: Any,
    ) -> None:
        """Create the dialect. ``bytes_of`` returns the bytes of a token if known. ``parsers`` split each choice into parts.

        ``is_named``: the request names the function to call.
        """
        super().__init__(model, spell, **options)
        self.bytes_of = bytes_of
        self.parsers = parsers
        self.is_named = is_named
        self._has_told_prompt = False

    def opening(self, index: int, choice: Choice) -> Iterator[Object]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Object:
        """Return the whole answer. As in vLLM, fields about the prompt stand beside the choices, which share it."""
        return super().whole(choices, usage) | self._of_prompt(0, choices[0])

    def chunk(self, choices: list[Object], usage: Usage | None = None) -> Object:
        own = super().chunk(choices, usage)
        if self.token_ids and not self._has_told_prompt:
            self._has_told_prompt = True
            own["prompt_token_ids"] = list(self.prompts[0])
        return own

    def _choice(self, index: int, choice: Choice) -> Object:
        parser = self.parsers[index]
        message = {"role": "assistant", "refusal": None} | _message([*parser.read(choice.texts), *parser.finish()])
        reason = self._reason(index, choice.finish_reason)
        own = {"index": index, "message": message, "logprobs": self._logprobs(choice), "finish_reason": reason}
        return own | self._ids(choice)

    def _deltas(self, index: int, part: Choice, sent: Choice) -> Iterator[Object]:
        told = {"logprobs": self._logprobs(part)} | self._ids(part)
        deltas = [_delta_of(own) for own in _merged(self.parsers[index].read(part.texts))]
        for delta in deltas or ([{}] if self._tells_tokens else []):
            yield {"index": index, "delta": delta, "finish_reason": None} | told
            told = {"logprobs": None}

    def ending(self, end: End, sent: Choice) -> Iterator[Object]:
        index = end.choice
        for part in _merged(self.parsers[index].finish()):
            yield {"index": index, "delta": _delta_of(part), "logprobs": None, "finish_reason": None}
        reason = self._reason(index, end.finish_reason)
        yield {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def _reason(self, index: int, reason: str | None) -> str | None:
        """Return the finish reason: ``tool_calls`` only for calls that the model chose to make, as in OpenAI's API."""
        called = self.parsers[index].num_calls > 0 and not self.is_named
        return "tool_calls" if reason == "stop" and called else reason

    def _usage(self, usage: Usage) -> Object:
        own = usage.to_json()
        own["completion_tokens_details"]["reasoning_tokens"] = sum(parser.reasoning_tokens for parser in self.parsers)
        return own

    def _logprobs(self, part: Choice) -> Object | None:
        if not self.logprobs:
            return None
        content = [
            {**self._token(token, logprob), "top_logprobs": [self._token(*pair) for pair in top]}
            for token, (logprob, _, top) in zip(part.token_ids, part.scores, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Object:
        return {"token": self.spell(token), "logprob": _finite(logprob), "bytes": self.bytes_of(token)}


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Join adjacent parts of one type."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last is not None and part.kind != "call" and (last.kind, last.index) == (part.kind, part.index):
            merged[-1] = replace(last, text=last.text + part.text)
        else:
            merged.append(part)
    return merged


def _delta_of(part: Part) -> Object:
    match part.kind:
        case "content":
            return {"content": part.text}
        case "reasoning":
            return {"reasoning_content": part.text}
        case "arguments":
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
    function = {"name": part.text, "arguments": ""}
    return {"tool_calls": [{"index": part.index, "id": part.call_id, "type": "function", "function": function}]}


def _message(parts: Sequence[Part]) -> Object:
    """Return the fields of a whole message."""
    content = "".join(part.text for part in parts if part.kind == "content")
    reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
    calls: list[Object] = []
    for part in _merged(parts):
        if part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            calls.append({"id": part.call_id, "type": "function", "function": function})
        elif part.kind == "arguments":
            calls[-1]["function"]["arguments"] += part.text
    message: Object = {"content": content or None if calls else content}
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True)
class Echo:
    """Prompt that is repeated before its answer."""

    text: str
    token_ids: list[int]
    in_front: int = 0
    """Characters that the tokenizer puts before the first token of the text."""


class CompletionDialect(Dialect):
    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self,
        model: str,
        spell: Callable[[int], str],
        *,
        echoes: Sequence[Echo] = (),
        num_echoed: int = 0,
        **options: Any,
    ) -> None:
        """Create the dialect. ``echoes`` has the prompt of every choice, or is empty without ``echo``. ``num_echoed`` is the
        number of echoed tokens."""
        super().__init__(model, spell, **options)
        self.echoes, self.num_echoed = echoes, num_echoed

    def opening(self, index: int, choice: Choice) -> Iterator[Object]:
        text, logprobs = "", None
        if self.echoes:
            text, logprobs = self.echoes[index].text, self._logprobs(self._prompt(index, choice), self._start(index))
        ids = {"prompt_token_ids": list(self.prompts[index]), "token_ids": []} if self.token_ids else {}
        if self.echoes or ids:
            yield {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None} | ids

    def _choice(self, index: int, choice: Choice) -> Object:
        whole = Choice()
        if self.echoes:
            whole = self._prompt(index, choice)
        whole.text += choice.text
        whole.token_ids, whole.scores = whole.token_ids + choice.token_ids, whole.scores + choice.scores
        logprobs = self._logprobs(whole, self._start(index))
        own = {"index": index, "text": whole.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        return own | self._ids(choice) | self._of_prompt(index, choice)

    def ending(self, end: End, sent: Choice) -> Iterator[Object]:
        yield self._delta(end.choice, Choice(), sent, end.finish_reason)

    def _deltas(self, index: int, part: Choice, sent: Choice) -> Iterator[Object]:
        if part.text or self._tells_tokens:
            yield self._delta(index, part, sent, None)

    def _start(self, index: int) -> int:
        """Return the text offset of the first token, which is negative if that token is no part of the text."""
        return -self.echoes[index].in_front if self.echoes else 0

    def _prompt(self, index: int, choice: Choice) -> Choice:
        """Return the prompt as if it were text of the answer. Its first token has no log-probability, because nothing precedes
        it."""
        echo, scores = self.echoes[index], choice.prompt_scores
        prompt = Choice(text=echo.text, token_ids=list(echo.token_ids))
        if scores is not None:
            own = (score._replace(likeliest=score.likeliest[: self.num_echoed]) for score in scores)
            prompt.scores = [Score(math.nan, 0, []), *own]
        return prompt

    def _delta(self, index: int, part: Choice, sent: Choice, finish_reason: str | None) -> Object:
        before = len(sent.text) + (len(self.echoes[index].text) if self.echoes else 0)
        logprobs = None if finish_reason else self._logprobs(part, before)
        own = {"index": index, "text": part.text, "logprobs": logprobs, "finish_reason": finish_reason}
        return own | self._ids(part)

    def _logprobs(self, part: Choice, start: int) -> Object | None:
        if not self.logprobs:
            return None
        tokens = [self.spell(token) for token in part.token_ids]
        chosen = [None if math.isnan(own.logprob) else _finite(own.logprob) for own in part.scores]
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": [
                None if logprob is None else self._spelt({token: logprob}, own.likeliest)
                for own, token, logprob in zip(part.scores, tokens, chosen, strict=True)
            ],
            "text_offset": [max(0, at) for at in accumulate(map(len, tokens[:-1]), initial=start)] if tokens else [],
        }

    def _spelt(self, likeliest: dict[str, float], top: list[tuple[int, float]]) -> dict[str, float]:
        """Return the likeliest tokens by text. Of several tokens with one text, the most likely one is kept."""
        for token, logprob in top:
            text = self.spell(token)
            likeliest[text] = max(_finite(logprob), likeliest.get(text, -math.inf))
        return likeliest


def _finite(logprob: float) -> float:
    """Replace −∞ by −9999, as in OpenAI's API, because JSON has no infinity."""
    return max(logprob, -9999.0)
