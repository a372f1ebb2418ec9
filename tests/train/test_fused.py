"""Written-out backward passes against autograd's."""

import pytest
import torch

from tests import tiny
from volley.models.drafters.drafter import Drafter, RMSNorm, rotate
from volley.train.attention import Layout
from volley.train.fused import _Norm, _Rotation, fuse, keep_freed_memory

from .dense import attend_dense


def test_norm_and_rotation_pass_gradcheck() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(3, 1, 3, dtype=torch.float64).repeat(1, 1, 2)
    assert torch.autograd.gradcheck(lambda x, w: _Norm.apply(x, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda x: _Rotation.apply(x, angle.cos(), angle.sin()), (x,))
    norm = RMSNorm(6, 1e-5).double()
    norm.weight.data.copy_(weight.data)
    torch.testing.assert_close(_Norm.apply(x, weight, 1e-5), norm(x))
    torch.testing.assert_close(_Rotation.apply(x, angle.cos(), angle.sin()), rotate(x, angle.cos(), angle.sin()))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_fused_drafter_computes_and_learns_the_same(autocast: bool) -> None:
    shape = tiny.drafter_config(block_size=4)
    torch.manual_seed(0)
    plain, fused = Drafter(shape), Drafter(shape)
    fused.load_state_dict(plain.state_dict())
    fuse(fused)
    dtype = torch.bfloat16 if autocast else torch.float32
    layout = Layout(torch.tensor([[2, 6]]), 9, 4)
    features, embeddings = torch.randn(9, 64).to(dtype), torch.randn(8, 32).to(dtype)
    positions = (layout.anchors[0, :, None] + torch.arange(4)).flatten()
    goal = torch.randn(8, 32)
    results = []
    for drafter in (plain, fused):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            context = drafter.context_kv(features, torch.arange(9))
            hidden = drafter(embeddings, positions, attend_dense(layout, context))
        (hidden.float() * goal).sum().backward()
        results.append([hidden.detach(), *(parameter.grad for parameter in drafter.parameters())])
    for expected, found in zip(*results, strict=True):
        assert expected is not None
        assert found is not None
        scale = float(expected.abs().max())
        torch.testing.assert_close(found, expected, atol=(0.05 if autocast else 1e-5) * scale, rtol=0.0)


def test_keeping_freed_memory_is_harmless() -> None:
    keep_freed_memory()
    assert torch.ones(3_000_000).sum() == 3_000_000
