"""The reference of a layer's row operations against their definitions."""

import torch

from tests.memory import rows


def test_sums_are_normed() -> None:
    states, update, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    added, normed = rows.add_norm(states, update, weight, 1e-6)
    assert torch.equal(added, states + update)
    expected = added / (added.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(normed, expected)
    same, normed = rows.add_norm(added, None, weight, 1e-6)
    assert same is added
    torch.testing.assert_close(normed, expected)


def test_turning_keeps_lengths_and_values() -> None:
    angle = torch.rand(3, 4).repeat(1, 2)
    given = torch.randn(3, 4 + 2 * 2, 8)
    turned = given.clone()
    rows.norm_and_turn(turned, None, angle.cos(), angle.sin(), 4, 1e-6)
    torch.testing.assert_close(turned.norm(dim=-1), given.norm(dim=-1))
    assert torch.equal(turned[:, 6:], given[:, 6:])
    assert not torch.equal(turned[:, :6], given[:, :6])


def test_gates_come_first() -> None:
    given = torch.tensor([[100.0, -100.0, 3.0, 5.0]])
    torch.testing.assert_close(rows.gated_silu(given), torch.tensor([[300.0, 0.0]]))
