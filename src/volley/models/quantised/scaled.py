"""FP8 in DeepSeek's form, read from a checkpoint's files: e4m3 codes, with a scale for each block of a matrix or for all of it.

transformers decodes these too, but divides a matrix into equal blocks, as many as it has scales. In fact blocks are 128 × 128
and smaller at the edges. The second block of 192 rows has 64 rows; so has the fifth of DeepSeek-V3's latent projection (576).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from volley.errors import CheckpointError, UnsupportedModelError
from volley.models.quantised.packed import open_tensors

_ENDINGS = ("_scale_inv", "_scale")  # the second is AutoFP8's; both multiply
_OF_INPUTS = ("activation_scale", "input_scale")


def decoded_float8(path: str | Path, settings: Mapping[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a folder or hub name with its name: codes decoded to ``dtype``, the others as they are, without the
    scales of inputs."""
    where = open_tensors(path)
    scales = {f"{name}{ending}" for name in where for ending in _ENDINGS}
    for name, file in where.items():
        if name in scales or name.endswith(_OF_INPUTS):
            continue
        stored: Tensor = file.get_tensor(name)
        scale = next((f"{name}{ending}" for ending in _ENDINGS if f"{name}{ending}" in where), None)
        if stored.dtype == torch.float8_e4m3fn and scale is None:
            raise CheckpointError(f"{path} has codes of {name} and lacks {name}_scale_inv; fetch it again")
        if scale is None:
            yield name, stored
        elif stored.dtype == torch.float8_e4m3fn:
            scales_of = where[scale].get_tensor(scale)
            yield name, _decode(name, stored, scales_of, settings.get("weight_block_size")).to(dtype)
        else:
            raise UnsupportedModelError(
                f"{path}: {name} has a scale and is of type {stored.dtype}; volley reads float8_e4m3fn in such a checkpoint. "
                "Take the unquantised checkpoint, or one of another method"
            )


def _decode(name: str, codes: Tensor, scales: Tensor, block: Sequence[int] | None) -> Tensor:
    """Decode codes to ``[..., out, in]`` in fp32."""
    scales = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
    rows, columns = codes.shape[-2:]
    if scales.numel() == 1:
        return codes.float() * scales.view(())
    if block is None:  # a scale for each matrix of a stack, or for each output
        shape = (*codes.shape[:-2], rows if scales.numel() % rows == 0 else 1, 1)
    else:
        shape = (*codes.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if scales.numel() != torch.Size(shape).numel():
        raise CheckpointError(
            f"{name} has shape {tuple(codes.shape)} and scales of shape {tuple(scales.shape)}, which are not "
            f"{'its outputs' if block is None else 'blocks of ' + ' × '.join(map(str, block))}; fetch the checkpoint again"
        )
    scales = scales.view(shape)
    if block is not None:
        scales = scales.repeat_interleave(block[0], -2)[..., :rows, :]
        scales = scales.repeat_interleave(block[1], -1)[..., :columns]
    return codes.float() * scales
