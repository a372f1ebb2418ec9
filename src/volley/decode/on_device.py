"""Keep drafts on the device until their verdicts are read, so that the host waits once a step.

Draft tokens go from the drafter into the target's pass without the host, which prepares that pass in the meantime. Until they
are read, ``Proposal.token_ids`` are zeros. A draft that the host needs earlier, for a rule, a tree or a cut by confidence, is
read at once.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from volley.decode.work import DeviceDraft, Proposal, Work
from volley.memory.upload import Download, upload_indices, upload_together


class Reading:
    """Collects integers on one device and reads them in one copy."""

    def __init__(self) -> None:
        self.values: Tensor | None = None
        """All values, on the device, after :meth:`start`."""
        self._parts: list[tuple[Tensor, Callable[[list[int]], None]]] = []
        self._size = 0
        self._coming: Download | None = None
        self._end: Callable[[], None] = lambda: None

    def add(self, values: Tensor, take: Callable[[list[int]], None]) -> int:
        """Add ``values [n]`` (int64), and return the index of the first among all values. When they are read, ``take`` is
        called with them, in the order of the calls."""
        self._parts.append((values, take))
        self._size += len(values)
        return self._size - len(values)

    def add_drafts(self, works: Iterable[Work[Any]]) -> None:
        """Add the drafts of ``works`` that are on the device. Reading turns them into ordinary drafts."""
        for proposal in (work.proposal for work in works if work.proposal.on_device is not None):
            assert proposal.on_device is not None
            self.add(proposal.on_device.token_ids, partial(_take_tokens, proposal))
            if proposal.on_device.confidence is not None:
                self.add_doubles(proposal.on_device.confidence, partial(setattr, proposal, "confidence"))

    def add_doubles(self, values: Tensor, take: Callable[[list[float]], None]) -> None:
        """Call :meth:`add` with ``values [n]`` in double precision."""
        self.add(values.view(torch.int64), lambda bits: take(np.array(bits, dtype=np.int64).view(np.float64).tolist()))

    def start(self, end: Callable[[], None]) -> Self:
        """Start the copy to the host. ``end`` is called when all values have been read. No value can be added any more."""
        if self._parts:
            parts = [part for part, _ in self._parts]
            self.values = parts[0] if len(parts) == 1 else torch.cat(parts)
            self._coming = Download(self.values)
        self._end = end
        return self

    def read(self) -> None:
        """Wait for all values and hand them out, once."""
        if self._coming is None:
            self.start(self._end)
        parts, coming, end = self._parts, self._coming, self._end
        self._parts, self._size, self._coming, self._end = [], 0, None, lambda: None
        if coming is not None:
            values, start = coming.tolist(), 0
            for part, take in parts:
                take(values[start : start + len(part)])
                start += len(part)
        end()


def _take_tokens(proposal: Proposal, values: list[int]) -> None:
    proposal.token_ids, proposal.on_device = values, None


def proposals_on_device(
    works: Sequence[Work[Any]], tokens: Tensor, probs: Tensor | None = None, drafted: Tensor | None = None
) -> list[Proposal]:
    """Make drafts on the device: each work gets its part of ``tokens [Σ k]``, and of the distributions ``probs [Σ k, n]`` over
    the tokens ``drafted [n]``."""
    sizes = [work.spec.positions for work in works]
    each = [None] * len(works) if probs is None else torch.split(probs, sizes)
    parts = zip(sizes, each, torch.split(tokens, sizes), strict=True)
    return [
        Proposal([0] * size, drawn_from, on_device=DeviceDraft(own), drafted=drafted) for size, drawn_from, own in parts
    ]


def draft_tokens(works: Sequence[Work[Any]], device: torch.device) -> Tensor:
    """Return the draft tokens ``[Σ k]`` of ``works`` on ``device``, whether the host has read them or not."""
    known = [token for work in works if work.proposal.on_device is None for token in work.proposal.token_ids]
    uploaded = upload_indices(known, device) if known else torch.empty(0, dtype=torch.int64, device=device)
    start, parts = 0, list[Tensor]()
    for proposal in (work.proposal for work in works):
        if proposal.on_device is not None:
            parts.append(proposal.on_device.token_ids)
        else:
            parts.append(uploaded[start : start + len(proposal.token_ids)])
            start += len(proposal.token_ids)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def count_accepted(works: Sequence[Work[Any]], chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Count the accepted tokens of each draft on the device. Return these counts and the bonus tokens, ``[n]`` each.

    This is :func:`volley.decode.verify.verify_choices` for chains, some of which have a token. ``chosen`` holds all values
    that the host will read; the tokens of each work begin at its ``choices``. A count that exists already (``kept``) is taken
    from there.
    """
    sizes = np.array([len(work.proposal.token_ids) for work in works])[:, None]
    firsts = np.array([work.choices for work in works], dtype=np.int64)[:, None]
    is_counted = np.array([work.kept is not None for work in works])[:, None]
    place, ends = np.arange(sizes.max() + 1), sizes.cumsum()[:, None]
    of_chosen = firsts + np.where(is_counted, 0, np.minimum(place, sizes))
    of_drafts = np.minimum(ends - sizes + place[:-1], ends[-1] - 1)
    given = [of_chosen, of_drafts, ((place[:-1] < sizes) & ~is_counted).astype(np.int64)]
    if is_counted.any():
        given += [np.array([work.kept or 0 for work in works]), is_counted[:, 0].astype(np.int64)]
    at, drafts_at, exists, *counted = upload_together(given, chosen.device)
    own = chosen.index_select(0, at.flatten()).view(at.shape)
    drafts = draft_tokens(works, chosen.device).index_select(0, drafts_at.flatten()).view(drafts_at.shape)
    accepted = ((own[:, :-1] == drafts) * exists).cumprod(dim=1).sum(dim=1)
    if counted:
        accepted = accepted.addcmul(chosen.index_select(0, counted[0]), counted[1])
    return accepted, own.gather(1, accepted[:, None])[:, 0]


def read_drafts(works: Iterable[Work[Any]]) -> None:
    """Read the on-device drafts of ``works`` now."""
    reading = Reading()
    reading.add_drafts(works)
    reading.read()
