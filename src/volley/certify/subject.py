"""Subjects of a certification: an engine in this process, or an OpenAI-compatible server known only by its answers."""

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import httpx

from volley.engine.engine import Engine
from volley.errors import EndpointError
from volley.params import SamplingParams
from volley.train.endpoint import retry_after

TOPS = (20, 10, 5, 1)
"""Numbers of log-probabilities per token to request, until the server accepts one."""
TOP = TOPS[0]
TIMEOUT = 600.0
"""Timeout of one answer in seconds."""
REFUSALS = (400, 404, 405, 422, 501)
"""HTTP statuses of a server that does not support a request."""
BUSY = (408, 425, 429, 503)
"""HTTP statuses of a server that is temporarily full."""
PATIENCE = 60.0
"""Seconds for which requests to a busy server are repeated."""
_PART = "\ufffd"
"""Replacement for part of a character. Tokens written this way cannot be distinguished, so their positions are not judged."""
Token = int | str
"""Token id, or the token's text if a server returns no ids."""


@dataclass(frozen=True)
class Reply:
    """One answer. ``top`` holds the unmodified log-probabilities of the likeliest tokens at each position.

    With an engine they exclude a token that is never chosen: the mask of a target that predicts at mask positions.
    """

    tokens: tuple[Token, ...]
    text: str
    finish_reason: str
    top: tuple[dict[Token, float], ...] = ()
    likeliest: tuple[tuple[Token, float] | None, ...] = ()
    """Likeliest token of each position and its log-probability, from a server; ``None`` if the token is part of a character."""
    cached: int | None = None
    """Number of prompt tokens found in a cache; ``None`` if a server does not report it."""


class Subject(Protocol):
    """Source of answers to prompts, ``concurrency`` at once."""

    def ask(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams], concurrency: int = 1
    ) -> list[Reply]:
        """Return one reply per prompt, in order, with log-probabilities."""
        ...

    def forget(self) -> None:
        """Drop cached prefixes, if possible."""
        ...


def each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    return [params] * count if isinstance(params, SamplingParams) else list(params)


def unchosen(engine: Engine) -> int | None:
    """Return the mask token of a model that predicts each next token at a mask, else ``None``."""
    family = engine.target.diffusion
    return None if family is None or family.writes_causally else family.mask_token_id


class EngineSubject:
    """Engine as a subject; prompts are token ids."""

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
    """Server's ``/completions`` as a subject; prompts are texts."""

    top = TOP
    """Maximum number of log-probabilities per token to request."""
    context_length: int | None = None
    """Context length of the server, if it reports one."""

    def __init__(
        self, url: str, model: str | None = None, key: str | None = None, failure: type[EndpointError] | None = None
    ) -> None:
        """Connect to a server. ``failure`` is raised if the server breaks down: by default :class:`ServerFailure`, which is a
        finding."""
        self._failure = failure or ServerFailure
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = url.rstrip("/")
        self.client = httpx.Client(headers=headers, timeout=TIMEOUT)
        try:
            known = self._json("GET", "/models", None)["data"]
            self.model = model or str(known[0]["id"])
            self.context_length = next((one.get("max_model_len") for one in known if one["id"] == self.model), None)
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        self.client.close()

    def find_top(self, prompt: str) -> None:
        """Find the largest number of log-probabilities per token that the server accepts."""
        for top in TOPS:
            self.top = top
            try:
                self._ask(prompt, SamplingParams(max_tokens=1, logprobs=True, top_logprobs=TOP))
            except NotOffered:
                continue
            except (ServerFailure, TooBusy):  # the checks will report it
                return
            return
        self.top = TOP

    def software(self) -> dict[str, str]:
        """Return the server's version and the name in its headers."""
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
        """Do nothing: a server's cache cannot be cleared, so uncached prompts begin with a new prefix."""

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
            "repetition_penalty": params.repetition_penalty,  # otherwise the model's default may apply
        }
        if params.temperature > 0:  # some servers truncate by default
            body |= {"top_k": params.top_k or -1, "min_p": params.min_p}
        kept = ("temperature", "seed", "min_p")  # fields for which zero has a meaning
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
    """Raised if the server breaks down during a request, or is gone."""


class NotOffered(EndpointError):
    """Raised if the server does not support a request."""


class TooBusy(EndpointError):
    """Raised if the server stays busy for the whole time in which requests are repeated."""


def _reply(choice: dict[str, Any]) -> Reply:
    found = choice.get("logprobs") or {}
    if found.get("content"):  # the form of chat completions, which llama.cpp uses everywhere
        tokens = [part["token"] for part in found["content"]]
        top = [{one["token"]: one["logprob"] for one in part["top_logprobs"]} for part in found["content"]]
    else:
        tokens, top = found.get("tokens") or [], found.get("top_logprobs") or []
    if not tokens and choice.get("text"):
        raise EndpointError(
            "the server sends no logprobs with its answers, which distinguish ties from faults; start it with them enabled"
        )
    likeliest = tuple(_likeliest(row or {}) for row in top)
    clean = tuple({} if any(_PART in token for token in row or ()) else dict(row or {}) for row in top)
    return Reply(tuple(tokens), choice.get("text") or "", choice.get("finish_reason") or "stop", clean, likeliest)


def _likeliest(row: dict[str, float]) -> tuple[Token, float] | None:
    """Return the likeliest token, or ``None`` if it cannot be judged. The drawn token, which some servers list too, must not
    affect this."""
    best = max(row, key=row.__getitem__, default=_PART)
    return None if _PART in best else (best, row[best])
