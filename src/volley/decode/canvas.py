"""Define the canvases of diffusion language models, and the rules by which passes turn noise into tokens.

A *canvas* is a run of tokens that a model denoises together. Masked models (SDAR, Fast-dLLM v2) begin with mask tokens
and reveal some in every pass. DiffusionGemma begins with random tokens (``decode/renoise.py``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from volley.decode.sampling import PositionNoise, Score, race, token_probs, without
from volley.memory.device import most_together
from volley.params import DiffusionParams, SamplingParams

T = TypeVar("T")


class CoupledNoise(PositionNoise):
    """Draws with the noise of positions. A verifier that draws with the same noise agrees as often as shared noise allows."""

    def choose(self, probs: Tensor, start: int, step: int) -> Tensor:
        return race(probs, self.exponentials(range(start, start + len(probs)), probs.shape[-1], probs.device))

    def canvas_uniforms(self, start: int, step: int, length: int) -> None:
        return None


@dataclass(slots=True)
class Canvas:
    """Tokens that are being denoised, at positions ``[start, start + L)``, on the CPU."""

    start: int
    tokens: Tensor
    """Input of the next pass, ``[L]``; once ``done``, the result."""
    revealed: Tensor
    """Mask of final tokens, boolean ``[L]``."""
    num_given: int
    """Number of first tokens that were given."""
    confidence: Tensor = field(init=False)
    """Probability of each token when it was decided, ``[L]``; 0 before."""
    step: int = 0
    """Number of passes so far."""
    done: bool = False
    feedback: Tensor | None = None
    """Self-conditioning input ``[L, H]`` made from the last prediction, for a model that uses it."""
    predicted: Tensor | None = None
    """Logits ``[L, V]`` from which ``feedback`` is made."""
    history: list[Tensor] = field(default_factory=list)
    """Most likely tokens ``[L]`` of each of the last passes, for a rule that waits until they are stable."""
    max_steps: int | None = None
    """Number of passes that a decoding method has chosen for it."""
    is_fused: bool = False
    """True if its first pass also verified another draft (a fused canvas)."""
    scores: list[Score] = field(default_factory=list)
    """Score of each slot's token in the pass that chose it, if requested."""

    def __post_init__(self) -> None:
        self.confidence = torch.zeros(len(self))

    def __len__(self) -> int:
        return self.tokens.numel()

    def decide(self, chosen: Tensor, tokens: Tensor, confidence: Tensor) -> None:
        """Put the ``chosen`` of ``tokens`` into their slots with their ``confidence``, and count a pass; each argument is
        ``[L]``."""
        self.tokens = torch.where(chosen, tokens, self.tokens)
        self.confidence = torch.where(chosen, confidence, self.confidence)
        self.revealed = self.revealed | chosen
        self.step += 1

    def draft(self) -> list[int | None]:
        """Return the most likely tokens so far; ``None`` for a mask."""
        if self.history:  # the canvas itself holds random tokens
            return list(self.history[-1].tolist())
        pairs = zip(self.tokens.tolist(), self.revealed.tolist(), strict=True)
        return [token if known else None for token, known in pairs]


class CanvasOutput(NamedTuple):
    """Output of a pass over one canvas: row i of ``logits [L, V]`` (fp32) predicts slot i."""

    canvas: Canvas
    logits: Tensor
    sampling: SamplingParams
    params: DiffusionParams
    noise: PositionNoise


def grouped(items: Iterable[T], logits_of: Callable[[T], Tensor]) -> Iterator[list[T]]:
    """Split ``items`` into runs whose logits are processed together; a run has at least one item."""
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
    """Copy tensors of one shape and device to the CPU in one transfer."""
    if values[0].device.type == "cpu":
        return list(values)
    read = torch.stack([own.double() for own in values]).cpu()
    return [row.to(own.dtype) for row, own in zip(read, values, strict=True)]


class Denoiser(ABC):
    """A denoising rule. It is stateless: the state of a canvas is in the canvas.

    Equal rules process several canvases together.
    """

    @abstractmethod
    def open(self, start: int, given: Sequence[int], params: DiffusionParams, noise: PositionNoise) -> Canvas:
        """Make a canvas of ``params.canvas_length`` slots at position ``start``; ``given`` are its first tokens."""

    @abstractmethod
    def step(self, output: CanvasOutput) -> Tensor:
        """Apply one pass to a canvas, in place. Return the slots that got their token in this pass, boolean ``[L]``."""

    def step_together(self, outputs: Sequence[CanvasOutput]) -> list[Tensor]:
        """Call :meth:`step` for several canvases. A rule may process their rows together."""
        return [self.step(output) for output in outputs]


@dataclass(frozen=True)
class Reveal(Denoiser):
    """Reveals mask tokens, the most confident first; they then stay (SDAR, arXiv 2510.06303; Fast-dLLM v2, arXiv 2509.26328)."""

    mask_token_id: int

    def open(self, start: int, given: Sequence[int], params: DiffusionParams, noise: PositionNoise) -> Canvas:
        assert params.canvas_length is not None
        tokens = torch.full((params.canvas_length,), self.mask_token_id)
        tokens[: len(given)] = torch.tensor(given, dtype=torch.long)
        return Canvas(start, tokens, torch.arange(len(tokens)) < len(given), len(given))

    def step(self, output: CanvasOutput) -> Tensor:
        canvas, (tokens, confidence, probs) = output.canvas, self.candidates(output)
        chosen = self.choose(canvas, confidence, probs, output.params)
        canvas.decide(chosen, tokens, confidence)
        canvas.done = bool(canvas.revealed.all())
        return chosen

    def candidates(self, output: CanvasOutput) -> tuple[Tensor, Tensor, Tensor]:
        """Choose a token for each slot, never the mask. Return tokens and probabilities ``[L]`` on the CPU, and the
        distributions ``[L, V]``.

        At temperature 0 the token is the most likely one, and its probability is that at temperature 1.
        """
        logits = without(output.logits, self.mask_token_id)
        if output.sampling.temperature == 0:
            probs = logits.softmax(dim=-1)
            tokens = probs.argmax(dim=-1)
        else:
            probs = token_probs(logits, output.sampling)
            tokens = output.noise.choose(probs, output.canvas.start, output.canvas.step)
        confidence = probs.gather(-1, tokens[:, None])[:, 0]
        tokens, confidence = read_together(tokens, confidence)
        return tokens, confidence, probs

    def choose(self, canvas: Canvas, confidence: Tensor, probs: Tensor, params: DiffusionParams) -> Tensor:
        """Return the masked slots to reveal now, boolean ``[L]``; at least one if there are any."""
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
    """Return the masked slots of lowest entropy while the sum of their entropies is below the bound; at least one."""
    assert params.entropy_bound is not None
    entropy = torch.special.entr(probs).sum(dim=-1).cpu()
    entropy = entropy.nan_to_num(nan=torch.finfo(entropy.dtype).max)  # a canvas ends even with NaN logits
    entropy = entropy.masked_fill(~masked, torch.inf)
    ordered, order = entropy.sort(stable=True)
    chosen = torch.zeros_like(masked)
    chosen[order[: max(1, int((ordered.cumsum(0) < params.entropy_bound).sum()))]] = True
    return chosen & masked
