"""Write keys and values of one layer into its pools, in one launch. The reference is ``DenseKVStore.write``."""

import triton
import triton.language as tl
from torch import Tensor

from volley.memory.kernels import launching
from volley.memory.kv_store import DenseKVStore


@triton.jit
def _write_kernel(
    keys, values, slots, key_pool, value_pool, key_stride, value_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the keys or the values of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    place = tl.load(slots + token) * SIZE + column
    if tl.program_id(1) == 0:
        tl.store(key_pool + place, tl.load(keys + token * key_stride + column, mask=inside), mask=inside)
    else:
        tl.store(value_pool + place, tl.load(values + token * value_stride + column, mask=inside), mask=inside)


def write(store: DenseKVStore, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store ``keys`` and ``values`` ``[T, kv_heads, d]`` of one layer at ``slots [T]``."""
    count, heads, dim = keys.shape
    in_one_piece = all(own.stride(2) == 1 and own.stride(1) == dim for own in (keys, values))  # each token's
    if store.are_one or keys.shape != values.shape or not in_one_piece:
        store.write(layer, slots, keys, values)
        return
    size = heads * dim
    block = triton.next_power_of_2(size)
    strides = (keys.stride(0), values.stride(0))
    pools = (store.keys[layer], store.values[layer])
    options = {"SIZE": size, "BLOCK": block, "num_warps": min(8, max(1, block // 256))}
    launching.launch(_write_kernel, (count, 2), keys.device, keys, values, slots, *pools, *strides, **options)
