"""Recorder: a proposer that drafts nothing and writes the outputs of the target's layers for each prompt to files.

``volley train --feature-server`` sends its documents to such a server as prompts and trains on the recorded features.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from volley.errors import ConfigError, UnsupportedModelError
from volley.models.drafters.recorded import Recorded, recorded_path, save_recorded
from volley.vllm.options import LOGGER, check_engine, parse_options
from volley.vllm.passes import FINAL, PassTaps, TargetPass, Tokens

RECORDER = "volley.vllm.Recorder"


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Options of the recorder in ``additional_config["volley"]``."""

    record: str
    """Folder of the recorded files."""
    taps: tuple[int, ...]
    """Target layers whose outputs are recorded, 0-based."""
    final: bool = False
    """True to record the normed states before the head too, for losses against the target's distributions."""

    def __post_init__(self) -> None:
        taps: Any = self.taps
        if not isinstance(taps, list | tuple) or not taps or not all(type(index) is int for index in taps):
            raise ConfigError(f'taps is {taps!r}; give a list of layer ids, such as "taps": [1, 9, 17]')
        if type(self.final) is not bool:
            raise ConfigError(f"final is {self.final!r}; it must be true or false")
        object.__setattr__(self, "taps", tuple(taps))

    @classmethod
    def from_config(cls, additional_config: object) -> "RecordOptions":
        """Parse vLLM's ``additional_config``; unknown and missing keys are errors that name them."""
        raw = additional_config.get("volley") if isinstance(additional_config, Mapping) else None
        if not isinstance(raw, Mapping) or not raw.keys() >= {"record", "taps"}:
            raise ConfigError(
                "volley's recorder was not told what to write where; give vLLM "
                """--additional-config '{"volley": {"record": "FOLDER", "taps": [1, 9, 17]}}'"""
            )
        return parse_options(cls, raw, "option of volley's recorder")


def recorder_args(options: RecordOptions) -> dict[str, Any]:
    """Return arguments for ``vllm.LLM`` (and, with dashes, its server) that record."""
    return {
        "speculative_config": {"method": "custom_class", "model": RECORDER, "num_speculative_tokens": 1},
        "additional_config": {"volley": asdict(options)},
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }


@dataclass(slots=True)
class _Beginning:
    """Part of a prompt that has been read, in pieces: tokens, and ``states [t, (taps + final) · H]``, of each piece."""

    token_ids: list[Tokens] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


class Recorder:
    """Proposer for ``speculative_config={"method": "custom_class", "model": "volley.vllm.Recorder", "num_speculative_tokens":
    1}``."""

    def __init__(self, vllm_config: Any) -> None:
        import vllm

        check_engine(vllm_config, vllm.__version__, split=True)
        self.options = RecordOptions.from_config(vllm_config.additional_config)
        if vllm_config.cache_config.enable_prefix_caching:
            raise UnsupportedModelError(
                "positions that vLLM finds in its prefix cache do not pass through the layers and cannot be recorded; "
                "pass --no-enable-prefix-caching (enable_prefix_caching=False)"
            )
        self._block_size: int = vllm_config.cache_config.block_size
        self._folder = Path(self.options.record)
        self.beginnings: dict[int, _Beginning] = {}  # by the slot of the last token read
        self._warned = False

    def load_model(self, target_model: nn.Module) -> None:
        """Tap the target. If several processes share its layers, all see complete outputs, and the first one records them."""
        from vllm.distributed import get_tensor_model_parallel_rank

        options = self.options
        self._writes = get_tensor_model_parallel_rank() == 0
        if self._writes:
            self.passes = PassTaps(target_model, options.taps, self._block_size, lambda _: None, options.final)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot record in {self._folder} ({error}); give a folder to write in") from None
            LOGGER.info("volley records layers %s of every prompt in %s", list(options.taps), self._folder)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: Tokens,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return no drafts, and write the prompts whose last token was in the pass just ended."""
        done = self.passes.take() if self._writes else None
        if done is not None:
            for row, beginning in self._read(done, token_ids_cpu):
                if sampled_token_ids[row]:
                    self._write(beginning, token_ids_cpu[row, : done.ends[row]])
                else:
                    self.beginnings[done.slot(row, done.ends[row] - 1)] = beginning
        elif self._writes and not self._warned:
            self._warned = True
            LOGGER.warning("volley: the target's layers did not call their forward hooks; nothing is recorded")
        return [[] for _ in sampled_token_ids]

    def _read(self, done: TargetPass, token_ids: Tokens) -> Iterator[tuple[int, _Beginning]]:
        """Yield the rows of a pass that read a prompt, and the part of each that has been read.

        Requests have no names: a prompt continues in the row that starts right after the last slot of a beginning. A slot that is
        written again was freed, and the beginning that ended there is dropped. vLLM hides passes in which some request is at the
        model's last position; prompts in such a pass are not recorded.
        """
        found: dict[int, _Beginning] = {}
        for row, start in enumerate(done.starts.tolist()):
            if start == 0:
                found[row] = _Beginning()
            elif before := self.beginnings.pop(done.slot(row, start - 1), None):
                found[row] = before
        for slot in done.span(done.ends)[2].tolist():
            self.beginnings.pop(slot, None)
        layers = [*self.options.taps, *([FINAL] if self.options.final else [])]
        for row, beginning in found.items():
            rows = slice(int(done.offsets[row]), int(done.offsets[row + 1]))
            beginning.token_ids.append(token_ids[row, done.starts[row] : done.ends[row]].copy())
            states = torch.cat([done.states[index][rows] for index in layers], dim=-1)
            beginning.states.append(states.to("cpu", torch.bfloat16))
            yield row, beginning

    def _write(self, beginning: _Beginning, token_ids: Tokens) -> None:
        """Write a prompt's features. They depend only on the tokens so far, so pieces that spell the prompt belong to it."""
        if np.array_equal(np.concatenate(beginning.token_ids), token_ids):
            states = torch.cat(beginning.states)
            width = states.shape[1] * len(self.options.taps) // (len(self.options.taps) + self.options.final)
            final = states[:, width:] if self.options.final else None
            save_recorded(recorded_path(self._folder, token_ids), Recorded(self.options.taps, states[:, :width], final))
