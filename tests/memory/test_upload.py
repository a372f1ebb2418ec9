"""Arrays on their way to a device; that nothing waits for them is seen in ``tests/gpu``."""

import numpy as np
import torch

from volley.memory.upload import refill, upload, upload_together

CPU = torch.device("cpu")


def test_a_cpu_shares_the_memory() -> None:
    array = np.arange(3)
    on_device = upload(array, CPU)
    array[0] = 7
    assert on_device.tolist() == [7, 1, 2]


def test_several_arrays_keep_their_shapes() -> None:
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros(0, dtype=np.int32), np.array([5], dtype=np.int32)]
    found = upload_together(arrays, CPU)
    assert [tensor.tolist() for tensor in found] == [[[0, 1, 2], [3, 4, 5]], [], [5]]
    assert all(tensor.dtype == torch.int32 for tensor in found)


def test_memory_is_filled_from_its_beginning() -> None:
    memory = torch.zeros(4, dtype=torch.int32)
    refill(memory, torch.tensor([3, 4], dtype=torch.int32))
    assert memory.tolist() == [3, 4, 0, 0]
