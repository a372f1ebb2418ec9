"""Features from a running vLLM that records them (``volley.vllm.Recorder``): documents are sent to it as prompts."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from volley.errors import CheckpointError, ConfigError, EndpointError, MismatchError
from volley.models.recorded import Recorded, load_recorded, recorded_path
from volley.train.data import Document
from volley.train.features import Features, FrozenTarget

LOOKS = (0.0, 1.0, 10.0)
"""Seconds between each answer and the look for its files: file systems that nodes share may be slow to show them."""


class ServerFeatures:
    """Asks ``url`` (``http://host:8000/v1``) for one token after each document, and reads what it has recorded in ``directory``.

    What one call has read, the next one removes: the folder holds little, and processes that ask for the same document at once
    all find it.
    """

    def __init__(
        self,
        target: FrozenTarget,
        layer_ids: Sequence[int],
        with_final: bool,
        url: str,
        directory: Path,
        longest: int,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"feature_server is {url!r}; write it like http://127.0.0.1:8000/v1")
        self.target = target
        self.layer_ids = tuple(layer_ids)
        self.with_final = with_final
        self.url = url.rstrip("/")
        self.directory = directory
        headers = {"Connection": "close"}  # an idle one may be gone when the next step asks
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        transport = httpx.HTTPTransport(retries=3)
        self._client = httpx.Client(headers=headers, timeout=600, transport=transport)
        self._model = self._check_served(longest)
        self._read: set[Path] = set()

    @property
    def _command(self) -> str:
        taps = ",".join(map(str, self.layer_ids))
        final = " --record-final" if self.with_final else ""
        return f"volley serve --engine vllm TARGET --record {self.directory.resolve()} --taps {taps}{final}"

    def _check_served(self, longest: int) -> str:
        """The name of the model served, which must take documents of ``longest`` tokens."""
        models = self._request("GET", "/models").get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise EndpointError(
                f"{self.url} lists no model; is this an OpenAI server? Start one with `{self._command}`"
            )
        context = models[0].get("max_model_len")
        if isinstance(context, int) and longest >= context:
            raise ConfigError(
                f"the longest row has {longest} tokens and {self.url} takes {context - 1}; start it with "
                f"--max-model-len {longest + 1}, or train with --max-length {context - 1}"
            )
        return str(models[0]["id"])

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._client.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise EndpointError(
                f"{self.url} does not answer ({type(error).__name__} {error}); start it with `{self._command}`, then run "
                "the same command again: it goes on from the last checkpoint"
            ) from None
        try:
            answer = response.raise_for_status().json()
        except (httpx.HTTPStatusError, ValueError):
            raise EndpointError(
                f"{self.url}: HTTP {response.status_code} {response.text[:300]!r}; it must be vLLM's OpenAI server, "
                f"started with `{self._command}` (a key, if it wants one, comes from OPENAI_API_KEY)"
            ) from None
        return answer if isinstance(answer, dict) else {}

    def __call__(self, documents: Sequence[Document], indices: Sequence[int]) -> Features:
        """Features of ``documents``, whose places in the data are ``indices``."""
        paths = [recorded_path(self.directory, document.token_ids) for document in documents]
        found = self._record(dict(zip(paths, documents, strict=True)))
        self._remove(self._read - found.keys())
        self._read = set(found)
        taps = self._pad([found[path].taps for path in paths])
        final = [state for path in paths if (state := found[path].final) is not None]
        return Features(taps, self._pad(final) if self.with_final else None)

    def _pad(self, rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True).to(self.target.device, self.target.dtype)

    def _record(self, missing: dict[Path, Document]) -> dict[Path, Recorded]:
        """Have documents recorded, by the files they are looked for in.

        A file that was there before may be another target's. Another process may remove one, and the server may lose one: what
        is not there is asked for again.
        """
        found: dict[Path, Recorded] = {}
        for wait in LOOKS:
            before = {path: _version(path) for path in missing}
            prompts = [document.token_ids.tolist() for document in missing.values()]
            request = {"model": self._model, "prompt": prompts, "max_tokens": 1, "temperature": 0}
            self._request("POST", "/completions", request)
            time.sleep(wait)
            for path, old in before.items():
                if _version(path) not in (None, old):
                    found[path] = self._checked(load_recorded(path), len(missing.pop(path)))
            if not missing:
                return found
        raise EndpointError(
            f"{self.url} answers, and there are no features in {self.directory.resolve()}: it does not record, or elsewhere. "
            f"Start it with `{self._command}`; both must see the folder"
        )

    def _remove(self, paths: Iterable[Path]) -> None:
        try:
            for path in paths:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"used features cannot be removed ({error}); let this user write in {self.directory.resolve()}"
            ) from None

    def _checked(self, recorded: Recorded, length: int) -> Recorded:
        if recorded.layer_ids != self.layer_ids:
            raise MismatchError(
                f"{self.url} records layers {list(recorded.layer_ids)}, and the drafter taps {list(self.layer_ids)}; start "
                f"it with `{self._command}`, or train with --taps {','.join(map(str, recorded.layer_ids))}"
            )
        if self.with_final and recorded.final is None:
            raise MismatchError(
                f"{self.url} does not record the final states, which soft_targets and total_variation compare with; start "
                f"it with `{self._command}`"
            )
        width = len(self.layer_ids) * self.target.text_config.hidden_size
        if recorded.taps.shape != (length, width):
            raise MismatchError(
                f"{self.url} has recorded {list(recorded.taps.shape)} numbers where this target has {[length, width]}; "
                "serve the same target"
            )
        return recorded if self.with_final else recorded._replace(final=None)


def _version(path: Path) -> tuple[int, int] | None:
    """What changes whenever a file is written anew; ``None`` if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
