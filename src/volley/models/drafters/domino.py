"""Domino's head, which corrects a position's logits by a state that has read all tokens of the block before it.

A GRU reads the embeddings of the anchor and of the tokens drafted so far. Its state g and the position's state h add
``W2·silu(W1·[h; g])`` to the logits. The correction depends on more than the previous token. So a draft is made token by token,
and there are no trees.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from volley.errors import ConfigError
from volley.memory.upload import upload_indices
from volley.models.drafters.heads import Projection


class DominoHead(nn.Module):
    def __init__(self, hidden_size: int, state_size: int, rank: int, rows: int, uncorrected: int) -> None:
        """Make a head over ``rows`` draft tokens; the first ``uncorrected`` positions of a block keep their logits."""
        super().__init__()
        self.uncorrected = uncorrected
        self.prefix_gru = nn.GRU(hidden_size, state_size, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + state_size, rank, bias=False), nn.SiLU(), nn.Linear(rank, rows, bias=False)
        )

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        raise ConfigError("the drafter has Domino's head, which volley does not train; train with --head residual")

    @property
    def state_size(self) -> int:
        return self.prefix_gru.hidden_size

    def step(self, embeddings: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return states ``[n, G]`` after tokens with ``embeddings [n, H]``, and corrections ``[n, N]`` at ``hidden [n, H]``."""
        of_input, of_state = self.prefix_gru.all_weights[0]
        after = torch.gru_cell(embeddings, state, of_input, of_state)
        return after, self.embed_proj(torch.cat([hidden, after], dim=-1))


class BoundRecurrent:
    """Domino's head with the embeddings that it reads."""

    pairwise = False

    def __init__(self, head: DominoHead, embed: Projection, drafted: Tensor | None) -> None:
        """Bind a head to ``embed``, which gives its inputs ``[T, E]``; ``drafted [N]`` are the tokens of a reduced vocabulary."""
        self.head, self.embed, self.drafted = head, embed, drafted

    def transitions(self, hidden: Tensor, logits: Tensor, sizes: Sequence[int]) -> Callable[..., Tensor]:
        """Return a function (positions, tokens, among) → logits ``[n, V]`` at these positions after these tokens.

        With ``among [m]`` the logits are of these tokens alone. The function must be called for the positions of each block in
        order. ``hidden [Σk, H]`` and ``logits [Σk, V]`` cover all positions of blocks of ``sizes``.
        """
        places = upload_indices([place for size in sizes for place in range(size)], hidden.device)
        states = hidden.new_zeros(len(hidden), self.head.state_size)

        def after(rows: list[int], token_ids: list[int] | Tensor, among: Tensor | None = None) -> Tensor:
            where, before = (upload_indices(indices, logits.device) for indices in (rows, token_ids))
            earlier = states[where - 1] * (places[where] > 0)[:, None]
            states[where], change = self.head.step(self.embed(before), hidden[where], earlier)
            if self.drafted is not None:
                change = change.new_zeros(len(change), logits.shape[1]).index_copy(1, self.drafted, change)
            corrected: Tensor = logits[where] + change * (places[where] >= self.head.uncorrected)[:, None]
            return corrected if among is None else corrected[:, among.to(corrected.device)]

        return after
