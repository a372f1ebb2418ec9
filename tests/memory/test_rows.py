"""The reference of a layer's row operations against their definitions."""

import torch

from volley.memory.rows import REFERENCE, row_operations


def test_a_cpu_has_the_reference() -> None:
    assert row_operations(torch.device("cpu")) is REFERENCE


def test_sums_are_normed() -> None:
    states, update, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    added, normed = REFERENCE.add_norm(states, update, weight, 1e-6)
    assert torch.equal(added, states + update)
    expected = added / (added.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(normed, expected)
    same, normed = REFERENCE.add_norm(added, None, weight, 1e-6)
    assert same is added
    torch.testing.assert_close(normed, expected)


def test_turning_keeps_lengths_and_values() -> None:
    angle = torch.rand(3, 4).repeat(1, 2)
    rows = torch.randn(3, 4 + 2 * 2, 8)
    turned = rows.clone()
    REFERENCE.norm_and_turn(turned, None, angle.cos(), angle.sin(), 4, 1e-6)
    torch.testing.assert_close(turned.norm(dim=-1), rows.norm(dim=-1))
    assert torch.equal(turned[:, 6:], rows[:, 6:])
    assert not torch.equal(turned[:, :6], rows[:, :6])


def test_gates_come_first() -> None:
    rows = torch.tensor([[100.0, -100.0, 3.0, 5.0]])
    torch.testing.assert_close(REFERENCE.gated_silu(rows), torch.tensor([[300.0, 0.0]]))
