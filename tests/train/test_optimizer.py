"""Muon with AdamW behaves as one optimizer: all parameters move, one learning rate rules, and its state restores it."""

import copy

import torch
from torch import nn

from volley.train.optimizer import MuonWithAdamW


def make() -> tuple[nn.Linear, MuonWithAdamW]:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    return layer, MuonWithAdamW([layer.weight], [layer.bias], lr=0.01, weight_decay=0.1)


def step(layer: nn.Linear, optimizer: MuonWithAdamW, seed: int) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    layer(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_every_parameter_moves_and_the_learning_rate_is_shared() -> None:
    layer, optimizer = make()
    before = copy.deepcopy(layer.state_dict())
    step(layer, optimizer, 1)
    assert all(not torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    assert layer.weight.grad is None
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    still = copy.deepcopy(layer.state_dict())
    step(layer, optimizer, 2)
    assert all(torch.equal(still[name], tensor) for name, tensor in layer.state_dict().items())


def test_a_restored_optimizer_goes_on_bit_for_bit() -> None:
    layer, optimizer = make()
    step(layer, optimizer, 1)
    weights, state = copy.deepcopy(layer.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(layer, optimizer, 2)
    other, fresh = make()
    other.load_state_dict(weights)
    fresh.load_state_dict(state)
    step(other, fresh, 2)
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in layer.state_dict().items())
