"""Options of ``volley tune``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from volley.certify.options import CertifyConfig
from volley.errors import ConfigError, check_fields
from volley.prompts import check_training


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Options of a tuning run: a model, its traffic and the minutes of training. The rest is chosen by rules."""

    target: str
    """Folder, hub name or GGUF file of the target: any causal LM that volley decodes."""
    out: Path
    """Folder for all that is made. It loads as a drafter; a run that finds it goes on."""
    prompts: tuple[str, ...] = ()
    """Prompt files (JSONL with prompt, messages or turns) like those that are served, which the target here answers; ``builtin``:
    200 prompts of six kinds, for whoever has no traffic at hand."""
    endpoint: str | None = None
    """OpenAI-compatible URL (http://host:8000/v1) of the same target, which answers --prompts instead. OPENAI_API_KEY holds its
    key."""
    data: tuple[str, ...] = ()
    """Responses that volley collect has written already, instead of prompts."""
    max_minutes: float = 60.0
    """Minutes of training by the clock, evaluations included; collecting, measuring and certifying come on top."""
    temperatures: tuple[float, ...] = (0.0, 0.7)
    """Temperatures that will be served: responses are collected at them."""
    max_tokens: int = 256
    """Longest response."""
    limit: int | None = None
    """Prompts taken from each source."""
    thinking: bool | None = None
    """Passed to the chat template as ``enable_thinking`` where prompts are answered; left out, the template decides."""
    block_size: int | None = None
    """Largest block, anchor included; by default 8."""
    bias: float = 0.05
    """Smallest bias of sampled output that certifying searches for; half of it takes four times as long."""
    model: str | None = None
    """With --endpoint: model to ask; by default the one it has."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of both models. auto: bfloat16, but float32 to train for narrow targets on a CPU, 512 wide at most."""
    device: str = "auto"
    """Torch device, such as cpu or cuda; auto is the GPU if there is one."""
    threads: int | None = None
    """CPU threads; by default torch's choice."""
    seed: int = 0
    """Fixes the responses, the initial weights and the order of the data."""

    def __post_init__(self) -> None:
        if self.endpoint is not None and not self.prompts:
            raise ConfigError("--endpoint answers prompts; name them with --prompts")
        if bool(self.prompts) == bool(self.data):
            raise ConfigError("give --prompts, which the target answers, or --data, its responses; one of the two")
        if self.thinking is not None and self.data:
            raise ConfigError(
                "--thinking is for prompts that are answered here; the rows of --data say how theirs were"
            )
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(f"temperatures are {self.temperatures}; give at least one, each 0 or more")
        CertifyConfig(bias=self.bias)
        counts = {name: getattr(self, name) for name in ("max_tokens", "limit", "threads")}
        check_fields(
            self,
            ("max_minutes", self.max_minutes > 0, "positive"),
            ("block_size", self.block_size is None or self.block_size >= 2, "at least 2, the anchor and a token"),
            *((name, value is None or value >= 1, "at least 1") for name, value in counts.items()),
        )
        check_training(self.prompts)
