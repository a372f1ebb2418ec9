"""Canvases of diffusion language models, and the rules by which passes turn noise into tokens.

A *canvas* is a run of tokens that a model denoises together. Masked models (SDAR, Fast-dLLM v2, LLaDA2) begin with mask tokens
and reveal some in every pass; DiffusionGemma begins with random tokens (``decode/renoise.py``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from volley.decode.sampling import PositionNoise, race, token_probs, without
from volley.memory.device import most_together
from volley.types import DiffusionParams, SamplingParams

T = TypeVar("T")


class CanvasNoise(Protocol):
    """The randomness of a canvas, a function of its start and its number of passes."""

    def choose(self, probs: Tensor, start: int, step: int) -> Tensor:
        """A token of each row of ``probs [L, V]``; ``[L]``."""

    def canvas_uniforms(self, start: int, step: int, length: int) -> NDArray[np.float64] | None:
        """What :meth:`choose` gives to :func:`draw`, so that several canvases can draw at once; ``None`` if it does otherwise."""

    def tokens(self, start: int, step: int, length: int, vocab_size: int) -> Tensor:
        """Uniform random tokens ``[length]``."""


class CoupledNoise(PositionNoise):
    """Chooses with the noise of positions, so that a verifier that draws with it agrees as often as shared noise allows."""

    def choose(self, probs: Tensor, start: int, step: int) -> Tensor:
        return race(probs, self.exponentials(range(start, start + len(probs)), probs.shape[-1], probs.device))

    def canvas_uniforms(self, start: int, step: int, length: int) -> None:
        return None


@dataclass(slots=True)
class Canvas:
    """Tokens that are being denoised, at positions ``[start, start + L)``; on the CPU."""

    start: int
    tokens: Tensor
    """``[L]``: the input of the next pass; once ``done``, the result."""
    revealed: Tensor
    """``[L]``, boolean: tokens that are final, unless a rule edits them."""
    num_given: int
    """How many of the first tokens were known before."""
    confidence: Tensor = field(init=False)
    """``[L]``: how sure the model was of each token when it was decided; 0 before."""
    step: int = 0
    """Passes so far."""
    done: bool = False
    feedback: Tensor | None = None
    """``[L, H]``: the last prediction, for a model with self-conditioning."""
    predicted: Tensor | None = None
    """``[L, V]``: the logits from which ``feedback`` is made."""
    history: list[Tensor] = field(default_factory=list)
    """The best tokens ``[L]`` of each of the last passes, for a rule that waits until they do not change."""
    max_steps: int | None = None
    """The number of passes that a procedure has chosen for it."""
    rode: bool = False
    """Whether its first pass also verified another draft."""
    extra_steps: int = 0
    """Passes since the last mask was revealed."""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Of each slot's token under the model's unmodified distribution in the pass that chose it."""

    def __post_init__(self) -> None:
        self.confidence = torch.zeros(len(self))

    def __len__(self) -> int:
        return self.tokens.numel()

    def decide(self, chosen: Tensor, tokens: Tensor, confidence: Tensor) -> None:
        """A pass that puts the ``chosen`` of ``tokens`` into their slots, of all of which it was so sure; each is ``[L]``."""
        self.tokens = torch.where(chosen, tokens, self.tokens)
        self.confidence = torch.where(chosen, confidence, self.confidence)
        self.revealed = self.revealed | chosen
        self.step += 1

    def draft(self) -> list[int | None]:
        """The likeliest tokens so far; ``None`` for a mask."""
        if self.history:  # the canvas itself has random tokens
            return list(self.history[-1].tolist())
        pairs = zip(self.tokens.tolist(), self.revealed.tolist(), strict=True)
        return [token if known else None for token, known in pairs]


class Look(NamedTuple):
    """A pass over one canvas: row i of ``logits [L, V]`` (fp32) predicts slot i."""

    canvas: Canvas
    logits: Tensor
    sampling: SamplingParams
    params: DiffusionParams
    noise: CanvasNoise


def grouped(items: Iterable[T], logits_of: Callable[[T], Tensor]) -> Iterator[list[T]]:
    """Runs of ``items`` whose logits are processed together; one is, whatever its size."""
    some, size = list[T](), 0
    for item in items:
        logits = logits_of(item)
        if some and size + logits.numel() > most_together(logits.device):
            yield some
            some, size = [], 0
        some.append(item)
        size += logits.numel()
    if some:
        yield some


def read_together(*values: Tensor) -> list[Tensor]:
    """Tensors of one shape and device on the CPU: one copy brings all of them."""
    if values[0].device.type == "cpu":
        return list(values)
    read = torch.stack([own.double() for own in values]).cpu()
    return [row.to(own.dtype) for row, own in zip(read, values, strict=True)]


class Denoiser(ABC):
    """A rule of denoising. It has no state: whatever belongs to a canvas is kept in the canvas.

    Equal rules decide about several canvases together.
    """

    @abstractmethod
    def open(self, start: int, given: Sequence[int], params: DiffusionParams, noise: CanvasNoise) -> Canvas:
        """A new canvas of ``params.canvas_length`` slots at position ``start``; ``given`` are its first tokens."""

    @abstractmethod
    def step(
        self, canvas: Canvas, logits: Tensor, sampling: SamplingParams, params: DiffusionParams, noise: CanvasNoise
    ) -> Tensor:
        """Apply one pass to ``canvas``, in place: row i of ``logits [L, V]`` (fp32) predicts slot i.

        Returns which slots got their token in this pass, boolean ``[L]``.
        """

    def step_together(self, looks: Sequence[Look]) -> list[Tensor]:
        """:meth:`step` of several canvases in one pass. A rule may compute what their rows have in common in one go."""
        return [self.step(*look) for look in looks]


@dataclass(frozen=True)
class Reveal(Denoiser):
    """Mask tokens are revealed, the surest first, and stay (SDAR, arXiv 2510.06303; Fast-dLLM v2, arXiv 2509.26328)."""

    mask_token_id: int

    def open(self, start: int, given: Sequence[int], params: DiffusionParams, noise: CanvasNoise) -> Canvas:
        assert params.canvas_length is not None
        tokens = torch.full((params.canvas_length,), self.mask_token_id)
        tokens[: len(given)] = torch.tensor(given, dtype=torch.long)
        return Canvas(start, tokens, torch.arange(len(tokens)) < len(given), len(given))

    def step(
        self, canvas: Canvas, logits: Tensor, sampling: SamplingParams, params: DiffusionParams, noise: CanvasNoise
    ) -> Tensor:
        tokens, confidence, probs = self.candidates(canvas, logits, sampling, noise)
        chosen = self.choose(canvas, confidence, probs, params)
        canvas.decide(chosen, tokens, confidence)
        canvas.done = bool(canvas.revealed.all())
        return chosen

    def candidates(
        self, canvas: Canvas, logits: Tensor, sampling: SamplingParams, noise: CanvasNoise
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A token for each slot ``[L]``, never the mask; its probability ``[L]``, both on the CPU; the distributions ``[L, V]``.

        At temperature 0 it is the likeliest token, and its probability that at temperature 1.
        """
        logits = without(logits, self.mask_token_id)
        if sampling.temperature == 0:
            probs = logits.softmax(dim=-1)
            tokens = probs.argmax(dim=-1)
        else:
            probs = token_probs(logits, sampling)
            tokens = noise.choose(probs, canvas.start, canvas.step)
        confidence = probs.gather(-1, tokens[:, None])[:, 0]
        tokens, confidence = read_together(tokens, confidence)
        return tokens, confidence, probs

    def choose(self, canvas: Canvas, confidence: Tensor, probs: Tensor, params: DiffusionParams) -> Tensor:
        """The masked slots that are revealed now, at least one if there are any: boolean ``[L]``."""
        masked = ~canvas.revealed
        if params.sub_block is not None:
            block = int(masked.int().argmax()) // params.sub_block
            masked &= torch.arange(len(masked)) // params.sub_block == block
        length, steps = len(canvas), params.max_steps or len(canvas)
        share = length // steps + (canvas.step < length % steps)
        count = min(max(1, share), int(masked.sum()))
        if params.strategy == "sequential":
            return masked & (masked.cumsum(0) <= count)
        if params.strategy == "entropy_bounded":
            return _least_uncertain(masked, probs, params)
        chosen = torch.zeros_like(masked)
        chosen[confidence.masked_fill(~masked, -torch.inf).topk(count).indices] = True
        if params.strategy != "low_confidence_static":
            assert params.threshold is not None
            chosen |= masked & (confidence > params.threshold)
        return chosen


def _least_uncertain(masked: Tensor, probs: Tensor, params: DiffusionParams) -> Tensor:
    """The masked slots of least entropy, as long as the sum of their entropies stays below the bound; one of them at least."""
    assert params.entropy_bound is not None
    entropy = torch.special.entr(probs).sum(dim=-1).cpu()
    entropy = entropy.nan_to_num(nan=torch.finfo(entropy.dtype).max)  # canvases of a broken model end, too
    entropy = entropy.masked_fill(~masked, torch.inf)
    ordered, order = entropy.sort(stable=True)
    chosen = torch.zeros_like(masked)
    chosen[order[: max(1, int((ordered.cumsum(0) < params.entropy_bound).sum()))]] = True
    return chosen & masked


MOST_EDITING_STEPS = 16
"""Most passes that only edit, after every mask is revealed (LLaDA2.1)."""


class Edit(Reveal):
    """The same, but a revealed token is replaced by another one with a probability above ``edit_threshold`` (LLaDA2.1)."""

    def step(
        self, canvas: Canvas, logits: Tensor, sampling: SamplingParams, params: DiffusionParams, noise: CanvasNoise
    ) -> Tensor:
        assert params.edit_threshold is not None
        tokens, confidence, probs = self.candidates(canvas, logits, sampling, noise)
        own = torch.arange(len(canvas)) >= canvas.num_given
        edited = own & canvas.revealed & (tokens != canvas.tokens) & (confidence > params.edit_threshold)
        was_full = bool(canvas.revealed.all())
        chosen = edited if was_full else edited | self.choose(canvas, confidence, probs, params)
        canvas.decide(chosen, tokens, confidence)
        canvas.extra_steps += was_full
        canvas.done = was_full and (not bool(edited.any()) or canvas.extra_steps == MOST_EDITING_STEPS)
        return chosen
