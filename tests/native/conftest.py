"""Fixtures of several kernels' tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
