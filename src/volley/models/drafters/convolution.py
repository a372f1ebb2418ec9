"""DFlash 2's convolutions, around attention and MLP: each state is mixed with those of the positions before it in the block.

``out[i] = Σ_t (K[t] + δ_i[t]) ∘ x[i − t]``. K is learned for each channel. δ_i is a projection of the sublayer's input, with one
value for a group of channels. States before the block's first position count as zero.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from volley.errors import ConfigError


class BlockConvolution(nn.Module):
    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        if hidden_size % group_size:
            raise ConfigError(
                f"drafter config: conv_group_size is {group_size}; it must divide hidden_size, {hidden_size}"
            )
        super().__init__()
        self.taps, self.groups = taps, hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * self.groups, bias=False)

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the sublayer's input for ``x [T, H]`` and the function for its output; ``places [T]`` count within the block."""
        change = self.kernel_projection(x).view(len(x), 2, self.taps, self.groups, 1)
        before, after = (
            kernel.view(self.taps, self.groups, -1) + change[:, side] for side, kernel in enumerate(self.base_kernel)
        )
        return _convolve(x, before, places), lambda output: _convolve(output, after, places)


def _convolve(x: Tensor, kernels: Tensor, places: Tensor) -> Tensor:
    """Convolve ``x [T, H]`` with ``kernels [T, taps, groups, H / groups]``."""
    shaped = x.view(len(x), *kernels.shape[2:])
    mixed = kernels[:, 0] * shaped
    for tap in range(1, kernels.shape[1]):
        earlier = shaped.roll(tap, dims=0) * (places >= tap)[:, None, None]
        mixed = mixed + kernels[:, tap] * earlier
    return mixed.flatten(1)
