"""Domino's head: each position's logits are corrected by a state that has read all tokens of the block before it.

A GRU reads the embeddings of the anchor and of the tokens drafted so far. With its state g and the position's own h, the logits
grow by ``W2·silu(W1·[h; g])``. A pair of tokens does not tell the correction, so a draft is walked token by token, and there are
no trees.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from volley.errors import ConfigError
from volley.models.heads import Projection


class DominoHead(nn.Module):
    def __init__(self, hidden_size: int, state_size: int, rank: int, rows: int, uncorrected: int) -> None:
        """``rows`` are the tokens drafted; the first ``uncorrected`` positions of a block keep their logits."""
        super().__init__()
        self.uncorrected = uncorrected
        self.prefix_gru = nn.GRU(hidden_size, state_size, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + state_size, rank, bias=False), nn.SiLU(), nn.Linear(rank, rows, bias=False)
        )

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        raise ConfigError("the drafter has Domino's head, which volley does not train; train with --head residual")

    def step(self, embeddings: Tensor, state: Tensor) -> Tensor:
        """The states ``[n, G]`` after tokens with ``embeddings [n, H]``."""
        of_input, of_state = self.prefix_gru.all_weights[0]
        return torch.gru_cell(embeddings, state, of_input, of_state)


class BoundDomino:
    """A Domino head with the embeddings that it reads."""

    pairwise = False

    def __init__(self, head: DominoHead, embed: Projection, drafted: Tensor | None) -> None:
        """``embed`` gives input embeddings ``[T, H]`` of tokens; ``drafted [N]`` are the tokens of a reduced vocabulary."""
        self.head, self.embed, self.drafted = head, embed, drafted

    def transitions(
        self, hidden: Tensor, logits: Tensor, sizes: Sequence[int]
    ) -> Callable[[list[int], list[int]], Tensor]:
        """A function (positions, tokens) → logits ``[n, V]`` of these after these tokens; each block is asked for in order.

        ``hidden [Σk, H]`` and ``logits [Σk, V]`` are those of all positions of blocks of ``sizes``.
        """
        places = torch.tensor([place for size in sizes for place in range(size)], device=hidden.device)
        states = hidden.new_zeros(len(hidden), self.head.prefix_gru.hidden_size)

        def after(rows: list[int], token_ids: list[int]) -> Tensor:
            where, before = (torch.tensor(indices, device=logits.device) for indices in (rows, token_ids))
            earlier = states[where - 1] * (places[where] > 0)[:, None]
            state = states[where] = self.head.step(self.embed(before), earlier)
            change = self.head.embed_proj(torch.cat([hidden[where], state], dim=-1))
            if self.drafted is not None:
                change = change.new_zeros(len(change), logits.shape[1]).index_copy(1, self.drafted, change)
            corrected: Tensor = logits[where] + change * (places[where] >= self.head.uncorrected)[:, None]
            return corrected

        return after
