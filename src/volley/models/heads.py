"""Sequential heads: what a slot's logits gain once the token before it is known, so that a block's tokens fit together.

A block's slots are predicted at once and know nothing of each other's choice. A head adds to the logit of token j in a slot
with final state h, after token c, a term of low rank: ``u(c, h) · O_j``. Two kinds:

- ``markov`` (DSpark): ``u = W1[c]``, ``O = W2``: a bigram table of its own, whatever h is.
- ``residual``: ``u = silu(P·e_c + A·h)``, ``O = E·Q`` with the target's embedding e and head E: a correction of the hidden state
  itself, since ``E·h + E·Q·u = E·(h + Q·u)``. It has no tensor of the vocabulary's size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, silu

from volley.models.accelerate import accelerate
from volley.models.checkpoint import HeadConfig
from volley.types import Lattice


class MarkovHead(nn.Module):
    def __init__(self, config: HeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.previous = nn.Embedding(vocab_size, config.rank)
        self.output = nn.Embedding(vocab_size, config.rank)
        nn.init.normal_(self.previous.weight, std=config.rank**-0.5)
        nn.init.zeros_(self.output.weight)  # training starts from DFlash

    def forward(self, hidden: Tensor, token_ids: Tensor, embeddings: Tensor) -> Tensor:
        """``[h | u]`` ``[R, H + r]``: what the target's head and ``output`` side by side turn into logits."""
        rows: Tensor = self.previous(token_ids)
        return torch.cat([hidden, rows.to(hidden.dtype)], dim=-1)

    def tables(self, embedding: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        return self.previous.weight, self.output.weight

    def mix(self, rows: Tensor, hidden: Tensor) -> Tensor:
        return rows


class ResidualHead(nn.Module):
    def __init__(self, config: HeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.previous = nn.Linear(hidden_size, config.rank, bias=False)
        self.context = nn.Linear(hidden_size, config.rank, bias=False)
        self.output = nn.Linear(config.rank, hidden_size, bias=False)
        nn.init.zeros_(self.output.weight)  # training starts from DFlash

    def forward(self, hidden: Tensor, token_ids: Tensor, embeddings: Tensor) -> Tensor:
        """``h + Q·u`` ``[R, H]``: what the target's head turns into logits."""
        rows = self.previous(_normed(embeddings))
        corrected: Tensor = hidden + self.output(self.mix(rows, hidden))
        return corrected

    def tables(self, embedding: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        return _normed(embedding) @ self.previous.weight.t(), head @ self.output.weight

    def mix(self, rows: Tensor, hidden: Tensor) -> Tensor:
        own: Tensor = self.context(hidden)
        return silu(rows + own.view(len(own), *[1] * (rows.dim() - 2), -1))


def _normed(embeddings: Tensor) -> Tensor:
    return rms_norm(embeddings, embeddings.shape[-1:])


Head = MarkovHead | ResidualHead
KINDS: dict[str, type[MarkovHead] | type[ResidualHead]] = {"markov": MarkovHead, "residual": ResidualHead}


class BoundHead:
    """A head with the tables it makes of its target's embeddings and head."""

    def __init__(self, head: Head, candidates: int, embedding: Tensor, output: Tensor) -> None:
        """``embedding`` and ``output`` are the target's input embeddings and head, ``[V, H]`` each."""
        self.head = head
        self.candidates = min(candidates, len(output))
        self.rows, self.outputs = (table.detach() for table in head.tables(embedding, output))
        self.product = nn.Linear(self.outputs.shape[1], len(self.outputs), bias=False, device="meta")
        self.product.weight = nn.Parameter(self.outputs, requires_grad=False)
        accelerate(self.product)

    def after(self, token_id: int, hidden: Tensor, logits: Tensor) -> Tensor:
        """The logits ``[1, V]`` of a slot of ``hidden [1, H]`` and ``logits [1, V]`` after ``token_id``."""
        mixed = self.head.mix(self.rows[token_id][None], hidden)
        corrected: Tensor = logits + self.product(mixed)
        return corrected

    def lattices(self, hidden: Tensor, logits: Tensor, anchors: Sequence[int], sizes: Sequence[int]) -> list[Lattice]:
        """A lattice for each of several blocks, from ``hidden [Σk, H]`` and ``logits [Σk, V]`` of their slots.

        All transitions are one batched product.

        ``sizes`` are the numbers of slots, ``anchors`` the tokens before the first of them.
        """
        base, tokens = logits.topk(self.candidates, dim=-1)
        firsts = torch.tensor([0, *sizes[:-1]], device=tokens.device).cumsum(0)
        before = tokens.roll(1, dims=0)
        before[firsts] = torch.tensor(anchors, device=tokens.device)[:, None]
        mixed = self.head.mix(embedding(before, self.rows), hidden)
        scores = torch.baddbmm(base[:, None], mixed, embedding(tokens, self.outputs).mT)
        every_token, every_score = tokens.cpu().numpy(), scores.float().cpu().numpy()
        ends = np.cumsum(sizes)
        return [
            Lattice(every_token[end - size : end], every_score[end - size : end])
            for end, size in zip(ends, sizes, strict=True)
        ]
