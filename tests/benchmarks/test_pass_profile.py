"""The profile of a pass: what an operation is counted as, and that the kinds make up the pass."""

import pytest

from benchmarks.pass_profile import LAYERS, ORDER, OTHER, kind, measure
from volley import Engine


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("mkldnn::_linear_pointwise", "products"),
        ("aten::_weight_int8pack_mm", "products"),
        ("aten::bmm", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_fused_rms_norm", "norms"),
        ("aten::index_select", "moving data"),
        ("aten::to", "moving data"),
        ("aten::as_strided", "views"),
        ("aten::mul", OTHER),
        ("aten::silu", OTHER),
    ],
)
def test_kinds(operation: str, expected: str) -> None:
    assert kind(operation) == expected


def test_the_kinds_make_up_the_pass() -> None:
    whole, kinds, operations = measure(Engine.from_pretrained(drafter=None, num_pages=8), rows=2, repeats=2)
    assert set(kinds) <= set(ORDER)
    assert sum(kinds.values()) >= 0.999 * whole
    inside = sum(seconds for name, seconds in kinds.items() if name != "outside operations")
    assert inside == pytest.approx(sum(operations.values()))
    assert kinds["products"] > 0
    assert kinds["attention"] > 0 or kinds[LAYERS] > 0
