"""A model's fingerprint is that of its weights, however they are kept."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import TinyPair
from volley.errors import CheckpointError
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.drafter import Drafter
from volley.models.layers.fingerprint import drafter_fingerprint, target_fingerprint
from volley.models.targets.loading import load_causal_lm
from volley.models.targets.target import Target
from volley.native import TargetWeights


@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.float32, "bf16"), (torch.bfloat16, "bf16"), (torch.bfloat16, "int8")]
)
def test_data_type_codes_and_released_weights_do_not_matter(
    tiny_pair: TinyPair, dtype: torch.dtype, weights: TargetWeights
) -> None:
    plain = load_causal_lm(tiny_pair.target, torch.float32)
    loaded = Target.from_pretrained(tiny_pair.target, dtype=dtype, weights=weights).model
    assert target_fingerprint(loaded) == target_fingerprint(plain)
    with torch.no_grad():
        next(plain.parameters()).mul_(1.1)
    assert target_fingerprint(loaded) != target_fingerprint(plain)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="nothing is copied without packed products")
def test_a_drafter_at_work_reads_what_it_gave_up_again(tiny_pair: TinyPair, tmp_path: Path) -> None:
    shutil.copytree(tiny_pair.drafter, tmp_path, dirs_exist_ok=True)
    drafter = load_drafter(tmp_path, Target.from_pretrained(tiny_pair.target, device="cpu"), "auto")
    plain = Drafter.from_pretrained(tmp_path)
    assert drafter.fc.weight.is_meta, "or memory has it twice"
    assert drafter_fingerprint(drafter) == drafter_fingerprint(plain)
    plain.requires_grad_(False).fc.weight.mul_(1.1)
    plain.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"other weights than when it was loaded \(fc.weight\); load the drafter"):
        drafter.state_dict()
