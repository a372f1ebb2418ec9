"""What clients get: OpenAI's completion objects and chunks, with draft statistics in the usage."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

from volley.serve.worker import End, Piece
from volley.types import GenerationStats

Object = dict[str, Any]


@dataclass
class Choice:
    """One answer as it grows."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += "".join(chunk.text for chunk in piece.chunks)
        self.token_ids += [token for chunk in piece.chunks for token in chunk.token_ids]
        self.logprobs += piece.logprobs
        self.top_logprobs += piece.top_logprobs


@dataclass
class Usage:
    """Tokens of one HTTP request, all choices together."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    accepted: int = 0
    drafted: int = 0
    cycles: int = 0
    cycle_tokens: int = 0
    denoising_steps: int = 0
    passes: int = 0

    def add_piece(self, piece: Piece) -> None:
        self.accepted += sum(chunk.from_draft for chunk in piece.chunks)

    def add(self, stats: GenerationStats, *, is_first: bool) -> None:
        """Count a complete choice; only the first of each prompt says how much of it was cached."""
        self.cached += stats.cached_tokens if is_first else 0
        self.completion += stats.output_tokens
        self.drafted += sum(stats.block_sizes) - len(stats.block_sizes)
        self.cycles += len(stats.accepted_lengths)
        self.cycle_tokens += sum(stats.accepted_lengths)
        self.denoising_steps += stats.denoising_steps
        self.passes += stats.denoising_steps + stats.commit_passes

    def to_json(self) -> Object:
        """``acceptance_length`` is volley's own: τ, tokens gained per decoding cycle; so is what is said of canvases."""
        details = {}
        if self.denoising_steps:
            per_pass = round(self.completion / self.passes, 4)
            details = {"denoising_steps": self.denoising_steps, "tokens_per_pass": per_pass}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
                "acceptance_length": round(self.cycle_tokens / self.cycles, 4) if self.cycles else 1.0,
                **details,
            },
        }


class Dialect:
    """The words of one endpoint: whole answers, and chunks of a stream."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(
        self, model: str, spell: Callable[[int], str], *, logprobs: bool, mark_draft: bool, include_usage: bool
    ) -> None:
        """``spell`` gives the text of a single token. With ``include_usage`` a stream ends with the usage."""
        self.spell = spell
        self.logprobs = logprobs
        self.mark_draft = mark_draft
        self.include_usage = include_usage
        self._frame = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Object:
        answers = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._frame, "object": self.kind, "choices": answers, "usage": usage.to_json()}

    def chunk(self, choices: list[Object], usage: Usage | None = None) -> Object:
        chunk = {**self._frame, "object": self.chunk_kind, "choices": choices}
        return chunk | {"usage": usage and usage.to_json()} if self.include_usage else chunk

    def opening(self, index: int) -> Object | None:
        """The first chunk of a choice, sent before its first token; ``None`` without one."""
        return None

    def piece(self, piece: Piece, sent: Choice) -> Iterator[Object]:
        """Choices of the chunks that stream ``piece``; ``sent`` is what went before. Several only to mark drafts."""
        start = 0
        for drafted, group in groupby(piece.chunks, key=lambda chunk: self.mark_draft and chunk.from_draft):
            run = Piece(piece.choice, list(group), [], [])
            end = start + len(run.chunks)
            run.logprobs.extend(piece.logprobs[start:end])
            run.top_logprobs.extend(piece.top_logprobs[start:end])
            start = end
            text = "".join(chunk.text for chunk in run.chunks)
            if text or self.logprobs or self.mark_draft:
                part = Choice()
                part.add(run)
                marked = {"from_draft": drafted} if self.mark_draft else {}
                yield self._delta(piece.choice, part, sent, None) | marked
            sent.add(run)

    def ending(self, end: End, sent: Choice) -> Object:
        return self._delta(end.choice, Choice(), sent, end.finish_reason)

    def _choice(self, index: int, choice: Choice) -> Object:
        raise NotImplementedError

    def _delta(self, index: int, part: Choice, sent: Choice, finish_reason: str | None) -> Object:
        raise NotImplementedError


class ChatDialect(Dialect):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, index: int) -> Object:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _choice(self, index: int, choice: Choice) -> Object:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        logprobs = self._logprobs(choice)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _delta(self, index: int, part: Choice, sent: Choice, finish_reason: str | None) -> Object:
        delta = {} if finish_reason else {"content": part.text}
        logprobs = None if finish_reason else self._logprobs(part)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, part: Choice) -> Object | None:
        if not self.logprobs:
            return None
        tops = part.top_logprobs or [[] for _ in part.token_ids]
        content = [
            {**self._token(token, logprob), "top_logprobs": [self._token(*pair) for pair in top]}
            for token, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Object:
        text = self.spell(token)
        whole = "\ufffd" not in text  # else the token is a part of a character
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}


class CompletionDialect(Dialect):
    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def _choice(self, index: int, choice: Choice) -> Object:
        logprobs = self._logprobs(choice, 0)
        return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _delta(self, index: int, part: Choice, sent: Choice, finish_reason: str | None) -> Object:
        logprobs = None if finish_reason else self._logprobs(part, len(sent.text))
        return {"index": index, "text": part.text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, part: Choice, start: int) -> Object | None:
        if not self.logprobs:
            return None
        tokens = [self.spell(token) for token in part.token_ids]
        chosen = [_finite(logprob) for logprob in part.logprobs]
        tops = part.top_logprobs or [[] for _ in tokens]
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": [
                {self.spell(other): _finite(value) for other, value in top} | {token: logprob}
                for top, token, logprob in zip(tops, tokens, chosen, strict=True)
            ],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=start)) if tokens else [],
        }


def _finite(logprob: float) -> float:
    """−9999 stands for −∞, as in OpenAI's API: JSON has no infinity."""
    return max(logprob, -9999.0)
