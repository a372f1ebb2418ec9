"""Cache the target's features of every training document in shards on disk, computed once."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from volley.errors import CheckpointError, ConfigError
from volley.files import make_folder, read_json, write_atomically
from volley.tensors import save_tensors
from volley.train.documents import Document, split_batches
from volley.train.features import Features, FeatureSource
from volley.train.parallel import Ranks

SHARD_TOKENS = 65_536
PASS_TOKENS = 8_192  # context tokens, padding included, of one forward pass of the target


class FeatureCache:
    """Cache on disk, written by ``build``. Documents are in the order of their length, so a shard holds a few unpadded batches.

    A shard holds ``taps [tokens, taps · H]`` and, if asked for, ``final [response tokens, H]``, both bf16.
    """

    def __init__(
        self, directory: Path, documents: Sequence[Document], online: FeatureSource, facts: dict[str, str]
    ) -> None:
        self.directory = directory
        self.documents = documents
        self.online = online
        self.manifest: dict[str, Any] = {
            **facts,
            "taps": list(online.layer_ids),
            "final": online.with_final,
            "shard_tokens": SHARD_TOKENS,
        }
        order = sorted(range(len(documents)), key=lambda index: (len(documents[index]), index))
        self.shards = self._cut(order)
        self.places: dict[int, tuple[int, int, int]] = {}
        """Shard, first row of ``taps`` and first row of ``final`` of each document."""
        for number, indices in enumerate(self.shards):
            row = final_row = 0
            for index in indices:
                self.places[index] = (number, row, final_row)
                row += len(documents[index])
                final_row += len(documents[index]) - documents[index].response_start
        self._open: dict[int, Any] = {}

    def _cut(self, order: Sequence[int]) -> list[list[int]]:
        shards: list[list[int]] = []
        tokens = SHARD_TOKENS
        for index in order:
            if tokens + len(self.documents[index]) > SHARD_TOKENS:
                shards.append([])
                tokens = 0
            shards[-1].append(index)
            tokens += len(self.documents[index])
        return shards

    def _path(self, number: int) -> Path:
        return self.directory / f"features-{number:05d}.safetensors"

    @property
    def size(self) -> int:
        """Bytes of the whole cache."""
        hidden: int = self.online.target.text_config.hidden_size
        tokens = sum(map(len, self.documents))
        responses = sum(len(document) - document.response_start for document in self.documents)
        final = responses * hidden if self.online.with_final else 0
        return 2 * (tokens * hidden * len(self.online.layer_ids) + final)

    def build(self, ranks: Ranks, say: Callable[[str], None]) -> None:
        """Write the missing shards. Refuse a cache of another target, other data or other taps."""
        self._check_manifest()
        missing = self._missing()
        ranks.wait()  # before any process writes: all must divide the same list of shards
        tokens = sum(map(len, self.documents))
        say(
            f"feature cache {self.directory}: {self.size / 1e9:.2f} GB in {len(self.shards)} shards for {tokens} tokens, "
            f"{len(missing)} shards to write"
        )
        if missing:
            self._check_room(len(missing))
            if ranks.first:
                write_atomically(self.directory / "manifest.json", json.dumps(self.manifest, indent=2) + "\n")
            started = time.monotonic()
            mine = ranks.share(missing)
            for count, number in enumerate(mine, 1):
                self._write(number)
                left = (time.monotonic() - started) / count * (len(mine) - count)
                say(f"feature cache: shard {count} of {len(mine)}, {left / 60:.1f} min left")
        ranks.wait()
        if self._missing():
            raise ConfigError(
                f"shards of the feature cache in {self.directory} are on other nodes; put --cache-dir on a file system that "
                "all nodes share, or use --features online"
            )

    def _missing(self) -> list[int]:
        return [number for number in range(len(self.shards)) if not self._path(number).exists()]

    def _check_manifest(self) -> None:
        path = self.directory / "manifest.json"
        if not path.exists():
            return
        found = read_json(path)
        if found.get("final") is True:  # a cache with final states also serves a run without them
            self.manifest["final"] = self.online.with_final = True
        for key, value in self.manifest.items():
            if found.get(key) != value:
                raise ConfigError(
                    f"the feature cache in {self.directory} was made with another {key} ({found.get(key)!r}, "
                    f"not {value!r}); remove it, or give another --cache-dir"
                )

    def _check_room(self, missing: int) -> None:
        need = self.size * missing / len(self.shards)
        make_folder(self.directory)
        free = shutil.disk_usage(self.directory).free
        if need > free:
            raise ConfigError(
                f"the feature cache needs {need / 1e9:.1f} GB in {self.directory} and {free / 1e9:.1f} GB are free; "
                "use --features online, fewer taps or another --cache-dir"
            )

    def _write(self, number: int) -> None:
        indices = self.shards[number]
        lengths = [len(document) for document in self.documents]
        taps, final = [], []
        for batch in split_batches(indices, lengths, PASS_TOKENS):
            features = self.online([self.documents[index] for index in batch], batch)
            for row, index in enumerate(batch):
                document = self.documents[index]
                taps.append(features.taps[row, : len(document)].to("cpu", torch.bfloat16))
                if features.final is not None:
                    kept = features.final[row, document.response_start : len(document)]
                    final.append(kept.to("cpu", torch.bfloat16))
        tensors = {"taps": torch.cat(taps)} | ({"final": torch.cat(final)} if final else {})
        save_tensors(self._path(number), tensors)

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            try:
                self._open[number] = safe_open(self._path(number), "pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{self._path(number)} is damaged or gone ({error}); remove the file and run again to make it anew"
                ) from None
        return self._open[number]

    def __call__(self, documents: Sequence[Document], indices: Sequence[int]) -> Features:
        """Return the features of ``documents``, which have these ``indices`` in the data."""
        dtype = self.online.target.dtype
        taps, final = [], []
        for document, index in zip(documents, indices, strict=True):
            number, row, final_row = self.places[index]
            shard = self._shard(number)
            taps.append(shard.get_slice("taps")[row : row + len(document)])
            if self.online.with_final:
                responses = len(document) - document.response_start
                kept: Tensor = shard.get_slice("final")[final_row : final_row + responses]
                final.append(torch.nn.functional.pad(kept, (0, 0, document.response_start, 0)))
        padded = pad_sequence(taps, batch_first=True).to(dtype)
        return Features(padded, pad_sequence(final, batch_first=True).to(dtype) if final else None)
