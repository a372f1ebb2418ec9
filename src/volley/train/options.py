"""Define the options of a drafter's training (DFlash §4.2, §A.1; smaller sizes by default) and of a pilot's."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from volley.errors import ConfigError, check_fields, names_unknown_fields, unknown_key
from volley.models.drafters.tap_layers import parse_taps
from volley.prompts import check_training

Value = TypeVar("Value")
REPORTING_OPTIONS = frozenset(
    {
        "eval_prompts",
        "eval_max_tokens",
        "eval_steps",
        "eval_minutes",
        "log_steps",
        "save_minutes",
        "save_steps",
        "threads",
    }
)
"""Options of reporting and saving, which a resumed run may change."""

PATH_OPTIONS = frozenset({"target", "data", "eval_data", "init", "cache_dir"})
"""Options that name files or folders."""

SHAPE_OPTIONS = (
    "block_size",
    "num_layers",
    "taps",
    "intermediate_size",
    "window",
    "head",
    "mask_token_id",
    "draft_vocab_size",
)
"""Options of a drafter's shape; ``keep_shape`` takes them from the drafter in ``init``."""

RANDOM = "random"
"""Value of ``init`` for random weights."""
LONGEST = 8192
"""Most tokens of a document if ``tokens_per_batch`` is not given. A document longer than a batch is a separate batch."""

CHOICES = {
    "head": ("none", "residual", "markov"),
    "loss_decay": ("decay", "pace"),
    "features": ("auto", "online", "memory", "cache"),
    "attention": ("auto", "grouped", "sdpa", "flex"),
    "dtype": ("bfloat16", "float32"),
    "optimizer": ("adamw", "muon"),
}

UNSET: dict[str, tuple[None]] = {"loss_decay": (None,), "optimizer": (None,)}
"""Choices that a preset makes if they are not given."""


@names_unknown_fields
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of a training. ``None`` takes the value from the target, its preset or the paper."""

    target: str
    """Folder or hub name of the target: any causal LM that transformers loads."""
    data: tuple[str, ...]
    """JSONL files of ``{"messages": [...]}`` whose last message is the target's own response."""
    out: str
    """Folder for the checkpoint, the log and the drafter; a run that finds its checkpoint there goes on from it."""

    eval_data: str | None = None
    """JSONL of held-out rows in the same form; without it ``eval_share`` of the data is held out."""
    eval_share: float = 0.02
    """Share of ``data`` that is never trained on when there is no ``eval_data``; 0 holds nothing out."""
    eval_prompts: int = 24
    """Held-out prompts decoded by the engine at each evaluation to measure the real τ; 0 decodes none."""
    eval_max_tokens: int = 128
    """Tokens decoded for each of them."""
    eval_steps: int | None = None
    """Evaluate every so many steps; an evaluation always ends the run."""
    eval_minutes: float | None = None
    """Evaluate every so many minutes."""
    keep_best: bool = False
    """Write the drafter of the evaluation with the best real τ instead of the last one's."""
    patience: int | None = None
    """With ``keep_best``: stop after so many evaluations in a row whose real τ is 3 % or more below the best."""

    init: str | None = None
    """Folder of a drafter of the same shape to start from; a sequential head may be new. By default copies of the target's last
    layers; ``random``: random weights."""
    keep_shape: bool = False
    """Take the shape, mask token and sequential head of the drafter in ``init``, instead of naming them option by option."""
    preset: str | None = None
    """Name of a preset (``volley presets``) for what is not given; by default that of the target's family and width."""
    block_size: int | None = None
    """Block size B, anchor included; by default the preset's."""
    num_layers: int | None = None
    """Draft layers; by default the preset's: a sixth of the target's, at most the family's number."""
    taps: int | str | tuple[int, ...] | None = None
    """How many target layers to tap, spread evenly from the second to the third-to-last (default 5), or their 0-based
    ids (``"1,9,17"``)."""
    intermediate_size: int | None = None
    """Width of the draft MLPs; by default the target's."""
    window: int | None = None
    """Context tokens a draft layer sees before its block; by default all of them."""
    head: str = "none"
    """Sequential head on the slots: ``none`` is DFlash, ``residual`` corrects the hidden state by the token before,
    ``markov`` the logits by that token alone, which llama.cpp and vLLM can do too."""
    head_rank: int = 256
    """Rank of the sequential head."""
    mask_token_id: int | None = None
    """Token that marks an empty slot; by default one of the target's that no text uses, or that the data has least of."""
    draft_vocab_size: int | None = None
    """Draft only so many tokens, the most frequent in the responses; 0 drafts all. By default as many as promise most speed."""

    max_length: int | None = None
    """Longer rows are cut to so many tokens; by default to ``tokens_per_batch`` where that is given, else to 8192, and always to
    the target's context."""
    tokens_per_batch: int | None = None
    """Context tokens, padding included, that one step may hold; by default 1024 on a CPU and 8192 on a GPU, more where a row is
    longer."""
    rows_per_pass: int | None = None
    """Block rows (blocks × block size) computed at a time within a step; by default 4096 on a CPU, 16,384 on a GPU."""
    anchors_per_sequence: int | None = None
    """Blocks drawn from each response in each epoch, at most. By default 64, and where features are kept as many as predict each
    token of a response about once."""
    reveal: float = 0.0
    """Share of the blocks in which a random number of slots hold their true tokens, as later denoising passes see them. Give
    it for a drafter that is to draft in several passes."""
    loss_decay: str | None = None
    """``decay`` weighs slot k by exp(−(k−1)/γ), ``pace`` by how much of the expected length hangs
    on it (D-PACE): the default, where nothing is revealed."""
    gamma: float | None = None
    """γ of the decay; by default 4, 5 and 7 for blocks of 8, 10 and 16, straight lines between."""
    soft_targets: float = 0.0
    """Share of the loss that is taken against the target's distribution (forward KL) instead of its sampled token."""

    optimizer: str | None = None
    """``adamw`` (the paper's), or ``muon`` for the matrices and AdamW for the rest; by default the preset's."""
    learning_rate: float | None = None
    """Peak learning rate; by default the preset's, and the paper's 6e-4 for a drafter that is trained on."""
    epochs: int | None = None
    """Passes over the data, at most. By default 6, or as many as ``max_steps`` and ``max_minutes`` allow where one is given."""
    max_steps: int | None = None
    """Stop after so many steps, if the epochs have not ended before."""
    max_minutes: float | None = None
    """Stop after so many minutes of training and evaluation. The learning rate anneals to whichever bound ends first."""
    seed: int = 0
    """Fixes the initial weights, the order of the data and the anchors."""

    features: str = "auto"
    """``online`` runs the target in every step; ``memory`` runs it once for each document whose features fit into a quarter of
    the memory; ``cache`` keeps all of them on disk; ``auto`` is ``memory`` on a CPU and ``online`` elsewhere."""
    cache_dir: str | None = None
    """Folder of the feature cache; by default ``features`` inside ``out``."""
    device: str = "auto"
    """Torch device, such as ``cpu`` or ``cuda``; auto is the GPU if there is one."""
    dtype: str = "bfloat16"
    """Compute type; master weights are always fp32."""
    attention: str = "auto"
    """``grouped`` (one dense product per document), ``sdpa`` (PyTorch's, with a mask) or ``flex`` (FlexAttention, which compiles
    for minutes first); ``auto`` is ``sdpa`` on a GPU and ``grouped`` elsewhere."""
    threads: int | None = None
    """CPU threads; by default torch's choice."""

    log_steps: int = 20
    """Print a line every so many steps."""
    save_minutes: float | None = 5.0
    """Save a checkpoint every so many minutes."""
    save_steps: int | None = None
    """Save a checkpoint every so many steps as well."""

    def __post_init__(self) -> None:
        data: Any = self.data
        object.__setattr__(self, "data", (data,) if isinstance(data, str) else tuple(map(str, data)))
        object.__setattr__(self, "target", str(self.target))
        object.__setattr__(self, "out", str(self.out))
        object.__setattr__(self, "taps", parse_taps(self.taps))
        for name, choices in CHOICES.items():
            if getattr(self, name) not in (*choices, *UNSET.get(name, ())):
                raise unknown_key(f"value of {name},", str(getattr(self, name)), choices)
        check_fields(self, *self._checks())
        if self.reveal and self.loss_decay == "pace":
            raise ConfigError(
                "pace weighs whole blocks, and reveal leaves some of their slots out; use loss_decay='decay'"
            )
        if self.keep_shape:
            self._check_shape()

    def _check_shape(self) -> None:
        if self.init in (None, RANDOM):
            raise ConfigError("keep_shape takes the shape of a drafter, and none is named; give its folder as init")
        for name in SHAPE_OPTIONS:
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise ConfigError(f"keep_shape takes it from the drafter in init; leave out {name}")

    def _checks(self) -> Iterable[tuple[str, bool, str]]:
        yield "data", bool(self.data), "at least one JSONL file"
        block_size = self.block_size
        yield "block_size", block_size is None or block_size >= 2, "2 or more: an anchor and at least one slot to draft"
        yield "eval_share", 0 <= self.eval_share < 1, "in [0, 1)"
        for name in ("soft_targets", "reveal"):
            yield name, 0 <= getattr(self, name) <= 1, "in [0, 1]"
        yield "eval_prompts", self.eval_prompts >= 0, "0 or more"
        yield "draft_vocab_size", (self.draft_vocab_size or 0) >= 0, "0 or more"
        yield "max_length", self.max_length is None or self.max_length >= 2, "2 or more"
        for name in ("log_steps", "head_rank"):
            yield name, getattr(self, name) > 0, "positive"
        optional: tuple[str, ...] = (
            "rows_per_pass",
            "num_layers",
            "intermediate_size",
            "window",
            "gamma",
            "epochs",
            "tokens_per_batch",
            "anchors_per_sequence",
            "learning_rate",
        )
        optional += ("max_steps", "max_minutes", "eval_steps", "eval_minutes", "save_minutes", "save_steps", "threads")
        optional += ("patience",)
        yield "patience", self.patience is None or self.keep_best, "left out without keep_best"
        for name in optional:
            value = getattr(self, name)
            yield name, value is None or value > 0, "positive, or left out"


def filled(value: Value | None) -> Value:
    """Return an option that a preset has filled in (``presets.with_preset``)."""
    assert value is not None, "a preset fills in what is left out"
    return value


@names_unknown_fields
@dataclass(frozen=True, kw_only=True)
class PilotOptions:
    """Options of a pilot's training (BlockPilot)."""

    prompts: tuple[str, ...]
    """Prompt files (JSONL with ``prompt``, ``messages`` or ``turns``: the first of them) or training datasets by name."""
    data_dir: Path | None = None
    """Folder with the named datasets' files; without it they come from the hub."""
    limit: int | None = None
    """Prompts taken from each source."""
    out: Path | None = None
    """Folder for the pilot; by default the drafter's, where --policy pilot finds it."""
    labels: Path | None = None
    """File that keeps what was measured of each prompt; a run that finds it goes on from there."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Each prompt is answered at each; the pilot knows a request's."""
    thinking: bool | None = None
    """Passed to the chat template as ``enable_thinking``; left out, the template decides."""
    max_tokens: int = 96
    """Longest answer."""
    batch: int = 32
    """Prompts answered at once while they are labelled."""
    concurrency: int = 1
    """Requests at once that the choice shall be fastest for."""
    block_size: int | None = None
    """The middle of the sizes to choose from, 2 or more; by default the drafter's own."""
    radius: int = 2
    """How far the sizes go to either side of it."""
    input: str = "top"
    """Input from the prompt's last token: the probabilities of the target's ``top`` tokens, all ``logits``, their
    ``softmax``, the ``normalised`` logits, or the ``hidden`` states that the drafter reads."""
    width: int = 2048
    """Width of the hidden layers."""
    layers: int = 2
    """Linear maps; 1 has no hidden layer."""
    epochs: int = 100
    """Passes over the labelled prompts."""
    learning_rate: float = 1e-3
    """AdamW's, falling to zero."""
    eval_share: float = 0.2
    """Share of the prompts kept to say how good the pilot is."""
    seed: int = 0
    """Fixes weights, order and answers."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("the pilot has no prompts; name at least one prompt file or dataset")
        check_training(self.prompts)
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(f"temperatures are {self.temperatures}; give at least one, each 0 or more")
        check_fields(self, ("block_size", (self.block_size or 2) >= 2, "2 or more, the anchor and a token"))
        positive = ("max_tokens", "batch", "concurrency", "epochs", "learning_rate")
        check_fields(self, *((name, getattr(self, name) > 0, "positive") for name in positive))
        if self.radius < 1:
            raise ConfigError(
                f"radius is {self.radius}; a pilot needs more than one size to choose from, give 1 or more"
            )
        check_fields(self, ("eval_share", 0 < self.eval_share < 1, "between 0 and 1"))

    def block_sizes(self, trained: int) -> tuple[int, ...]:
        """Return the sizes from which a pilot chooses, for a drafter ``trained`` for a block size. Larger blocks use the same
        masks."""
        middle = self.block_size or trained
        return tuple(range(max(2, middle - self.radius), middle + self.radius + 1))
