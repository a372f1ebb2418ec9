"""The sequential head corrects a slot's logits once the token before it is known, so that a block's tokens fit together.

The slots of a block are predicted in one pass, independently of each other. The head corrects a slot's final state h after
token c with embedding e: ``h + Q·silu(P·e + A·h)``, of rank r. With the target's head E this adds to the logit of token j
``u(c, h) · O_j`` with ``u = silu(P·e_c + A·h)`` and ``O = E·Q``, so a table for ``P·e`` and one for O make every transition a
product of two short rows. The head has no tensor of the vocabulary's size.

Without A it knows the token before and nothing else: a logit bias ``W1_c · W2_j`` with ``W1 = silu(P·e)`` and ``W2 = E·Q``. That
is DSpark's Markov head. Other programs keep these two tables (:class:`MarkovTables`) instead of P and Q.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, silu

from volley.errors import ConfigError
from volley.models.accelerate import accelerate
from volley.types import Lattice


class ResidualHead(nn.Module):
    def __init__(self, hidden_size: int, rank: int, *, with_context: bool = True) -> None:
        super().__init__()
        self.previous = nn.Linear(hidden_size, rank, bias=False)
        self.context = nn.Linear(hidden_size, rank, bias=False) if with_context else None
        self.output = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.output.weight)  # training starts from DFlash

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Corrected states ``[R, H]``, which the target's head turns into logits; ``embeddings`` of the tokens before."""
        inner = self.rows(embeddings)
        if self.context is not None:
            inner = inner + self.context(hidden)
        corrected: Tensor = hidden + self.output(silu(inner))
        return corrected

    def rows(self, embeddings: Tensor) -> Tensor:
        """``P·e`` ``[R, r]``."""
        rows: Tensor = self.previous(rms_norm(embeddings, embeddings.shape[-1:]))
        return rows

    def tables(self, embedding: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """``P·e`` (without a context ``W1``) and ``W2``, ``[V, r]`` each, for a target's ``embedding`` and ``output [V, H]``."""
        rows = self.rows(embedding)
        return rows if self.context is not None else silu(rows), output @ self.output.weight


class MarkovTables(nn.Module):
    """DSpark's Markov head as others train it: ``markov_w1 [V, r]`` and ``markov_w2 [N, r]`` of N drafted tokens."""

    context = None

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab_size, rank), nn.Embedding(draft_vocab_size, rank)

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        raise ConfigError(
            "the drafter's Markov head is two tables, which volley does not train; train with --head markov"
        )

    def tables(self, embedding: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """``W1 [V, r]`` and ``W2 [N, r]``."""
        return self.markov_w1.weight, self.markov_w2.weight


class BoundHead:
    """A head with the tables it makes of its target's embeddings and head."""

    def __init__(
        self,
        head: ResidualHead | MarkovTables,
        candidates: int,
        embedding: Tensor,
        output: Tensor,
        drafted: Tensor | None = None,
    ) -> None:
        """``embedding`` and ``output`` are the target's input embeddings and head, ``[V, H]`` each.

        ``drafted [N]`` are the tokens of a reduced vocabulary; a head's table may have rows for these alone.
        """
        self.head = head
        self.candidates = min(candidates, len(embedding))
        with torch.no_grad():
            self.rows, self.outputs = head.tables(embedding, output)
            if drafted is not None and len(self.outputs) < len(self.rows):
                self.outputs = self.outputs.new_zeros(self.rows.shape).index_copy(0, drafted, self.outputs)
        self.product = nn.Linear(self.outputs.shape[1], len(self.outputs), bias=False, device="meta")
        self.product.weight = nn.Parameter(self.outputs, requires_grad=False)
        accelerate(self.product)

    def transitions(self, hidden: Tensor, logits: Tensor) -> Callable[[list[int], list[int]], Tensor]:
        """A function (slots, tokens) → logits ``[n, V]`` of these slots after these tokens.

        ``hidden [k, H]`` and ``logits [k, V]`` are those of all slots.
        """
        own = self._context(hidden)

        def after(rows: list[int], token_ids: list[int]) -> Tensor:
            where, before = (torch.tensor(indices, device=logits.device) for indices in (rows, token_ids))
            mixed = self._mixed(before, None if own is None else own[where])
            corrected: Tensor = logits[where] + self.product(mixed)
            return corrected

        return after

    def _context(self, hidden: Tensor) -> Tensor | None:
        return None if self.head.context is None else self.head.context(hidden)

    def _mixed(self, before: Tensor, own: Tensor | None) -> Tensor:
        """What is multiplied with ``outputs``, given the tokens ``before`` and the states' share."""
        rows = embedding(before, self.rows)
        return rows if own is None else silu(rows + own)

    def lattices(self, hidden: Tensor, logits: Tensor, anchors: Sequence[int], sizes: Sequence[int]) -> list[Lattice]:
        """A lattice for each of several blocks, from ``hidden [Σk, H]`` and ``logits [Σk, V]`` of their slots.

        ``sizes`` are the numbers of slots, ``anchors`` the tokens before the first of them. All transitions are one product.
        """
        base, tokens = logits.topk(self.candidates, dim=-1)
        firsts = torch.tensor([0, *sizes[:-1]], device=tokens.device).cumsum(0)
        before = tokens.roll(1, dims=0)
        before[firsts] = torch.tensor(anchors, device=tokens.device)[:, None]
        own = self._context(hidden)
        mixed = self._mixed(before, None if own is None else own[:, None])
        outputs = embedding(tokens, self.outputs)
        scores = torch.baddbmm(base[:, None], mixed.to(base.dtype), outputs.mT.to(base.dtype))  # noise makes base fp32
        every_token, every_score = tokens.cpu().numpy(), scores.float().cpu().numpy()
        ends = np.cumsum(sizes)
        return [
            Lattice(every_token[end - size : end], every_score[end - size : end])
            for end, size in zip(ends, sizes, strict=True)
        ]
