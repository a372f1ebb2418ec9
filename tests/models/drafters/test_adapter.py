"""Adapters: what training optimises is what decoding runs, and an adapter goes with its own drafter only."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny import random_drafter
from volley.errors import CheckpointError, ConfigError, MismatchError
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.drafters.adapter import (
    CONFIG,
    WEIGHTS,
    AdapterConfig,
    adapted,
    attach,
    drafter_fingerprint,
    merge,
    save_adapter,
)
from volley.models.drafters.drafter import Drafter
from volley.tensors import load_tensors, save_tensors

HEAD = HeadConfig(type="residual", rank=4)


def make_adapter(path: Path, drafter: Drafter, rank: int = 3, seed: int = 0, size: float = 0.2) -> Drafter:
    """Save a random adapter of ``drafter``; returns the copy it is attached to."""
    copy = Drafter(drafter.config).eval()
    copy.load_state_dict(drafter.state_dict())
    config = AdapterConfig(r=rank, lora_alpha=2.0 * rank, drafter=drafter_fingerprint(drafter))
    attach(copy, config)
    torch.manual_seed(seed)
    for parameter in copy.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=size)
    save_adapter(path, copy, config)
    return copy


def run(drafter: Drafter) -> list[torch.Tensor]:
    torch.manual_seed(5)
    embeddings, features, positions = torch.randn(6, 32), torch.randn(6, 64), torch.arange(6)
    with torch.no_grad():
        hidden = drafter(embeddings, positions, lambda layer, q, k, v: q)
        return [hidden, *(tensor for pair in drafter.context_kv(features, positions) for tensor in pair)]


def test_a_new_adapter_changes_nothing_and_alone_learns() -> None:
    drafter = random_drafter(head=HEAD).requires_grad_(True)
    before, weights = run(drafter), {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    attach(drafter, AdapterConfig(r=2, lora_alpha=4.0, drafter=""))
    assert all(torch.equal(*both) for both in zip(before, run(drafter), strict=True))
    learning = [name for name, parameter in drafter.named_parameters() if parameter.requires_grad]
    assert len(learning) == 2 * (1 + 2 * 7)
    assert all("lora_" in name and not name.startswith("head.") for name in learning)
    merge(drafter)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in drafter.state_dict().items())
    assert all(type(m) is nn.Linear for name, m in drafter.named_modules() if name.endswith("_proj"))


def test_what_was_trained_is_what_is_loaded(tmp_path: Path) -> None:
    drafter = random_drafter(head=HEAD)
    before = run(drafter)
    attached = make_adapter(tmp_path, drafter)
    loaded = adapted(drafter, tmp_path)
    for unmerged, merged, base in zip(run(attached), run(loaded), before, strict=True):
        torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(merged, base, atol=1e-2)
    assert all(torch.equal(*both) for both in zip(before, run(drafter), strict=True)), "the drafter is left as it is"
    assert loaded.head is drafter.head
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert adapted(drafter.to(torch.bfloat16), tmp_path).fc.weight.dtype == torch.bfloat16


def test_files_carry_pefts_names(tmp_path: Path) -> None:
    make_adapter(tmp_path, random_drafter())
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6.0)
    tensors = load_tensors(tmp_path / WEIGHTS)
    assert tensors["base_model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (3, 32)
    assert tensors["base_model.model.fc.lora_B.weight"].shape == (32, 3)
    ends = {name.split(".")[-3] for name in tensors}
    assert ends == set(config["target_modules"])


def test_the_fingerprint_sees_every_weight() -> None:
    drafter = random_drafter()
    same, first = random_drafter(), drafter_fingerprint(drafter)
    assert drafter_fingerprint(same) == first
    assert drafter_fingerprint(same.to(torch.bfloat16)) == first, "as a checkpoint keeps it"
    for weight in drafter.parameters():
        with torch.no_grad():
            weight.view(-1)[-1] += 1
            assert drafter_fingerprint(drafter) != first
            weight.view(-1)[-1] -= 1


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        raw = json.loads((path / CONFIG).read_text()) | changes
        (path / CONFIG).write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))

    return change


def change_weights(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        weights = load_tensors(path / WEIGHTS)
        edit(weights)
        save_tensors(path / WEIGHTS, weights)

    return change


A = "base_model.model.fc.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (change_config(drafter="0" * 32), MismatchError, "trained for a drafter with fingerprint 000"),
        (change_config(r=4), CheckpointError, r"has shape \[3, 64\], config.json says \[4, 64\]"),
        (change_config(r=0), ConfigError, "a rank is a positive integer"),
        (change_config(lora_alpha="2"), ConfigError, "lora_alpha is '2'; it must be a number"),
        (change_config(r=None), ConfigError, "lacks 'r'"),
        (change_config(lora_alfa=1), ConfigError, "did you mean 'lora_alpha'"),
        (change_config(bias="all"), ConfigError, "bias is 'all'"),
        (change_weights(lambda w: w.pop(A)), CheckpointError, "missing base_model.model.fc.lora_A"),
        (change_weights(lambda w: w[A].fill_(torch.nan)), CheckpointError, "not finite"),
        (lambda path: (path / WEIGHTS).write_bytes(b"12345"), CheckpointError, "truncated or damaged"),
        (lambda path: (path / CONFIG).unlink(), CheckpointError, "does not exist"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    drafter = random_drafter()
    make_adapter(tmp_path, drafter)
    change(tmp_path)
    with pytest.raises(error, match=message):
        adapted(drafter, tmp_path)
