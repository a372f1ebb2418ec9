"""The closed form of runs and trees against the recurrence taken token by token."""

import random

import pytest
import torch
from torch import Tensor

from volley.memory.recurrence import Run, advance, scan

HEADS, KEYS, VALUES = 3, 5, 4
KINDS = ("delta", "channels", "mamba2")


def random_run(kind: str, count: int, length: int, seed: int) -> tuple[Run, Tensor]:
    """Inputs of N runs, and the states before them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, HEADS, *shape, generator=generator)

    decays = -normal(length, KEYS if kind == "channels" else 1).exp()
    betas = None if kind == "mamba2" else normal(length, 1).sigmoid()
    keys = torch.nn.functional.normalize(normal(length, KEYS), dim=-1)
    run = Run(normal(length, KEYS), keys, normal(length, VALUES), decays, betas)
    return run, normal(KEYS, VALUES)


def token_by_token(run: Run, states: Tensor, index: int, path: list[int]) -> tuple[Tensor, Tensor]:
    """The recurrence itself along one path of run ``index``: the output of its last token, and the states after it."""
    state = states[index].double()
    output = torch.empty(0)
    for token in path:
        q, k, v, g = (x[index, :, token].double() for x in run[:4])
        state = state * g[..., None].exp()
        if run.betas is not None:
            v = run.betas[index, :, token].double() * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + k[..., None] * v[:, None]
        output = torch.einsum("hkv,hk->hv", state, q)
    return output.float(), state.float()


def ancestors_of(parents: list[int]) -> tuple[Tensor, list[list[int]]]:
    """The mask of a tree, and the path to each of its tokens."""
    paths = [[0]]
    for token, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], token])
    mask = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for token, path in enumerate(paths):
        mask[token, path] = True
    return mask, paths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_a_chain_is_the_recurrence(kind: str, length: int) -> None:
    run, states = random_run(kind, 2, length, seed=length)
    mask = torch.ones(1, length, length, dtype=torch.bool).tril()
    outputs, trace = scan(run, states, mask)
    for index in range(2):
        for token in range(length):
            output, state = token_by_token(run, states, index, [*range(token + 1)])
            torch.testing.assert_close(outputs[index, :, token], output, rtol=1e-4, atol=1e-4)
            after = advance(trace, mask, torch.tensor([token, token]))(states)[index]
            torch.testing.assert_close(after, state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_tree_is_the_recurrence_along_each_path(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    trees = [ancestors_of([chance.randint(0, token) for token in range(12)]) for _ in range(2)]
    run, states = random_run(kind, 2, 13, seed)
    mask = torch.stack([mask for mask, _ in trees])
    outputs, trace = scan(run, states, mask)
    for index, (_, paths) in enumerate(trees):
        for token, path in enumerate(paths):
            output, state = token_by_token(run, states, index, path)
            torch.testing.assert_close(outputs[index, :, token], output, rtol=1e-4, atol=1e-4)
            rows = torch.tensor([token, token])
            torch.testing.assert_close(advance(trace, mask, rows)(states)[index], state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_sees_a_sibling_would_be_found(kind: str) -> None:
    mask, paths = ancestors_of([0, 0, 1, 2])
    run, states = random_run(kind, 1, 5, seed=3)
    wrong = mask.clone()
    wrong[2, 1] = True
    outputs, _ = scan(run, states, wrong[None])
    output, _ = token_by_token(run, states, 0, paths[2])
    assert (outputs[0, :, 2] - output).abs().max() > 1e-2


def test_strong_decays_leave_no_denormal_numbers() -> None:
    run, states = random_run("delta", 1, 12, seed=5)
    run = run._replace(decays=run.decays * 20)
    mask = torch.ones(1, 12, 12, dtype=torch.bool).tril()
    outputs, trace = scan(run, states, mask)
    after = advance(trace, mask, torch.tensor([11]))
    for part in (outputs, after.factors, after.keys):
        assert not ((part != 0) & (part.abs() < torch.finfo(torch.float32).tiny)).any()
    output, _ = token_by_token(run, states, 0, [*range(12)])
    torch.testing.assert_close(outputs[0, :, 11], output, rtol=1e-4, atol=1e-4)
