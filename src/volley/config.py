"""Settings of an engine: how it decodes and how much it does at once, each declared once with its help text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from volley.errors import ConfigError, check_keys, names_unknown_fields, unknown_key

KVDtype = Literal["auto", "int8", "int4"]
"""Format of K/V: the model's dtype, 8 bits, or 4 bits after a random rotation."""
Verification = Literal["auto", "rejection", "coupled"]
Schedule = Literal["cosine", "linear", "sqrt"]
DraftAttention = Literal["target", "torch", "native", "triton"]


@names_unknown_fields
@dataclass(frozen=True, kw_only=True)
class DraftingConfig:
    """Settings of drafting, shared by volley's engine and its plugin for vLLM."""

    policy: str | Any | None = None
    """Policy that decides how much is drafted and verified: goodput (the default), goodput:drafts, feedback, pilot, fixed:8 or
    plain. Without a drafter goodput drafts by prompt lookup; plain drafts nothing."""
    denoising_steps: int = 1
    """Denoising passes of the drafter per block; 1 is DFlash."""
    denoising_schedule: Schedule = "cosine"
    """Schedule of the number of draft positions that each denoising pass reveals: cosine, linear or sqrt."""
    denoising_threshold: float | None = None
    """Probability above which a denoising pass also reveals a position; a full block ends the passes. By default the schedule
    alone decides."""
    draft_temperature: float | None = None
    """Temperature of drafts; by default the request's own. It changes speed, never the distribution."""
    draft_window: int | None = None
    """Tokens of context that the drafter sees and keeps; 0 for all, by default the number it was measured to need."""

    def __post_init__(self) -> None:
        if self.denoising_steps < 1:
            raise ConfigError(f"denoising_steps is {self.denoising_steps}; it must be at least 1")
        if self.denoising_schedule not in get_args(Schedule):
            raise unknown_key("denoising schedule", str(self.denoising_schedule), get_args(Schedule))
        if self.denoising_threshold is not None and not 0 < self.denoising_threshold <= 1:
            raise ConfigError(
                f"denoising_threshold is {self.denoising_threshold}; give a probability in (0, 1], or None for the schedule alone"
            )
        if self.draft_temperature is not None and not 0 <= self.draft_temperature < math.inf:
            raise ConfigError(f"draft_temperature is {self.draft_temperature}; give a finite number of at least 0")
        if self.draft_window is not None and self.draft_window < 0:
            raise ConfigError(
                f"draft_window is {self.draft_window}; give at least 1 token, 0 for the whole context, or None for the "
                "drafter's own"
            )

    @property
    def fixed_block(self) -> int:
        """Return the block size that a fixed policy names, anchor included; 0 if none does."""
        name, _, size = self.policy.partition(":") if isinstance(self.policy, str) else ("", "", "")
        return int(size) if name == "fixed" and size.isdecimal() else 0

    def given(self) -> list[str]:
        """Return the names of the settings that differ from the default."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


@names_unknown_fields
@dataclass(frozen=True, kw_only=True)
class DecodingConfig(DraftingConfig):
    """Settings of drafting and verification. All choices are lossless; they differ in speed.

    Settings can change between two steps (:meth:`volley.Engine.reconfigure`), except those that determine where K/V are stored:
    ``draft_window``, ``kv_dtype`` and ``draft_kv_dtype``, and how the drafter runs: ``draft_attention`` and ``compile``.
    """

    block_size: int | None = None
    """Tokens verified per cycle, anchor included; 1 is plain decoding. Short for a fixed policy."""
    tree_nodes: int | None = None
    """Verify the best tree of this many draft tokens, anchor included, instead of one chain. By default the policy decides."""
    verification: Verification = field(default="auto", metadata={"python": True})
    """Verification of sampled requests: rejection, coupled or auto. auto is coupled for requests with a seed, whose answers must
    be reproducible, and if the draft's distribution is unknown; otherwise rejection."""
    kv_dtype: KVDtype = "auto"
    """Format of the target's K/V; auto: the models' data type. Another format changes what the target computes."""
    draft_kv_dtype: KVDtype = field(default="auto", metadata={"python": True})
    """Format of the drafter's K/V."""
    draft_attention: DraftAttention = "target"
    """Attention of the drafter: the target's, or torch (PyTorch's operations), native (the C kernel of a CPU) or triton (a GPU's
    kernel)."""
    compile: bool = False
    """Compile the drafter with torch.compile, instead of volley's kernels; its weights then stay in the models' data type."""
    exact: bool = False
    """Refuse a model, machine or setting for which a token's logits can depend on other requests in the pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy is not None and self.block_size is not None:
            raise ConfigError("block_size fixes the block and policy decides it; give one of them")
        if self.block_size is not None and self.block_size < 1:
            raise ConfigError(
                f"block_size {self.block_size} cannot be used; it is 1 (plain decoding) or more, with a drafter"
            )
        if self.verification not in get_args(Verification):
            raise ConfigError(f"verification {self.verification!r} is unknown; use auto, rejection or coupled")
        if self.verification == "rejection" and self.denoising_steps > 1:
            raise ConfigError(
                "rejection sampling needs the distribution each draft token was drawn from, which multi-step "
                "denoising does not have; use verification='coupled' or denoising_steps=1"
            )
        if self.draft_attention not in get_args(DraftAttention):
            raise unknown_key("draft attention", str(self.draft_attention), get_args(DraftAttention))
        if self.tree_nodes is not None:
            self._check_tree(self.tree_nodes)

    def _check_tree(self, tree_nodes: int) -> None:
        if tree_nodes < 2:
            raise ConfigError(f"tree_nodes is {tree_nodes}; a tree has 2 or more, anchor included. None drafts a chain")
        if self.denoising_steps > 1:
            raise ConfigError(
                "a tree grows from the probabilities of one draft pass, and denoising_steps is "
                f"{self.denoising_steps}; use denoising_steps=1, or tree_nodes=None"
            )
        if self.verification == "rejection":
            raise ConfigError(
                "rejection sampling is biased on a tree, whose tokens are not drawn from the draft's distribution; "
                "use verification='coupled' or 'auto', or tree_nodes=None"
            )

    @property
    def fixed_block(self) -> int:
        """Return the block size that a fixed policy names, anchor included; 0 if none does."""
        return self.block_size or super().fixed_block

    @property
    def max_tree_nodes(self) -> int | None:
        """Return the maximum size of draft trees; 0: no trees, ``None``: the policy decides."""
        if self.tree_nodes is not None:
            return self.tree_nodes - 1
        return None if self.denoising_steps == 1 and self.verification != "rejection" else 0

    def matches(self, seed: int | None) -> bool:
        """Return whether a sampled request with this ``seed`` is verified by sample-and-match (coupled sampling) when it
        drafts a chain."""
        wants_repetition = self.verification == "auto" and seed is not None
        has_no_distribution = self.denoising_steps > 1 or self.tree_nodes is not None
        return self.verification == "coupled" or has_no_distribution or wants_repetition


@names_unknown_fields
@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """Settings of an engine's capacity."""

    max_running: int | None = None
    """Requests decoded at once; by default 64 on a CPU and 256 on a GPU."""
    max_batch_tokens: int | None = None
    """Tokens of one target pass, by default 512 on a CPU and 4096 on a GPU. While prompts are due, drafting requests wait;
    otherwise chains come first, and prompts, trees and prompt-lookup drafts share the rest."""
    page_size: int | None = None
    """Tokens per page of K/V; by default 16, or a multiple of the block of a model that attends both ways within blocks."""
    num_pages: int | None = None
    """Number of K/V pages; by default 64k tokens in 1 GiB or an eighth of a CPU's memory, or 0.9 of a GPU's free memory."""
    kv_mib: float | None = None
    """MiB of all K/V, target's and drafter's, instead of a number of pages."""
    prefix_caching: bool = True
    """Let prompts with a common prefix share pages."""
    num_states: int | None = None
    """Number of recurrent states of a hybrid target, for running requests and prefixes; by default up to 1 GiB."""
    cuda_graphs: bool = True
    """Launch a small pass as one CUDA graph, captured at a server's start or at the first pass of its size; only for NVIDIA
    GPUs."""

    def __post_init__(self) -> None:
        if any(size is not None and size < 1 for size in (self.max_batch_tokens, self.max_running)):
            raise ConfigError("max_batch_tokens and max_running must be at least 1")
        if self.page_size is not None and self.page_size < 1:
            raise ConfigError(f"page_size is {self.page_size}; a page holds at least 1 token")
        if self.kv_mib is not None and self.num_pages is not None:
            raise ConfigError("kv_mib and num_pages both set the size of the K/V; give one of them")
        if self.kv_mib is not None and not self.kv_mib > 0:
            raise ConfigError(f"kv_mib is {self.kv_mib}; it must be more than 0")
        if self.num_states is not None and self.num_states < 2:
            raise ConfigError(f"num_states is {self.num_states}; a request and a prefix need at least 2")


_OF_DRAFTERS = (
    "draft_temperature",
    "denoising_steps",
    "denoising_schedule",
    "denoising_threshold",
    "draft_window",
    "draft_kv_dtype",
    "draft_attention",
    "compile",
    "tree_nodes",
)
_DRAFTING_POLICIES = ("feedback", "goodput:drafts")


def read_by_drafters(config: DecodingConfig) -> list[str]:
    """Return the names of the given settings that only matter with a drafter."""
    policy = ["policy"] if config.policy in _DRAFTING_POLICIES else []
    return policy + [name for name in config.given() if name in _OF_DRAFTERS]


def check_undrafted(names: Sequence[str]) -> None:
    """Refuse the given settings of drafting, because there is no drafter."""
    if names:
        canvases = " (passes over a canvas are max_steps among the diffusion settings)"
        raise ConfigError(
            f"{', '.join(names)}: only a drafter reads such a setting, and there is no drafter; name one (--drafter), or leave "
            f"{'it' if len(names) == 1 else 'them'} out{canvases if any('denoising' in name for name in names) else ''}"
        )


def split_options(
    options: Mapping[str, Any], config: DecodingConfig | None = None, capacity: CapacityConfig | None = None
) -> tuple[DecodingConfig, CapacityConfig]:
    """Return both configs; a missing one is built from options by name.

    Raises ConfigError for an unknown option, with the nearest known one, and for an option given beside the config it belongs to.
    """
    ours, sizes = ({field.name for field in fields(kind)} for kind in (DecodingConfig, CapacityConfig))
    check_keys("engine option", options, ours | sizes)
    for name, given, names in (("config", config, ours), ("capacity", capacity, sizes)):
        if given is not None and (beside := sorted(options.keys() & names)):
            raise ConfigError(f"{name} is given, and {', '.join(beside)} beside it; put all of it into {name}")
    return (
        config or DecodingConfig(**{name: value for name, value in options.items() if name in ours}),
        capacity or CapacityConfig(**{name: value for name, value in options.items() if name in sizes}),
    )
