"""Muon with AdamW behaves as one optimizer: all parameters move, one learning rate rules, and its state restores it."""

import copy

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from volley import native
from volley.train.optimizer import Muon, MuonWithAdamW

LONGEST = 1.7 if native.has_dot_products else 1.28
"""Allowed ratio of lengths that Muon has made equal: products in bf16 are rounded."""


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


def test_few_directions_and_many_become_equally_long() -> None:
    """Singular values from a hundredth of the bound on; a matrix of rank 1 has its bound for its own."""
    torch.manual_seed(0)
    sides = torch.linalg.qr(torch.randn(2, 48, 24)).Q
    for values in (torch.logspace(-1.9, 0, 24), torch.eye(24)[0]):
        made = Muon([nn.Parameter(torch.zeros(1, 1))], lr=1.0).orthogonal((sides[0] * values @ sides[1].mT)[None])
        sizes = torch.linalg.svdvals(made[0].float())[: int((values > 0).sum())]
        assert bool(((sizes > 0.7) & (sizes < LONGEST)).all())


def test_muon_goes_the_way_of_torch() -> None:
    """Torch takes five steps in bf16, which end elsewhere near 1; weights of two shapes, three of them alike, one tall."""
    torch.manual_seed(0)
    shapes = [(16, 24), (24, 16), (16, 24), (16, 24), (8, 8)]
    own = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in own]
    start = [p.detach().clone() for p in own]
    optimizers = Muon(own, 0.02, 0.1), torch.optim.Muon(theirs, 0.02, 0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for a, b in zip(own, theirs, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for first, a, b in zip(start, own, theirs, strict=True):
        assert cosine_similarity((a - first).flatten(), (b - first).flatten(), dim=0) > 0.97
        assert 0.9 < (a - first).norm() / (b - first).norm() < 1.4
