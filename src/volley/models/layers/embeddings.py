"""Embeddings whose rows are looked up in a linear kernel's packed weight."""

from copy import copy

import torch
from torch import Tensor, nn

from volley.native import Product

_READ_BY_OTHERS = {"DiffusionGemmaTextScaledWordEmbedding"}
"""Classes of embeddings whose weight their model also uses directly."""


def scale_of(embedding: nn.Module) -> Tensor | None:
    """Return the factor of an embedding's rows, found by trying; ``None`` if it does anything else."""
    if not isinstance(embedding, nn.Embedding) or "forward" in vars(embedding):
        return None
    if type(embedding).__name__ in _READ_BY_OTHERS:
        return None
    tried = copy(embedding)
    tried.padding_idx = None  # it may be beyond the rows that are tried
    rows = torch.randn(9, embedding.embedding_dim, generator=torch.Generator().manual_seed(0)).to(
        embedding.weight.dtype
    )
    rows[0] = 1
    tried._parameters = {**embedding._parameters, "weight": nn.Parameter(rows, requires_grad=False)}
    found: Tensor = tried(torch.arange(len(rows)))
    scale = found[0, 0].clone()
    return scale if torch.equal(found, rows * scale) else None


class EmbeddingLookup:
    """Forward of an embedding that looks its rows up in ``product``."""

    def __init__(self, product: Product, scale: Tensor) -> None:
        self.product = product
        self._scale = None if scale == 1 else scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return rows ``[..., H]`` for ``token_ids [...]``."""
        rows = self.product.rows(token_ids)
        return rows if self._scale is None else rows * self._scale
