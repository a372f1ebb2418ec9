"""The pilot's network and its files; what it does in an engine is in tests/engine/test_policies.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.policies.views import views
from tests.tiny import VOCAB, random_drafter
from volley.errors import CheckpointError, ConfigError, MismatchError
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.pilot import (
    CONFIG,
    WEIGHTS,
    PilotConfig,
    PilotInput,
    features,
    load_pilot,
    net_for,
    save_pilot,
)
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.policies.cost import Costs
from volley.policies.pilot import Pilot
from volley.tensors import load_tensors, save_tensors

TAPPED = 2 * 32


def config_for(drafter: Drafter, **changes: Any) -> PilotConfig:
    values = {
        "drafter": drafter_fingerprint(drafter),
        "input": "top",
        "block_sizes": (3, 4, 6),
        "width": 5,
        "layers": 2,
    }
    return PilotConfig(**{**values, **changes})


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Drafter]:
    """A drafter's folder with a pilot in it, and the drafter."""
    random_drafter().save_pretrained(tmp_path)
    drafter = Drafter.from_pretrained(tmp_path)
    config = config_for(drafter)
    save_pilot(tmp_path, config, net_for(config, drafter))
    return tmp_path, drafter


@pytest.mark.parametrize("kind", get_args(PilotInput))
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_input_and_depth(kind: PilotInput, layers: int) -> None:
    drafter = random_drafter()
    net = net_for(config_for(drafter, input=kind, layers=layers), drafter)
    logits, hidden = torch.randn(4, VOCAB) * 5, torch.randn(4, TAPPED)
    found = features(kind, torch.tensor([0.0, 1.0, 0.5, 0.0]), logits, hidden)
    assert net(found).shape == (4, 3)
    assert sum(isinstance(module, torch.nn.Linear) for module in net) == layers
    assert found[:, -1].tolist() == [0.0, 1.0, 0.5, 0.0]
    half = features(kind, torch.zeros(4), logits.bfloat16(), hidden.bfloat16())
    torch.testing.assert_close(half[:, :-1], found[:, :-1], atol=0.05, rtol=0.05)


def test_the_inputs_are_what_they_are_called() -> None:
    logits, hidden = torch.randn(2, VOCAB), torch.randn(2, TAPPED)
    found = {kind: features(kind, torch.zeros(2), logits, hidden)[:, :-1] for kind in get_args(PilotInput)}
    assert torch.equal(found["logits"], logits)
    assert torch.equal(found["softmax"], logits.softmax(-1))
    torch.testing.assert_close(found["top"], found["softmax"].sort(descending=True).values[:, :32])
    for kind, source in (("normalised", logits), ("hidden", hidden)):
        expected = (source - source.mean(-1, keepdim=True)) / source.std(-1, keepdim=True, correction=0)
        torch.testing.assert_close(found[kind], expected, atol=1e-4, rtol=1e-4)


def test_a_saved_pilot_chooses_the_same(saved: tuple[Path, Drafter]) -> None:
    folder, drafter = saved
    own, again = Pilot(*load_pilot(drafter)), Pilot(*load_pilot(drafter, str(folder)))
    costs = Costs(lambda tokens, requests: 0.1, lambda tokens, requests: 1.0)
    for policy in (own, again):
        policy.attach(6, costs)
        for request_id in range(20):
            generator = torch.Generator().manual_seed(request_id)
            logits = 5 * torch.randn(VOCAB, generator=generator)
            policy.prefilled(request_id, float(request_id % 2), logits, torch.zeros(TAPPED))
    assert own.positions == again.positions
    assert set(own.positions.values()) <= {2, 3, 5}
    del own.positions[2]
    assert [spec.positions for spec in own.decide(views([9, 1, 9]), 3)] == [own.positions[0], 1, 5]
    own.end(0)
    own.end(99)
    assert 0 not in own.positions


def test_a_pilot_of_another_drafter_is_refused(saved: tuple[Path, Drafter]) -> None:
    folder, _ = saved
    with pytest.raises(MismatchError, match=r"trained for a drafter with fingerprint .* train one .*`volley pilot`"):
        load_pilot(random_drafter(5), folder)


def test_no_pilot(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no pilot beside this drafter; train one with `volley pilot`"):
        load_pilot(random_drafter())
    random_drafter().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"no pilot in {tmp_path}; train one"):
        load_pilot(Drafter.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": "logit"}, "unknown pilot input 'logit'; did you mean 'logits'"),
        ({"inputs": "top"}, "unknown pilot config key 'inputs'"),
        ({"width": 0}, "both must be at least 1"),
        ({"block_sizes": []}, "chooses from blocks of"),
        ({"width": 6}, "do not belong together"),
    ],
)
def test_bad_configs(saved: tuple[Path, Drafter], changes: dict[str, Any], message: str) -> None:
    folder, drafter = saved
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**raw, **changes}))
    with pytest.raises((ConfigError, CheckpointError), match=message):
        load_pilot(drafter)
    (folder / CONFIG).write_text(json.dumps({"input": "top"}))
    with pytest.raises(ConfigError, match="lacks 'drafter'"):
        load_pilot(drafter)


def test_damaged_weights(saved: tuple[Path, Drafter]) -> None:
    folder, drafter = saved
    whole = (folder / WEIGHTS).read_bytes()
    tensors = load_tensors(folder / WEIGHTS)
    save_tensors(folder / WEIGHTS, {**tensors, "0.bias": tensors["0.bias"] * torch.nan})
    with pytest.raises(CheckpointError, match="not finite; train it again"):
        load_pilot(drafter)
    (folder / WEIGHTS).write_bytes(whole[:-9])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_pilot(drafter)


def test_a_block_beyond_the_drafters() -> None:
    drafter = random_drafter()
    config = replace(config_for(drafter), block_sizes=(4, 9))
    with pytest.raises(ConfigError, match="beyond the 6"):
        Pilot(config, net_for(config, drafter)).attach(6, Costs(lambda *_: 1.0, lambda *_: 1.0))
