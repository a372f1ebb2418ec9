"""A target's fingerprint is that of its weights, however they are kept."""

import pytest
import torch

from tests.conftest import TinyPair
from volley.models.layers.fingerprint import target_fingerprint
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
