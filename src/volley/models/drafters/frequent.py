"""Target's head reduced to frequent tokens, from which drafts come if the vocabulary is large.

A byte-pair vocabulary is numbered in the order of its merges, the most frequent first. So its first tokens cover most of any
text. Rarer tokens of a text mostly occur more than once. So the tokens seen last are drafted as well, and the tokens that end an
answer.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from volley import native
from volley.native import Weights

MOST_FIRST = 32_768
"""Number of first token ids that are always drafted, at most; a third of the vocabulary if that is fewer."""
LARGE = 49_152
"""Vocabulary from which on a reduced head is faster."""
SEEN = 4096
"""Number of other tokens that are drafted."""


def pays(head: object) -> bool:
    """Return whether a reduced ``head`` is faster: if it is packed for a CPU, and has at least ``LARGE`` rows."""
    return isinstance(head, native.Product) and head.outputs >= LARGE


class FrequentHead:
    """Logits of the first tokens of a vocabulary and of the tokens seen last; all others are −∞.

    A new token gets a row of its own. If all rows are taken, it replaces the oldest token.
    """

    changes: int
    """Number of tokens that have got a row so far."""

    def __init__(self, head: native.Product, weights: Weights, always: Iterable[int] = ()) -> None:
        """Reduce ``head``, its first rows as ``weights`` (shared if it has these); tokens in ``always`` are never replaced."""
        self.vocab_size = head.outputs
        self.first = first = min(MOST_FIRST, head.outputs // 3 // native.BLOCK * native.BLOCK)
        """Number of first token ids that are always drafted."""
        self._target = head
        kind = weights if head.inputs % native.GROUP == 0 else "bf16"
        self._shares = head.kind == kind
        self._first = head.first(first) if self._shares else native.Product(_FirstRows(head, first), None, kind)
        self._seen = native.Product.unset(SEEN, head.inputs)
        self._tokens = torch.arange(first + SEEN)
        self._places = torch.zeros(head.outputs, dtype=torch.long)
        self._places[:first] = self._tokens[:first]
        self._known = bytearray(b"\1" * first + b"\0" * (head.outputs - first))
        self._kept, self.changes = 0, 0
        self.see(always)
        self._kept, self.changes = self.changes, 0

    @property
    def nbytes(self) -> int:
        """Bytes in addition to the target's head."""
        return self._seen.nbytes + (0 if self._shares else self._first.nbytes)

    @property
    def tokens(self) -> Tensor:
        """Tokens ``[n]`` that are drafted now, in the order of their rows."""
        return self._tokens[: self.first + min(self._kept + self.changes, SEEN)]

    @property
    def places(self) -> Tensor:
        """Row ``[V]`` of each drafted token, 0 for all others."""
        return self._places

    def weights(self, token_ids: Tensor) -> Tensor:
        """Return rows ``[n, H]`` of the target's head."""
        return self._target.rows(token_ids)

    def see(self, token_ids: Iterable[int]) -> None:
        """Draft these tokens from now on, or the last ones if they are too many."""
        known, before = self._known, self.changes
        new = list(dict.fromkeys(token for token in token_ids if not known[token]))[self._kept - SEEN :]
        if not new:
            return
        drafted = len(self.tokens)
        self.changes += len(new)
        places, tokens = self.changed_since(before), torch.tensor(new)
        for old in self._tokens[places[places < drafted]].tolist():
            known[old], self._places[old] = 0, 0
        for token in new:
            known[token] = 1
        self._tokens[places], self._places[tokens] = tokens, places
        self._seen.put(places - self.first, self.weights(tokens))

    def changed_since(self, changes: int) -> Tensor:
        """Return the rows ``[n]`` that got other tokens since :attr:`changes` had this value."""
        num_slots = SEEN - self._kept
        return self.first + self._kept + torch.arange(max(changes, self.changes - num_slots), self.changes) % num_slots

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits ``[R, V]`` of states ``[R, H]``."""
        logits = hidden.new_full((len(hidden), self.vocab_size), -torch.inf)
        logits[:, : self.first] = self._first(hidden)
        if len(seen := self.tokens[self.first :]):
            blocks = -(-len(seen) // native.BLOCK)
            logits[:, seen] = self._seen.first(blocks * native.BLOCK)(hidden)[:, : len(seen)]
        return logits


class _FirstRows:
    def __init__(self, head: native.Product, first: int) -> None:
        self._head, self.shape = head, (first, head.inputs)

    def __getitem__(self, rows: slice) -> Tensor:
        return self._head[rows]
