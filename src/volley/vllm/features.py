"""Client of a vLLM server that records features (``volley.vllm.Recorder``): texts are sent as prompts."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from torch import Tensor

from volley.errors import CheckpointError, ConfigError, EndpointError, MismatchError
from volley.models.drafters.recorded import Recorded, load_recorded, recorded_path

LOOKS = (0.0, 1.0, 10.0)
"""Seconds to wait before each search for an answer's files, because shared file systems show new files late."""


class RecordingServer:
    """Recording server at ``url`` (``http://host:8000/v1``): it generates one token per prompt and records into ``directory``.

    Each call removes the files that the previous call read. The folder thus stays small, and processes that send the same prompt
    at the same time all find its file.
    """

    def __init__(
        self, url: str, directory: Path, layer_ids: Sequence[int], hidden_size: int, with_final: bool, longest: int
    ) -> None:
        """Connect to a server that records ``layer_ids`` of a target of ``hidden_size`` and accepts prompts of ``longest``
        tokens."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"feature_server is {url!r}; write it like http://127.0.0.1:8000/v1")
        self.url, self.directory = url.rstrip("/"), directory
        self.layer_ids, self.hidden_size, self.with_final = tuple(layer_ids), hidden_size, with_final
        headers = {"Connection": "close"}  # an idle connection may be closed before the next step
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
        """Return the served model's name, and check that it accepts prompts of ``longest`` tokens."""
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

    def __call__(self, prompts: Sequence[Tensor]) -> list[Recorded]:
        """Return the target's features of each of ``prompts``, token ids ``[n]``."""
        paths = [recorded_path(self.directory, token_ids) for token_ids in prompts]
        found = self._record(dict(zip(paths, prompts, strict=True)))
        self._remove(self._read - found.keys())
        self._read = set(found)
        return [found[path] for path in paths]

    def _record(self, missing: dict[Path, Tensor]) -> dict[Path, Recorded]:
        """Have prompts recorded. ``missing`` and the result map each file's path to its prompt and its features.

        A file that existed before may belong to another target. Another process may remove a file, and the server may lose one:
        prompts without a file are sent again.
        """
        found: dict[Path, Recorded] = {}
        for wait in LOOKS:
            before = {path: _version(path) for path in missing}
            prompts = [token_ids.tolist() for token_ids in missing.values()]
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
        width = len(self.layer_ids) * self.hidden_size
        if recorded.taps.shape != (length, width):
            raise MismatchError(
                f"{self.url} has recorded {list(recorded.taps.shape)} numbers where this target has {[length, width]}; "
                "serve the same target"
            )
        return recorded if self.with_final else recorded._replace(final=None)


def _version(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time, which change with every write; ``None`` without a file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
