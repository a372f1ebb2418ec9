"""Multi-head latent attention (DeepSeek-V2 and V3, Kimi) on pages of latents, with the model unchanged.

Keys and values of all heads are projections of one latent c of each token; a rotary key r is shared by all heads. The model
expands them: ``k = [W_K c, r]`` and ``v = W_V c`` of each head. Here the query absorbs W_K, and W_V is applied after attention:

    q · k = [W_Kᵀ q, q_r] · [c, r]        Σ p v = W_V Σ p c

So a page holds ``[c, r]`` once for all heads, as key and value at the same time. A hook on the norm of c captures c, and r is the
end of any head's key. The model still expands new tokens; that result is not used.
"""

from typing import Any

import torch
from torch import Tensor, nn

_NAMES = ("kv_a_layernorm", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_TOLERANCE = {torch.float32: 1e-4}
_COARSE = 2**-5  # of 16-bit types: sums run in another order


_NONE = torch.empty(0)


class LatentAttention:
    """Map the queries and keys of one layer to latents, and the outputs back."""

    def __init__(self, module: Any) -> None:
        self._project: nn.Module = module.kv_b_proj
        self._rank, self._own, self._values = module.kv_lora_rank, module.qk_nope_head_dim, module.v_head_dim
        self._latents = _NONE
        self._weights: tuple[Tensor, Tensor] | None = None
        self._agrees: bool | None = None
        module.kv_a_layernorm.register_forward_hook(self._note)

    def _note(self, _: nn.Module, __: Any, output: Tensor) -> None:
        self._latents = output

    def serves(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
        """Return whether latents give the result of expanded keys and values ``[1, heads, T, d]``; the first pass compares."""
        if self._agrees is None:
            own, shared = self.absorb(query, key)
            expected, found = (
                nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, scale=scale)
                for q, k, v in ((query, key, value), (own, *[shared.expand(-1, own.shape[1], -1, -1)] * 2))
            )
            found = self.expand(found.transpose(1, 2).to(query.dtype)).transpose(1, 2).float()
            most = _TOLERANCE.get(query.dtype, _COARSE) * float(expected.norm())
            self._agrees = bool((found - expected).norm() <= most)
        return self._agrees

    def absorb(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries ``[1, heads, T, r + rope]`` and keys ``[1, 1, T, r + rope]`` for those of ``[1, heads, T, d]``."""
        to_keys, _ = self._matrices()
        own = torch.einsum("bhtn,hnr->bhtr", query[..., : self._own], to_keys)
        latents = self._latents.view(1, 1, -1, self._rank)
        return (
            torch.cat((own, query[..., self._own :]), dim=-1),
            torch.cat((latents, key[:, :1, :, self._own :]), dim=-1),
        )

    def expand(self, mixed: Tensor) -> Tensor:
        """Return outputs ``[1, T, heads, v]`` of mixed latents ``[1, T, heads, r + rope]``."""
        if self._agrees is not None:  # the latents are no longer needed, and may hold a graph's memory
            self._latents = _NONE
        _, to_values = self._matrices()
        return torch.einsum("bthr,hvr->bthv", mixed[..., : self._rank], to_values)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Extract W_K ``[heads, nope, r]`` and W_V ``[heads, v, r]`` from the projection module by projecting unit vectors."""
        if self._weights is None:
            unit = torch.eye(self._rank, dtype=self._latents.dtype, device=self._latents.device)
            both = self._project(unit).T.reshape(-1, self._own + self._values, self._rank)
            keys, values = both.split([self._own, self._values], dim=1)
            self._weights = keys.contiguous(), values.contiguous()
        return self._weights


def attach_latents(model: nn.Module) -> None:
    """Give attention modules with latents a :class:`LatentAttention`, as ``volley_latent``.

    A layer that quantises the latents before it expands them keeps its expanded keys and values.
    """
    for module in model.modules():
        if not all(hasattr(module, name) for name in _NAMES):
            continue
        projection: Any = module.kv_b_proj
        if projection.bias is None and not hasattr(projection, "quantization_scheme"):
            module.volley_latent = LatentAttention(module)  # type: ignore[assignment]
