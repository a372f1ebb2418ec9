"""Turn logits into probabilities and probabilities into tokens, with noise that belongs to positions instead of calls.

Every random number is a function of (seed, purpose, position). So preemption, chunked prefill and batching cannot change what
a request samples, and coupled sampling gives exactly the tokens of plain decoding.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from hashlib import shake_128
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from volley.decode import noise
from volley.memory.upload import upload, upload_indices
from volley.native import sampling as native
from volley.params import SamplingParams

Numbers = Sequence[float] | NDArray[np.float64]
_CPU = torch.device("cpu")
_ROWS_AT_ONCE = 8  # rows of logits, on a CPU
_SORTS_ALL = 0.999  # above this top_p all tokens are sorted, because rounding might count
_PART = 128  # tokens in each part of a vocabulary; one part is drawn first


class Purpose(IntEnum):
    """Independent random streams at one position."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    CANVAS = 3
    RENOISE = 4


class PositionNoise:
    """Random numbers of one request by purpose and position: counter-based Philox, or a hash if few are needed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def exponentials(self, positions: Sequence[int], size: int, device: torch.device = _CPU) -> Tensor:
        """Return unit exponentials ``[len(positions), size]`` for :func:`race`. The target and coupled drafts use the same
        ones."""
        return exponentials([(self, position) for position in positions], size, device)

    def uniforms(self, purpose: Purpose, first: int, count: int) -> list[float]:
        """Return uniforms in [0, 1), double precision, for the cycle that begins at position ``first``.

        They belong to the cycle. Another cycle begins elsewhere and shares none of them, even if it covers the same positions.
        """
        found: list[float] = uniforms_of([(self, first)], [count], purpose).tolist()
        return found

    def choose(self, probs: Tensor, start: int, step: int) -> Tensor:
        """Draw a token for each row of ``probs [L, V]``, for a pass over the canvas that begins at position ``start``;
        ``[L]``."""
        uniforms = self.canvas_uniforms(start, step, len(probs))
        assert uniforms is not None
        return draw(probs, uniforms)

    def canvas_uniforms(self, start: int, step: int, length: int) -> NDArray[np.float64] | None:
        """Return the uniforms that :meth:`choose` gives to :func:`draw`, so that several canvases can draw at once; ``None``
        if it draws in another way."""
        return _uniforms([(b"%d %d %d %d" % (self.seed, Purpose.CANVAS, start, step), length)])

    def tokens(self, start: int, step: int, length: int, vocab_size: int) -> Tensor:
        """Draw uniform random tokens ``[length]`` for a canvas before pass ``step``."""
        name = b"%d %d %d %d" % (self.seed, Purpose.RENOISE, start, step)
        return torch.from_numpy((_uniforms([(name, length)]) * vocab_size).astype(np.int64))


def exponentials(
    places: Sequence[tuple[PositionNoise, int]], size: int, device: torch.device, moved: Tensor | None = None
) -> Tensor:
    """Return :meth:`PositionNoise.exponentials` of several requests, each at a position: ``[len(places), size]`` on
    ``device``.

    If only the device knows the positions, ``moved [len(places)]`` is added to them there.
    """
    seeds, positions = [own.seed for own, _ in places], [position for _, position in places]
    return noise.exponentials(seeds, Purpose.TARGET, positions, size, device, moved)


def uniforms_of(
    cycles: Sequence[tuple[PositionNoise, int]], sizes: Sequence[int], purpose: Purpose
) -> NDArray[np.float64]:
    """Return :meth:`PositionNoise.uniforms` of several cycles, each given by noise and first position; ``sizes`` are their
    counts."""
    pairs = zip(cycles, sizes, strict=True)
    return _uniforms((b"%d %d %d" % (own.seed, purpose, first), size) for (own, first), size in pairs)


def _uniforms(streams: Iterable[tuple[bytes, int]]) -> NDArray[np.float64]:
    """Return uniforms in [0, 1) for the streams, each given by name and count."""
    words = b"".join(shake_128(name).digest(8 * count) for name, count in streams)
    return (np.frombuffer(words, dtype="<u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53


def moved_uniforms(cycles: Sequence[tuple[PositionNoise, int]], size: int, purpose: Purpose, moved: Tensor) -> Tensor:
    """Return ``size`` uniforms for each of n cycles that begin ``moved [n]`` positions later than ``cycles`` say; ``[n ·
    size]``.

    Only the device knows ``moved``, which is at most ``size``. The host makes the uniforms of all possible positions, and the
    device selects from them.
    """
    places = [(own, first + by) for own, first in cycles for by in range(size + 1)]
    table = uniforms_of(places, [size] * len(places), purpose).reshape(len(cycles), 1 + size, size)
    return upload(table, moved.device).gather(1, moved[:, None, None].expand(-1, 1, size)).flatten()


def without(logits: Tensor, token_id: int) -> Tensor:
    """Return a copy of ``logits [R, V]`` in which one token has no chance."""
    copied = logits.clone()
    copied[:, token_id] = -torch.inf
    return copied


def likeliest(logits: Tensor) -> Tensor:
    """Return the most likely token ``[R]`` of each row of ``logits [R, V]``, the first of equal ones."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    if native.can_choose(logits):
        return native.likeliest(logits, checked=False)
    # NumPy's argmax is several times faster than PyTorch's.
    if logits.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.asarray(logits.numpy().argmax(axis=-1)))
    # NumPy has no bf16. A few rows are converted at a time, so that they stay in the cache.
    parts = [rows.float().numpy().argmax(axis=-1) for rows in torch.split(logits, _ROWS_AT_ONCE)]
    return torch.from_numpy(np.concatenate(parts))


NO_TOKEN = -1
"""Placeholder for a row without a token, because its logits or its distribution are not finite."""


def if_finite(tokens: Tensor, chosen_by: Tensor, raw: Tensor | None = None) -> Tensor:
    """Return ``tokens [R]`` with :data:`NO_TOKEN` in each row whose choice is not valid.

    ``chosen_by [R, V]`` are the logits or weights by which each token was chosen. A NaN counts as the largest logit of its
    row, and makes all weights of a distribution NaN, so the entry of the chosen token is enough to check. Rules may raise a
    logit to infinity. With ``raw``, the target's own logits, only an infinite logit there is invalid.
    """
    entries = chosen_by.gather(-1, tokens[:, None])[:, 0]
    if raw is None:
        return torch.where(entries.abs() < torch.inf, tokens, NO_TOKEN)
    own = raw.gather(-1, tokens[:, None])[:, 0]
    return torch.where((entries > -torch.inf) & (own < torch.inf), tokens, NO_TOKEN)


def likeliest_finite(logits: Tensor, raw: Tensor | None = None) -> Tensor:
    """Return :func:`likeliest` tokens ``[R]``, :func:`if_finite`; ``raw`` are the logits before rules changed them."""
    if raw is None and native.can_choose(logits):
        return native.likeliest(logits, checked=True)
    return if_finite(likeliest(logits), logits, raw)


def best_tokens(logits: Tensor) -> list[int]:
    """Return :func:`likeliest` as a list on the host."""
    best: list[int] = likeliest(logits).tolist()
    return best


def confidences(logits: Tensor) -> Tensor:
    """Return the probability of the most likely token in each row of ``logits [R, V]``, ``[R]`` in double precision.

    A log-probability is precise near 0 even in bf16, which on a CPU is twice as fast as fp32. A few rows are processed at a
    time there, so that they stay in the cache.
    """
    size = _ROWS_AT_ONCE if logits.device.type == "cpu" else max(1, len(logits))
    return torch.cat([rows.log_softmax(dim=-1).amax(dim=-1) for rows in torch.split(logits, size)]).double().exp()


def race(probs: Tensor, exponentials: Tensor) -> Tensor:
    """Draw one token a row: ``argmax probs / exponentials`` falls on token v with probability ``probs[v]``.

    Two distributions raced with the same exponentials agree as often as shared noise allows (Gumbel coupling). This makes
    sampled drafts match sampled verification. ``[R, V]`` → ``[R]``.
    """
    return likeliest(probs / exponentials)


def draw(weights: Tensor, uniforms: Numbers | Tensor) -> Tensor:
    """Draw one token a row by inverting the cumulative sums of ``weights [R, V]``, which need not add up to 1; tokens ``[R]``.

    A part of the vocabulary is drawn first, then a token in it, because cumulative sums over the whole vocabulary are slow.
    ``uniforms [R]`` are in double precision. The token of a row does not depend on other rows.
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
    return (part * _PART + token)[:, 0].clamp_max_(size - 1)  # a token in the padding is not allowed either


def _invert(weights: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Find the entry at ``places [R, 1]``, in [0, 1), of each row's cumulative sum. Return it and the rest of that entry, both
    ``[R, 1]``."""
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1:]
    places = (places * total).minimum(total.nextafter(torch.zeros_like(total)))
    entry = torch.searchsorted(sums, places, right=True).clamp_max_(sums.shape[-1] - 1)  # a row of NaN has no entry
    return entry, sums.gather(-1, entry) - places


def token_probs(logits: Tensor, params: SamplingParams, temperature: float | None = None) -> Tensor:
    """Return the distribution ``[R, V]`` (fp32) that ``params`` makes of ``logits [R, V]``: temperature, then top-k, top-p and
    min-p.

    ``temperature`` overrides the parameters' own; 0 gives the point mass on the largest logit.
    """
    temperature = params.temperature if temperature is None else temperature
    has_top_k = 0 < params.top_k < logits.shape[-1]
    if has_top_k and temperature > 0 and logits.device.type == "cpu":
        return _among_largest(logits, params, temperature)
    logits = logits.float()
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    if temperature != 1:
        logits = logits / temperature
    if has_top_k:
        smallest = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    return _truncated(logits.softmax(dim=-1), params)


def _among_largest(logits: Tensor, params: SamplingParams, temperature: float) -> Tensor:
    """Return the distributions ``[R, V]`` of ``logits`` under top-k, computed from the tokens that top-k keeps alone.

    With 152k tokens that takes a quarter of the time. A row whose largest logit is not finite becomes NaN.
    """
    probs = torch.zeros(logits.shape)
    for row, own in zip(logits, probs, strict=True):
        if row.amax().isfinite():
            places = _largest(row, params.top_k)
            kept = (row[places].float() / temperature).softmax(dim=-1)
            own.numpy()[places.numpy()] = _cut(kept[None], params)[0].numpy()
        else:
            own.fill_(torch.nan)
    return probs


def _largest(row: Tensor, count: int) -> Tensor:
    """Return the places of the ``count`` largest logits of ``row [V]``, and of those equal to the last of them.

    No part of the vocabulary whose maximum is below the ``count``-th largest maximum has one of them.
    """
    parts = np.arange(whole := len(row) // _PART)
    if whole > count:
        maxima = row[: whole * _PART].view(whole, _PART).amax(dim=1).float().numpy()
        parts = np.flatnonzero(maxima >= np.partition(maxima, -count)[-count])
    places = np.append(parts[:, None] * _PART + np.arange(_PART), np.arange(whole * _PART, len(row)))
    found = row[torch.from_numpy(places)].float().numpy()
    return torch.from_numpy(places[found >= np.partition(found, -count)[-count]])


def _truncated(probs: Tensor, params: SamplingParams) -> Tensor:
    """Apply top-p and min-p to ``probs [R, V]``.

    A CPU does not look at tokens below half of ``(1 - top_p) / V``, whose sum is below what top-p cuts, nor at those that min-p
    cuts.
    """
    if probs.device.type != "cpu" or not _cuts(params):
        return _cut(probs, params)
    kept, least = torch.zeros_like(probs), (1 - params.top_p) / 2 / probs.shape[-1]
    least *= params.top_p <= _SORTS_ALL
    for row, own in zip(probs.numpy(), kept.numpy(), strict=True):
        places = np.flatnonzero(~(row < max(least, params.min_p * row.max())))  # NaN stays
        own[places] = _cut(torch.from_numpy(row[places])[None], params)[0].numpy()
    return kept


def _cuts(params: SamplingParams) -> bool:
    return params.top_p < 1 or params.min_p > 0


def _cut(probs: Tensor, params: SamplingParams) -> Tensor:
    """Apply top-p and min-p to ``probs [R, n]`` of all tokens, or of those that may be kept."""
    if not _cuts(params):
        return probs
    if params.top_p < 1:
        probs = nucleus(probs, params.top_p)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    # A sum in fp64 does not show its order, which may depend on the number of rows.
    return probs / probs.sum(dim=-1, keepdim=True, dtype=torch.float64).float()


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Return ``probs [R, V]`` with zeros after the most likely tokens whose sum reaches ``top_p``; of equal ones the first
    stay."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(_behind(ordered, top_p), 0.0))


def _behind(ordered: Tensor, top_p: float) -> Tensor:
    """Return a mask of the entries whose predecessors' sum reaches ``top_p``. The most likely token always stays."""
    before = ordered.cumsum(dim=-1) - ordered
    return (before >= top_p) & (before > 0)


def draft_temperature(params: SamplingParams) -> float:
    """Return the draft's temperature: its own if one was given, else the target's."""
    return params.temperature if params.draft_temperature is None else params.draft_temperature


def draft_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution ``[R, V]`` that draft tokens are drawn from."""
    return token_probs(logits, params, draft_temperature(params))


class Score(NamedTuple):
    """Score of one known token by the target, before any sampling parameter."""

    logprob: float
    """Natural log-probability."""
    rank: int
    """Rank among all tokens; the most likely has 1, and equal ones share the best rank."""
    likeliest: list[tuple[int, float]]
    """Most likely tokens with their log-probabilities, most likely first."""


def scores_on_device(logits: Tensor, token_ids: Sequence[int], count: int) -> Tensor:
    """Compute the numbers that :func:`read_scores` parses, in double precision, for one token of each row of ``logits [R,
    V]`` and the ``count`` most likely ones; ``[R · (2 + 2 · count)]`` on their device."""
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    tokens = upload_indices(token_ids, logits.device)[:, None]
    ranks = 1 + (logits > logits.gather(1, tokens)).sum(dim=-1, keepdim=True)
    parts = [logprobs.gather(1, tokens), ranks, best.values, best.indices]
    return torch.cat([part.double() for part in parts], dim=1).flatten()


def read_scores(values: Sequence[float], num_rows: int) -> list[Score]:
    """Parse the numbers of :func:`scores_on_device`, one row after the other."""
    rows = np.array(values).reshape(num_rows, -1).tolist()
    half = (len(rows[0]) - 2) // 2 if rows else 0
    return [
        Score(own[0], int(own[1]), list(zip(map(int, own[2 + half :]), own[2 : 2 + half], strict=True))) for own in rows
    ]


def scores_of(logits: Tensor, token_ids: Sequence[int], count: int) -> list[Score]:
    """Score one token of each row of ``logits [R, V]``, with the ``count`` most likely ones, in one copy from the device."""
    return read_scores(scores_on_device(logits, token_ids, count).tolist(), len(logits))
