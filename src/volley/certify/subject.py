"""Who is asked: an engine here, or any OpenAI-compatible server, of which nothing is known but its answers."""

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import httpx

from volley.engine.engine import Engine
from volley.errors import EndpointError
from volley.train.endpoint import retry_after
from volley.types import SamplingParams

TOPS = (20, 10, 5, 1)
"""Log-probabilities a token that are asked for: the first number that a server does not refuse."""
TOP = TOPS[0]
TIMEOUT = 600.0
"""Seconds that a server has for one answer."""
REFUSALS = (400, 404, 405, 422, 501)
"""HTTP statuses of a server that does not offer what it was asked for."""
BUSY = (408, 425, 429, 503)
"""HTTP statuses of a server that takes no more requests at the moment."""
PATIENCE = 60.0
"""Seconds for which a busy server is asked again."""
_PART = "\ufffd"
"""Stands for a part of a character: tokens that are written so cannot be told apart, and their places are not judged."""
Token = int | str
"""An id, or the text of a token where a server tells no ids."""


@dataclass(frozen=True)
class Reply:
    """One answer; ``top`` holds the log-probabilities of the likeliest tokens where each token stands, unmodified.

    Of an engine they leave out a token that is never chosen: the mask of a model that is asked by masks.
    """

    tokens: tuple[Token, ...]
    text: str
    finish_reason: str
    top: tuple[dict[Token, float], ...] = ()
    likeliest: tuple[tuple[Token, float] | None, ...] = ()
    """Of a server: the likeliest token of each place and its log-probability; ``None`` where that is a part of a character."""
    cached: int | None = None
    """Tokens of the prompt that were found in a cache; ``None`` where a server does not tell."""


@dataclass(frozen=True)
class Structured:
    """A chat's answer to a ``response_format``."""

    text: str
    finish_reason: str


class Subject(Protocol):
    """Answers prompts, ``concurrency`` at once."""

    def ask(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams], concurrency: int = 1
    ) -> list[Reply]:
        """One reply a prompt, in order, with log-probabilities."""
        ...

    def forget(self) -> None:
        """Drop cached prefixes, where that can be asked for."""
        ...


def each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    return [params] * count if isinstance(params, SamplingParams) else list(params)


def unchosen(engine: Engine) -> int | None:
    """The mask of a model that is asked for each next token by a mask."""
    family = engine.target.diffusion
    return None if family is None or family.writes_causally else family.mask_token_id


class EngineSubject:
    """An engine; prompts are token ids."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def ask(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams], concurrency: int = 1
    ) -> list[Reply]:
        replies: list[Reply] = []
        mask = unchosen(self.engine)
        wanted = each(params, len(prompts))
        for start in range(0, len(prompts), concurrency):
            part = slice(start, start + concurrency)
            for result in self.engine.generate(list(prompts[part]), wanted[part]):
                rows = result.top_logprobs or ()
                top: tuple[dict[Token, float], ...] = tuple(
                    {token: value for token, value in row if token != mask} for row in rows
                )
                cached = result.stats.cached_tokens
                replies.append(Reply(tuple(result.token_ids), result.text, result.finish_reason, top, cached=cached))
        return replies

    def forget(self) -> None:
        self.engine.reset_prefix_cache()


class ServerSubject:
    """``/completions`` of a server; prompts are texts."""

    top = TOP
    """Log-probabilities a token that are asked for, at most."""
    room: int | None = None
    """Tokens of a request and its answer, if the server tells."""

    def __init__(
        self, url: str, model: str | None = None, key: str | None = None, failure: type[EndpointError] | None = None
    ) -> None:
        """``failure`` is raised when the server breaks down: by default a :class:`ServerFailure`, which is a finding."""
        self._failure = failure or ServerFailure
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = url.rstrip("/")
        self.client = httpx.Client(headers=headers, timeout=TIMEOUT)
        try:
            known = self._json("GET", "/models", None)["data"]
            self.model = model or str(known[0]["id"])
            self.room = next((one.get("max_model_len") for one in known if one["id"] == self.model), None)
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        self.client.close()

    def find_top(self, prompt: str) -> None:
        """Ask for as many log-probabilities a token as the server gives: some refuse many."""
        for top in TOPS:
            self.top = top
            try:
                self._ask(prompt, SamplingParams(max_tokens=1, logprobs=True, top_logprobs=TOP))
            except NotOffered:
                continue
            except (ServerFailure, TooBusy):  # as the checks will say
                return
            return
        self.top = TOP

    def software(self) -> dict[str, str]:
        """What the server says of itself: its version, and the name in its headers."""
        try:
            response = self.client.get(f"{self.url.removesuffix('/v1')}/version")
        except httpx.HTTPError:
            return {}
        found = {"server": response.headers.get("server")}
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found["version"] = response.json()["version"]
        return {name: str(text) for name, text in found.items() if text}

    def is_there(self) -> bool:
        try:
            self._json("GET", "/models", None)
        except EndpointError:
            return False
        return True

    def ask(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams], concurrency: int = 1
    ) -> list[Reply]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(self._ask, prompts, each(params, len(prompts))))

    def forget(self) -> None:
        """Servers keep what they like; what must be cold is asked with a beginning of its own."""

    def choices(self, prompt: str, params: SamplingParams, n: int) -> list[Reply] | None:
        """``n`` answers to one prompt; ``None`` if the server refuses to give several."""
        try:
            raw = self._json("POST", "/completions", {**self._body(prompt, params), "n": n})
        except NotOffered:
            return None
        return [_reply(choice) for choice in raw["choices"]]

    def structured(
        self, asked: Sequence[tuple[str, float]], schema: dict[str, Any] | None, max_tokens: int
    ) -> list[Structured] | None:
        """Answers to chats of a prompt at a temperature, eight at once, in JSON of ``schema``; ``None`` if that is refused."""
        with ThreadPoolExecutor(8) as pool:
            try:
                return list(pool.map(lambda one: self._structured(one[0], one[1], schema, max_tokens), asked))
            except NotOffered:
                return None

    def _structured(self, prompt: str, temperature: float, schema: dict[str, Any] | None, most: int) -> Structured:
        body: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        body |= {"temperature": temperature, "max_tokens": most}
        if schema is not None:
            form = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        choice = self._json("POST", "/chat/completions", body)["choices"][0]
        return Structured(choice["message"].get("content") or "", choice.get("finish_reason") or "stop")

    def _ask(self, prompt: str, params: SamplingParams) -> Reply:
        raw = self._json("POST", "/completions", self._body(prompt, params))
        details = (raw.get("usage") or {}).get("prompt_tokens_details") or {}
        return replace(_reply(raw["choices"][0]), cached=details.get("cached_tokens"))

    def _body(self, prompt: str, params: SamplingParams) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "stop": list(params.stop) or None,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "logprobs": min(params.top_logprobs or 0, self.top) or None,
            "repetition_penalty": params.repetition_penalty,  # else the model's own may be in force
        }
        if params.temperature > 0:  # some servers truncate unless they are told not to
            body |= {"top_k": params.top_k or -1, "min_p": params.min_p}
        kept = ("temperature", "seed", "min_p")  # whose zero says something
        return {key: value for key, value in body.items() if value is not None and (value != 0 or key in kept)}

    def _json(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        patience = time.monotonic() + PATIENCE
        while True:
            try:
                response = self.client.request(method, self.url + path, json=body)
                if response.is_success:
                    return dict(response.json())
            except (httpx.HTTPError, ValueError, TypeError) as error:
                raise self._failure(
                    f"{self.url}{path}: {type(error).__name__} {error}; is an OpenAI-compatible server there?"
                ) from None
            status, pause = response.status_code, max(0.5, retry_after(response))
            if status not in BUSY or time.monotonic() + pause > patience:
                break
            time.sleep(pause)
        failure = self._failure if status >= 500 else EndpointError
        kind = NotOffered if status in REFUSALS else TooBusy if status in BUSY else failure
        raise kind(
            f"{self.url}{path}: HTTP {response.status_code} {response.text[:200]}; check URL (…/v1), model and key"
        )


class ServerFailure(EndpointError):
    """The server broke down over a request, or is gone."""


class NotOffered(EndpointError):
    """The server understood the request and does not do it."""


class TooBusy(EndpointError):
    """The server turned the request away for as long as it was asked."""


def _reply(choice: dict[str, Any]) -> Reply:
    found = choice.get("logprobs") or {}
    if found.get("content"):  # as chat completions have them, which llama.cpp uses everywhere
        tokens = [part["token"] for part in found["content"]]
        top = [{one["token"]: one["logprob"] for one in part["top_logprobs"]} for part in found["content"]]
    else:
        tokens, top = found.get("tokens") or [], found.get("top_logprobs") or []
    if not tokens and choice.get("text"):
        raise EndpointError(
            "the server sends no logprobs with its answers, which tell ties from faults; start it so that it does"
        )
    likeliest = tuple(_likeliest(row or {}) for row in top)
    clean = tuple({} if any(_PART in token for token in row or ()) else dict(row or {}) for row in top)
    return Reply(tuple(tokens), choice.get("text") or "", choice.get("finish_reason") or "stop", clean, likeliest)


def _likeliest(row: dict[str, float]) -> tuple[Token, float] | None:
    """Whether it can be judged must not depend on the token that was drawn, which some servers list too."""
    best = max(row, key=row.__getitem__, default=_PART)
    return None if _PART in best else (best, row[best])
