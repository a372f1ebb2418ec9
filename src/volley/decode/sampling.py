"""From logits to probabilities to tokens, with randomness that belongs to positions rather than to calls.

Every random number is a function of (seed, purpose, position). Preempting a request, chunking its prompt or batching it
with others therefore cannot change what it samples, and sample-and-match gives the very tokens plain decoding gives.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from hashlib import shake_128
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from volley.decode import noise
from volley.memory.upload import upload, upload_indices
from volley.types import SamplingParams

Numbers = Sequence[float] | NDArray[np.float64]
_CPU = torch.device("cpu")
_ROWS_AT_ONCE = 8  # of logits, on a CPU
_SORTS_ALL = 0.999  # above this top_p all tokens are sorted: rounding might count
_PART = 128  # tokens in each part of a vocabulary, of which one is drawn first


class Purpose(IntEnum):
    """Independent streams of randomness at one position."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    CANVAS = 3
    RENOISE = 4


class PositionNoise:
    """Random numbers of one request by purpose and position: counter-based Philox, or a hash where few are needed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def exponentials(self, positions: Sequence[int], size: int, device: torch.device = _CPU) -> Tensor:
        """Unit exponentials ``[len(positions), size]`` for :func:`race`, the same for the target and for drafts that match it."""
        return exponentials([(self, position) for position in positions], size, device)

    def uniforms(self, purpose: Purpose, first: int, count: int) -> list[float]:
        """Uniforms in [0, 1), double precision, of the cycle that begins at position ``first``.

        They belong to the cycle. Another cycle begins elsewhere and shares none of them, even where it covers the same positions.
        """
        found: list[float] = uniforms_of([(self, first)], [count], purpose).tolist()
        return found

    def choose(self, probs: Tensor, start: int, step: int) -> Tensor:
        """A token of each row of ``probs [L, V]``, for a pass over the canvas that begins at position ``start``; ``[L]``."""
        uniforms = self.canvas_uniforms(start, step, len(probs))
        assert uniforms is not None
        return draw(probs, uniforms)

    def canvas_uniforms(self, start: int, step: int, length: int) -> NDArray[np.float64] | None:
        """What :meth:`choose` gives to :func:`draw`; ``None`` if it chooses in another way."""
        return _uniforms([(b"%d %d %d %d" % (self.seed, Purpose.CANVAS, start, step), length)])

    def tokens(self, start: int, step: int, length: int, vocab_size: int) -> Tensor:
        """Uniform random tokens ``[length]`` for a canvas before pass ``step``."""
        name = b"%d %d %d %d" % (self.seed, Purpose.RENOISE, start, step)
        return torch.from_numpy((_uniforms([(name, length)]) * vocab_size).astype(np.int64))


def exponentials(
    places: Sequence[tuple[PositionNoise, int]], size: int, device: torch.device, moved: Tensor | None = None
) -> Tensor:
    """:meth:`PositionNoise.exponentials` of several requests, each at a position: ``[len(places), size]`` on ``device``.

    If only the device knows the positions, each is ``moved [len(places)]`` further on than it says.
    """
    seeds, positions = [own.seed for own, _ in places], [position for _, position in places]
    return noise.exponentials(seeds, Purpose.TARGET, positions, size, device, moved)


def uniforms_of(
    cycles: Sequence[tuple[PositionNoise, int]], sizes: Sequence[int], purpose: Purpose
) -> NDArray[np.float64]:
    """:meth:`PositionNoise.uniforms` of several cycles, each given by noise and first position; ``sizes`` are their counts."""
    pairs = zip(cycles, sizes, strict=True)
    return _uniforms((b"%d %d %d" % (own.seed, purpose, first), size) for (own, first), size in pairs)


def _uniforms(streams: Iterable[tuple[bytes, int]]) -> NDArray[np.float64]:
    """Uniforms in [0, 1), so many of each stream, by its name."""
    words = b"".join(shake_128(name).digest(8 * count) for name, count in streams)
    return (np.frombuffer(words, dtype="<u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53


def moved_uniforms(cycles: Sequence[tuple[PositionNoise, int]], size: int, purpose: Purpose, moved: Tensor) -> Tensor:
    """The same, ``size`` of each, where only the device knows that each begins ``moved [n]`` positions further on than it says.

    These are at most ``size``. The host makes the numbers of all places, and ``[n · size]`` are taken of them on the device.
    """
    places = [(own, first + by) for own, first in cycles for by in range(size + 1)]
    table = uniforms_of(places, [size] * len(places), purpose).reshape(len(cycles), 1 + size, size)
    return upload(table, moved.device).gather(1, moved[:, None, None].expand(-1, 1, size)).flatten()


def without(logits: Tensor, token_id: int) -> Tensor:
    """A copy of ``logits [R, V]`` by which one token is never chosen."""
    copied = logits.clone()
    copied[:, token_id] = -torch.inf
    return copied


def likeliest(logits: Tensor) -> Tensor:
    """The most likely token ``[R]`` of each row of ``logits [R, V]``, the first of equal ones."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    # NumPy's search is several times faster than PyTorch's.
    if logits.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    # It has no bf16. A few rows at a time are converted, which stay in the cache.
    parts = [rows.float().numpy().argmax(axis=-1) for rows in torch.split(logits, _ROWS_AT_ONCE)]
    return torch.from_numpy(np.concatenate(parts))


NO_TOKEN = -1
"""Stands where a row chooses no token, because its logits or its distribution are not finite."""


def if_finite(tokens: Tensor, chosen_by: Tensor, raw: Tensor | None = None) -> Tensor:
    """``tokens [R]`` with :data:`NO_TOKEN` for each row whose choice means nothing.

    ``chosen_by [R, V]`` are the logits or weights by which each token was chosen. A NaN is the largest logit of its row, and
    makes all weights of a distribution NaN, so the entry of the token tells. Rules may raise a logit to infinity; with ``raw``
    only an infinite logit of the target's own counts.
    """
    entries = chosen_by.gather(-1, tokens[:, None])[:, 0]
    own = entries if raw is None else raw.gather(-1, tokens[:, None])[:, 0]
    return torch.where((entries > -torch.inf) & (own < torch.inf), tokens, NO_TOKEN)


def best_tokens(logits: Tensor) -> list[int]:
    """:func:`likeliest`, read by the host."""
    best: list[int] = likeliest(logits).tolist()
    return best


def confidences(logits: Tensor) -> Tensor:
    """The probability of the most likely token in each row of ``logits [R, V]``, ``[R]`` in double precision.

    A log-probability is precise near 0 even in bf16, which on a CPU is twice as fast as fp32. There a few rows at a time stay in
    the cache.
    """
    size = _ROWS_AT_ONCE if logits.device.type == "cpu" else max(1, len(logits))
    return torch.cat([rows.log_softmax(dim=-1).amax(dim=-1) for rows in torch.split(logits, size)]).double().exp()


def race(probs: Tensor, exponentials: Tensor) -> Tensor:
    """Draw one token a row: ``argmax probs / exponentials`` falls on token v with probability ``probs[v]``.

    Two distributions raced with the same exponentials agree as often as any shared noise allows (Gumbel coupling), which
    is what makes sampled drafts match sampled verification. ``[R, V]`` → ``[R]``.
    """
    return (probs / exponentials).argmax(dim=-1)


def draw(weights: Tensor, uniforms: Numbers | Tensor) -> Tensor:
    """Draw one token a row by inverting the sums of ``weights [R, V]``, which need not add up to 1; tokens ``[R]``.

    First a part of the vocabulary is drawn, then a token in it, because running sums over all of it are slow. ``uniforms [R]``
    are in double precision. The token of a row does not depend on other rows.
    """
    if not isinstance(uniforms, Tensor):
        uniforms = upload(np.array(uniforms, dtype=np.float64), weights.device)
    places = uniforms[:, None]
    size = weights.shape[-1]
    if size % _PART:
        weights = pad(weights, (0, -size % _PART))
    parts = weights.view(len(weights), -1, _PART)
    masses = parts.sum(dim=-1)
    part, left = _invert(masses, places)
    inside = (1 - left / masses.gather(-1, part)).clamp_min_(0)
    token, _ = _invert(parts.take_along_dim(part[..., None], dim=1)[:, 0], inside)
    return (part * _PART + token)[:, 0].clamp_max_(size - 1)  # nor may it be in the padding


def _invert(weights: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The entry at ``places [R, 1]``, in [0, 1), of each row's running sum, and the rest of that entry; both ``[R, 1]``."""
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1:]
    places = (places * total).minimum(total.nextafter(torch.zeros_like(total)))
    entry = torch.searchsorted(sums, places, right=True).clamp_max_(sums.shape[-1] - 1)  # a row of NaN has no place
    return entry, sums.gather(-1, entry) - places


def token_probs(logits: Tensor, params: SamplingParams, temperature: float | None = None) -> Tensor:
    """The distribution ``[R, V]`` (fp32) that ``params`` makes of ``logits [R, V]``: temperature, then top-k, top-p and min-p.

    ``temperature`` overrides the parameters' own; 0 gives the point mass on the largest logit.
    """
    temperature = params.temperature if temperature is None else temperature
    logits = logits.float()
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    if temperature != 1:
        logits = logits / temperature
    if 0 < params.top_k < logits.shape[-1]:
        smallest = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probs = logits.softmax(dim=-1)
    if params.top_p >= 1 and params.min_p <= 0:
        return probs
    if params.top_p < 1:
        probs = nucleus(probs, params.top_p)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    # In fp64 the order of the sum, which may depend on the number of rows, does not show.
    return probs / probs.sum(dim=-1, keepdim=True, dtype=torch.float64).float()


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """``probs [R, V]`` with zeros behind the likeliest tokens, whose sum reaches ``top_p``; of equal ones the first stay.

    On a CPU only tokens of at least half of ``(1 - top_p) / V`` are sorted: all others together are less than what is cut.
    """
    if probs.device.type != "cpu" or top_p > _SORTS_ALL:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        return torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(_behind(ordered, top_p), 0.0))
    kept, least = torch.zeros_like(probs), (1 - top_p) / 2 / probs.shape[-1]
    for row, own in zip(probs, kept, strict=True):
        places = (row >= least).nonzero()[:, 0]
        ordered, order = row[places].sort(descending=True, stable=True)
        own[places[order]] = ordered.masked_fill(_behind(ordered, top_p), 0.0)
    return kept


def _behind(ordered: Tensor, top_p: float) -> Tensor:
    """Where the sum of those before reaches ``top_p``. The likeliest always stays."""
    before = ordered.cumsum(dim=-1) - ordered
    return (before >= top_p) & (before > 0)


def draft_temperature(params: SamplingParams) -> float:
    """The draft's temperature: its own if one was given, else the target's."""
    return params.temperature if params.draft_temperature is None else params.draft_temperature


def draft_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution ``[R, V]`` that draft tokens are drawn from."""
    return token_probs(logits, params, draft_temperature(params))


class Scores(NamedTuple):
    """What the target says of R tokens that are known, before any sampling parameter."""

    logprobs: list[float]
    """Natural logarithms."""
    ranks: list[int]
    """The place of each token among those of its row; the likeliest has 1, equal ones share the best."""
    likeliest: list[list[tuple[int, float]]]
    """The likeliest tokens of each row with their log-probabilities, likeliest first."""

    @classmethod
    def read(cls, values: Sequence[float], num_rows: int) -> Self:
        """From the numbers of :func:`scores_of`, one row after the other."""
        found = np.array(values).reshape(num_rows, -1)
        own, ranks, rest = np.split(found, [1, 2], axis=1)
        best, tokens = np.split(rest, 2, axis=1)
        pairs = zip(tokens.astype(np.int64).tolist(), best.tolist(), strict=True)
        likeliest = [list(zip(*pair, strict=True)) for pair in pairs]
        return cls(own[:, 0].tolist(), ranks[:, 0].astype(np.int64).tolist(), likeliest)


def scores_of(logits: Tensor, token_ids: Sequence[int], count: int) -> Tensor:
    """What :meth:`Scores.read` reads, in double precision: of a token for each row of ``logits [R, V]``, and of the ``count``
    likeliest; ``[R · (2 + 2 · count)]`` on their device.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    tokens = upload_indices(token_ids, logits.device)[:, None]
    ranks = 1 + (logits > logits.gather(1, tokens)).sum(dim=-1, keepdim=True)
    parts = [logprobs.gather(1, tokens), ranks, best.values, best.indices]
    return torch.cat([part.double() for part in parts], dim=1).flatten()


def logprobs_of(
    logits: Tensor, token_ids: Sequence[int], count: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """The log-probabilities of :func:`scores_of`, and the likeliest tokens. One copy brings all of them from the device."""
    found = Scores.read(scores_of(logits, token_ids, count).tolist(), len(logits))
    return found.logprobs, found.likeliest
