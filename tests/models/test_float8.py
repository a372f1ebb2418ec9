"""Drafters in fp8 against the same drafters with weights that were rounded to e4m3 and decoded again."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tests import eagle
from tests.models.drafters.test_adapter import make_adapter
from tests.tiny import Pair, drafts_of, random_drafter, random_prompts
from volley import Engine, SamplingParams
from volley.memory import float8
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.drafter import Drafter
from volley.models.layers.accelerate import weight_bytes
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.models.layers.products import Float8Product

PROMPTS = random_prompts(3, longest=30, seed=4)
RESIDUAL = HeadConfig(type="residual", rank=4)


def rounded(weight: Tensor) -> Tensor:
    codes, scales = float8.quantise(weight)
    return codes.view(torch.float8_e4m3fn).float() * scales[:, None]


def with_rounded_weights(drafter: Drafter, head: Tensor) -> Drafter:
    """A copy that computes with PyTorch's products. The vectors of a sequential head stay as they are."""
    drafter, of_target = copy.deepcopy(drafter), rounded(head)
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith("head."):
            module.weight = nn.Parameter(rounded(module.weight), requires_grad=False)
    drafter.own_head = lambda states: linear(states, of_target)
    return drafter


def drafts(pair: Pair, drafter: Drafter) -> list[list[list[int]]]:
    engine = Engine(pair.target, drafter, policy="fixed", num_pages=64)
    return drafts_of(engine, PROMPTS, [SamplingParams(max_tokens=12)] * len(PROMPTS))


def check(pair: Pair, drafter: Drafter) -> None:
    expected, before = drafts(pair, with_rounded_weights(drafter, pair.target.head_weight)), drafts(pair, drafter)
    digest = drafter_fingerprint(drafter)
    drafter.fuse("fp8", pair.target.head_weight)
    assert drafts(pair, drafter) == expected
    assert expected != before, "or nothing was rounded"
    assert drafter_fingerprint(drafter) == digest, "what is saved does not change"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head": RESIDUAL},
        {"draft_vocab_size": 40},
        {"attention_bias": True},
        {"head": HeadConfig(type="selector", rank=4), "conv_kernel_size": 2, "conv_group_size": 8},
    ],
    ids=["plain", "a sequential head", "a reduced vocabulary", "biases", "convolutions"],
)
def test_drafts_are_those_of_rounded_weights(pair: Pair, changes: dict[str, Any]) -> None:
    check(pair, random_drafter(**changes))


def test_drafts_of_eagle_are(pair: Pair, tmp_path: Path) -> None:
    check(pair, load_drafter(eagle.checkpoint(tmp_path), pair.target, "bf16"))


def test_an_adapter_of_a_drafter_in_fp8_is_not_rounded(pair: Pair, tmp_path: Path) -> None:
    drafter = random_drafter()
    make_adapter(tmp_path, drafter)
    plain = Engine(pair.target, drafter, num_pages=64).draft_model
    coded = copy.deepcopy(drafter)
    coded.fuse("fp8", pair.target.head_weight)
    model = Engine(pair.target, coded, num_pages=64).draft_model
    assert plain is not None
    assert model is not None
    weights = [own.load_adapter(tmp_path).drafter.state_dict() for own in (plain, model)]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert not model.load_adapter(tmp_path).drafter.float8


def test_a_product_has_a_byte_a_weight_and_a_scale_an_output() -> None:
    layers = [nn.Linear(64, outputs, bias=False) for outputs in (10, 6)]
    product = Float8Product.of(layers)
    assert product.nbytes == 16 * 64 + 16 * 4
    states, x = torch.randn(3, 16), torch.randn(3, 64)
    expected = states + linear(x, rounded(torch.cat([layer.weight.detach() for layer in layers])))
    torch.testing.assert_close(product.add_to(states, x), expected)


def test_memory_counts_codes(pair: Pair) -> None:
    drafter = random_drafter()
    before = weight_bytes(drafter)
    drafter.fuse("fp8")
    linears = [module.weight for module in drafter.modules() if isinstance(module, nn.Linear)]
    coded = sum(weight.numel() + 4 * len(weight) for weight in linears)
    assert weight_bytes(drafter) == before + coded, "on a CPU both are there"
