"""Kernels in C against plain PyTorch with the same roundings, and a row alone against the same row among others."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from tests.native.codes import OF_CODES, SMALL_FLOATS, made_up, made_up_floats, rounded
from tests.tiles import LEVELS, kernels_of, needs_kernels
from volley import native
from volley.native import Product, Weights, sampling
from volley.native.packing import Codes
from volley.weights import BLOCK, FORMATS, GROUP, LARGE, WEIGHTS

STORED = [name for name in OF_CODES if name not in WEIGHTS]
"""Formats of the types of GGUF files."""
pytestmark = needs_kernels
ULP = 2**-7
"""Two neighbouring bf16 numbers differ by at most this fraction: a sum in another order may round to the next one."""
SEEDS = st.integers(0, 1000)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def strided(rows: int, size: int, gap: int) -> Tensor:
    """Rows that lie ``gap`` numbers apart."""
    return randn(rows, size + gap)[:, :size]


def assert_close(found: Tensor, expected: Tensor, floor: float = 2**-12, roundings: int = 1) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=roundings * ULP, atol=floor)


def test_a_library_that_lacks_a_function_is_left_out(tmp_path: Path) -> None:
    assert native.load(Path(native.__file__).parent) is not None
    assert native.load(tmp_path) is None
    (tmp_path / "_kernels.so").symlink_to(torch._C.__file__)
    assert native.load(tmp_path) is None


# -- rows ---------------------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As transformers' Llama has it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).bfloat16()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos[:, None] + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin[:, None]


@given(rows=st.integers(1, 9), size=st.integers(1, 200), scale=st.sampled_from([1e-3, 1.0, 300.0]), seed=SEEDS)
def test_rms_norm(rows: int, size: int, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = randn(2, rows, size) * scale, randn(size)
    found = native.rms_norm(x, weight, 1e-6)
    assert found.shape == x.shape
    assert_close(found, norm(x, weight, 1e-6), roundings=2)
    assert torch.equal(native.rms_norm(x[1, -1:].contiguous(), weight, 1e-6), found[1, -1:])


@given(rows=st.integers(1, 9), size=st.integers(1, 200), scale=st.sampled_from([1e-3, 1.0, 300.0]), seed=SEEDS)
def test_rms_norm_that_is_rounded_once(rows: int, size: int, scale: float, seed: int) -> None:
    """As transformers' Gemma has it, by a weight in fp32."""
    torch.manual_seed(seed)
    x, weight = randn(rows, size) * scale, 1 + torch.randn(size)
    found = native.rms_norm(x, weight, 1e-6, rounds=False)
    assert_close(found, rms_norm(x.float(), (size,), weight, 1e-6))
    assert torch.equal(native.rms_norm(x[-1:].contiguous(), weight, 1e-6, rounds=False), found[-1:])


@given(rows=st.integers(1, 9), size=st.integers(1, 200), scale=st.sampled_from([1e-3, 1.0, 300.0]), seed=SEEDS)
def test_rms_norm_in_fp32(rows: int, size: int, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, rows, size) * scale
    for weight in (torch.randn(size), None):
        found = native.rms_norm(x, weight, 1e-6)
        torch.testing.assert_close(found, rms_norm(x, (size,), weight, 1e-6))
        assert torch.equal(native.rms_norm(x[1, -1:].contiguous(), weight, 1e-6), found[1, -1:])


@given(
    rows=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (8, 1)]),
    dim=st.sampled_from([2, 16, 22, 64, 128]),
    normed=st.booleans(),
    gap=st.sampled_from([0, 5]),
    seed=SEEDS,
)
def test_norm_and_turn(rows: int, heads: tuple[int, int], dim: int, normed: bool, gap: int, seed: int) -> None:
    torch.manual_seed(seed)
    queries, keys = heads
    x, angles = strided(rows, (queries + 2 * keys) * dim, gap), torch.rand(rows, dim // 2).repeat(1, 2) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    norms = (randn(dim), randn(dim)) if normed else None
    parts = list(torch.split(x.clone().view(rows, -1, dim), [queries, keys, keys], dim=1))
    for part in range(2):
        own = parts[part] if norms is None else norm(parts[part], norms[part], 1e-6)
        parts[part] = turned(own, cos, sin)
    alone = x[-1:].clone()
    native.norm_and_turn(x.view(rows, -1, dim), norms, native.Turns(cos, sin), queries, keys, 1e-6)
    expected = torch.cat(parts, dim=1).view(rows, -1)
    if normed:  # a norm may round to the next number, and a difference of two such numbers may be small
        assert_close(x, expected, floor=2**-5)
    else:
        assert torch.equal(x, expected)
    last = native.Turns(cos[-1:], sin[-1:])
    native.norm_and_turn(alone.view(1, -1, dim), norms, last, queries, keys, 1e-6)
    assert torch.equal(alone, x[-1:])


@given(rows=st.integers(1, 9), width=st.sampled_from([0, 8, 32]), rounds=st.booleans(), seed=SEEDS)
def test_heads_normed_as_one_and_turned_in_part(rows: int, width: int, rounds: bool, seed: int) -> None:
    """By cosines in bf16 or fp32, as OLMo 2 has these."""
    torch.manual_seed(seed)
    queries, keys, dim = 4, 2, 32
    x, angles = randn(rows, queries + 2 * keys, dim), torch.rand(rows, width // 2).repeat(1, 2) * 6
    cos, sin = (own.bfloat16() if rounds else own for own in (angles.cos(), angles.sin()))
    norms = randn(queries * dim), randn(keys * dim)
    parts = list(torch.split(x.clone(), [queries, keys, keys], dim=1))
    for part, weight in enumerate(norms):
        normed = rms_norm(parts[part].flatten(1).float(), weight.shape, weight.float(), 1e-6).bfloat16()
        own = normed.view(rows, -1, dim)
        parts[part] = torch.cat((turned(own[..., :width], cos, sin).bfloat16(), own[..., width:]), dim=-1)
    turns = native.Turns(cos, sin) if width else None
    alone = x[-1:].clone()
    native.norm_and_turn(x, norms, turns, queries, keys, 1e-6, rounds=False)
    assert_close(x, torch.cat(parts, dim=1), floor=2**-5)
    native.norm_and_turn(alone, norms, turns and native.Turns(cos[-1:], sin[-1:]), queries, keys, 1e-6, rounds=False)
    assert torch.equal(alone, x[-1:])


@given(rows=st.integers(1, 9), size=st.integers(1, 200), scale=st.sampled_from([0.1, 3.0, 60.0]), seed=SEEDS)
def test_gated_gelu(rows: int, size: int, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(rows, 2 * size) * scale
    gate, up = x.chunk(2, dim=-1)
    found = native.gated_gelu(x)
    torch.testing.assert_close(found, gelu(gate, approximate="tanh") * up, atol=2e-6 * scale, rtol=2e-6)


@given(rows=st.integers(1, 9), size=st.integers(1, 200), scale=st.sampled_from([0.1, 3.0, 60.0]), seed=SEEDS)
def test_gated_in_bf16(rows: int, size: int, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = randn(rows, 2 * size) * scale
    gate, up = x[:, :size], x[:, size:]
    for kind, expected, floor in (
        (native.SILU, silu(gate) * up, 1e-30),
        (native.GELU, gelu(gate, approximate="tanh") * up, 1e-5 * max(scale, 1.0)),
    ):
        found = native.gated(x, kind)
        assert_close(found, expected, floor=floor)
        assert torch.equal(native.gated(x[-1:].clone(), kind), found[-1:])


@pytest.mark.parametrize("shape", [(1, 70_000), (3, 200), (40, 3_000)])
@pytest.mark.parametrize("most", [0.5, 30.0])
def test_capped_numbers(shape: tuple[int, int], most: float) -> None:
    torch.manual_seed(0)
    x = randn(*shape) * 20
    expected, alone = torch.tanh(x / most) * most, x[-1:].clone()
    native.cap(x, most)
    assert_close(x, expected)
    native.cap(alone, most)
    assert torch.equal(alone, x[-1:])


def test_many_rows_are_shared_among_threads() -> None:
    x, weight = randn(300, 512), randn(512)
    assert_close(native.rms_norm(x, weight, 1e-6), norm(x, weight, 1e-6))
    assert_close(native.gated(x, native.SILU), silu(x[:, :256]) * x[:, 256:])


# -- products -----------------------------------------------------------------------------------------------------------


def exact_weight(weight: Tensor, kind: Weights) -> Tensor:
    """The weight in fp32 that a product of this kind stands for."""
    return weight.float() if kind == "bf16" else rounded(weight, kind).dense()


def exact_inputs(x: Tensor, group: int | None) -> Tensor:
    """The inputs that it meets: for codes in int8, with a scale for every group."""
    if group is None:
        return x.float()
    grouped = x.float().view(len(x), -1, group)
    most = grouped.abs().amax(dim=-1, keepdim=True)
    inverse = torch.full_like(most, 127) / most  # 127 / most would be the reciprocal times 127
    codes = (grouped * inverse.nan_to_num(posinf=0)).round()
    return (codes * (most / 127)).view(x.shape)


def check_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, kind: Weights) -> None:
    check_outputs(found, exact_inputs(x, None if kind == "bf16" else GROUP), exact_weight(weight, kind), bias)


def check_outputs(found: Tensor, inputs: Tensor, exact: Tensor, bias: Tensor | None) -> None:
    expected = inputs @ exact.T + (0 if bias is None else bias.float())
    near = 2**-8 * expected.abs() + 1e-5 * (inputs.abs() @ exact.abs().T)  # one rounding to bf16, and a sum in fp32
    assert found.dtype == torch.bfloat16
    assert bool(((found.float() - expected).abs() <= near + 1e-30).all())


PRODUCTS = {
    "kind": st.sampled_from(WEIGHTS),
    "rows": st.integers(1, 80),
    "outputs": st.integers(1, 70),
    "inputs": st.integers(1, 5) | st.just(17),  # 512 inputs and more take several blocks of outputs at once
    "biased": st.booleans(),
    "gap": st.sampled_from([0, 32, 7]),
    "level": st.sampled_from(LEVELS or [0]),
    "seed": SEEDS,
}


@given(**PRODUCTS)
def test_products(  # type: ignore[no-untyped-def]
    kind: Weights, rows, outputs, inputs, biased, gap, level, seed
) -> None:
    torch.manual_seed(seed)
    size = inputs * (32 if kind == "bf16" else GROUP)
    weight, bias, x = randn(outputs, size), randn(outputs) if biased else None, strided(rows, size, gap)
    with kernels_of(level):
        found = Product(weight, bias, kind)(x)
    assert found.shape == (rows, outputs)
    check_product(found, x, weight, bias, kind)


def product_of_codes(*codes: Codes, bias: Tensor | None = None) -> Product:
    shape = torch.empty(sum(len(one.codes) for one in codes), codes[0].codes.shape[1], device="meta")
    return Product(shape, bias, "int8", [(one, len(one.codes)) for one in codes])


def exact_outputs(x: Tensor, codes: Codes) -> tuple[Tensor, Tensor]:
    """Inputs as they are rounded for codes, and the weight."""
    return exact_inputs(x, codes.format.group), codes.dense()


@given(**{**PRODUCTS, "kind": st.sampled_from(STORED), "inputs": st.integers(1, 3)})
def test_products_of_stored_codes(  # type: ignore[no-untyped-def]
    kind: str, rows, outputs, inputs, biased, gap, level, seed
) -> None:
    torch.manual_seed(seed)
    codes, bias = made_up(kind, outputs, inputs * FORMATS[kind].inputs), randn(outputs) if biased else None
    x = strided(rows, codes.codes.shape[1], gap)
    with kernels_of(level):
        found = product_of_codes(codes, bias=bias)(x)
    check_outputs(found, *exact_outputs(x, codes), bias)


@given(
    kinds=st.lists(st.sampled_from(STORED), min_size=2, max_size=4),
    rows=st.integers(1, 20),
    level=st.sampled_from(LEVELS or [0]),
    seed=SEEDS,
)
def test_several_formats_one_below_the_other(kinds: list[str], rows: int, level: int, seed: int) -> None:
    torch.manual_seed(seed)
    parts = [made_up(kind, int(torch.randint(1, 40, ())), LARGE) for kind in kinds]
    outputs = sum(len(part.codes) for part in parts)
    bias, x = randn(outputs), randn(rows, LARGE)
    with kernels_of(level):
        product = product_of_codes(*parts, bias=bias)
        found = product(x)
    sizes = [len(part.codes) for part in parts]
    for part, own, of in zip(parts, found.split(sizes, dim=1), bias.split(sizes), strict=True):
        check_outputs(own, *exact_outputs(x, part), of)
    assert torch.equal(product.weight(), torch.cat([part.dense() for part in parts]).bfloat16())
    assert [part.format.name for part in product.codes()] == kinds
    half = outputs // 2 // BLOCK * BLOCK
    if half:
        assert torch.equal(product.first(half)(x), found[:, :half])


def assert_rows_stand_alone(product: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Each row is the same to the bit alone and in every run of rows that begins with the first or ends with the last."""
    together = product(x)
    for row in range(len(x)):
        assert torch.equal(product(x[row : row + 1])[0], together[row]), f"row {row} alone is another"
        assert torch.equal(product(x[: row + 1]), together[: row + 1]), f"rows up to {row} are others"
        assert torch.equal(product(x[row:]), together[row:]), f"rows from {row} are others"


def product_of(kind: str, outputs: int, inputs: int) -> Product:
    """Return the product of a random weight, or of codes in this format."""
    if kind in STORED:
        return product_of_codes(made_up(kind, outputs, inputs), bias=randn(outputs))
    if kind in SMALL_FLOATS:
        return product_of_floats(made_up_floats(kind, outputs, inputs), randn(outputs))
    return Product(randn(outputs, inputs), randn(outputs), kind)  # type: ignore[arg-type]


def product_of_floats(codes: Codes, bias: Tensor | None) -> Product:
    outputs = len(codes.codes)
    shape = torch.empty(outputs, codes.codes.shape[1] * 8 // codes.format.bits, device="meta")
    return Product(shape, bias, "bf16", [(codes, outputs)])


@given(
    kind=st.sampled_from(SMALL_FLOATS),
    rows=st.integers(1, 70),
    outputs=st.integers(1, 50),
    groups=st.integers(1, 9),
    level=st.sampled_from(LEVELS or [0]),
    seed=SEEDS,
)
def test_small_floats_multiply_as_the_decoded_weight(  # type: ignore[no-untyped-def]
    kind: str, rows, outputs, groups, level, seed
) -> None:
    """To the bit: they become the same bf16 numbers, and are summed in the same order."""
    torch.manual_seed(seed)
    codes, bias, x = made_up_floats(kind, outputs, groups * GROUP), randn(outputs), randn(rows, groups * GROUP)
    dense = codes.dense().bfloat16()
    with kernels_of(level):
        product = product_of_floats(codes, bias)
        assert torch.equal(product(x), Product(dense, bias, "bf16")(x))
    assert torch.equal(product.weight(), dense)
    assert all(a is b or torch.equal(a, b) for a, b in zip(product.codes()[0][1:], codes[1:], strict=True))


@pytest.mark.parametrize(("kind", "bits"), [("FP8", 8.0), ("NVFP4", 4.5)])
def test_small_floats_take_the_memory_of_their_file(kind: str, bits: float) -> None:
    torch.manual_seed(0)
    product = product_of_floats(made_up_floats(kind, 64, 2816), None)
    assert product.nbytes <= 1.07 * 64 * 2816 * bits / 8


FORMATS_OF_ALL = pytest.mark.parametrize("kind", FORMATS)


@pytest.mark.parametrize(("outputs", "inputs"), [(37, 448), (101, 576)])
@pytest.mark.parametrize("level", LEVELS)
@FORMATS_OF_ALL
def test_a_row_is_the_same_among_others(kind: str, level: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    if kind in STORED:
        inputs = inputs // LARGE * LARGE
    x = randn(81, inputs) * torch.logspace(-2, 2, 81)[:, None].bfloat16()
    with kernels_of(level):
        assert_rows_stand_alone(product_of(kind, outputs, inputs), x)


@pytest.mark.parametrize("kind", OF_CODES)
def test_codes_give_the_same_on_all_instructions(kind: str) -> None:
    torch.manual_seed(0)
    product, x = product_of(kind, 50, 768), randn(70, 768)
    expected = product(x)
    for level in LEVELS:
        with kernels_of(level):
            assert torch.equal(product(x), expected), level


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", STORED)
def test_the_largest_sums_do_not_overflow(kind: str, level: int) -> None:
    """All codes are the largest or the smallest, and all inputs of a row are alike."""
    of = FORMATS[kind]
    least, most = -of.zero if not of.table else 0, 2**of.bits - 1 - (of.zero if not of.table else 0)
    codes = made_up(kind, 32, LARGE)
    codes.codes[:16], codes.codes[16:] = least, most
    x = torch.tensor([[1.0], [-1.0], [127.0]]).expand(3, LARGE).bfloat16()
    with kernels_of(level):
        found = product_of_codes(codes)(x)
    check_outputs(found, *exact_outputs(x, codes), None)


def test_faults_are_found() -> None:
    """A changed input, an input more, a sum whose order depends on the number of rows."""
    torch.manual_seed(0)
    weight, x = randn(37, 448), randn(20, 448)
    product = Product(weight, None, "bf16")
    check_product(product(x), x, weight, None, "bf16")
    changed = x.clone()
    changed[13, 101] += 1
    with pytest.raises(AssertionError):
        check_product(product(changed), x, weight, None, "bf16")
    first, second = (Product(part.contiguous(), None, "bf16") for part in torch.split(weight, 224, dim=1))

    def in_two_parts(x: Tensor) -> Tensor:
        return product(x) if len(x) < 17 else first(x[:, :224]) + second(x[:, 224:])

    with pytest.raises(AssertionError, match="alone is another"):
        assert_rows_stand_alone(in_two_parts, x)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_inputs_of_any_shape_and_layout(kind: Weights) -> None:
    torch.manual_seed(0)
    weight, x = randn(20, 64), randn(6, 64)
    product = Product(weight, None, kind)
    expected = product(x)
    assert torch.equal(product(x.view(2, 3, 64)), expected.view(2, 3, 20))
    assert torch.equal(product(x.T.contiguous().T), expected), "inputs of a row need not lie side by side"
    assert torch.equal(product(x[:1].expand(6, 64)), expected[:1].expand(6, 20))
    assert product(x[:0]).shape == (0, 20)
    assert not product(torch.zeros_like(x)).any()


def test_only_bf16_is_multiplied() -> None:
    product = Product(randn(20, 64), None, "bf16")
    with pytest.raises(AssertionError, match="bf16"):
        product(torch.zeros(1, 64))


@pytest.mark.parametrize(("kind", "step"), [("bf16", 32), ("int8", 64), ("int4", 64)])
def test_which_weights_fit(kind: Weights, step: int) -> None:
    assert native.fits(randn(3, 2 * step), kind)
    assert not native.fits(randn(3, 2 * step - 16), kind)
    assert not native.fits(torch.zeros(3, 2 * step), kind)


# -- codes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 16, 37])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_come_back_as_the_product_has_them(kind: Weights, outputs: int) -> None:
    torch.manual_seed(0)
    weight = randn(outputs, 192)
    product = Product(weight, None, kind)
    expected = exact_weight(weight, kind).bfloat16()
    assert torch.equal(product.weight(), expected)
    indices = torch.randint(outputs, (2, 5))
    assert torch.equal(product.rows(indices), expected[indices])
    assert torch.equal(product.rows(indices[0, 0]), expected[indices[0, 0]])
    padded = -(-outputs // BLOCK) * BLOCK
    scales = {"bf16": 0, "int8": padded * 4, "int4": padded * 3 * 4}
    assert product.nbytes == padded * 192 * FORMATS[kind].bits // 8 + scales[kind]


@pytest.mark.parametrize("outputs", [1, 16, 37])
@pytest.mark.parametrize("kind", STORED)
def test_stored_codes_come_back(kind: str, outputs: int) -> None:
    torch.manual_seed(0)
    stored = made_up(kind, outputs, 512)
    product = product_of_codes(stored)
    (found,) = product.codes()
    assert (product.kind, product.formats) == (stored.format.weights, (stored.format,))
    for part, expected in zip(found[1:], stored[1:], strict=True):
        assert (part is None) == (expected is None)
        assert part is None or (part.dtype == expected.dtype and torch.equal(part, expected))
    expected, indices = stored.dense().bfloat16(), torch.randint(outputs, (2, 5))
    assert torch.equal(product.weight(), expected)
    assert torch.equal(product.rows(indices), expected[indices])
    padded = -(-outputs // BLOCK) * BLOCK
    assert product.nbytes * 8 == padded * 512 * stored.format.held_bits
    assert not Product(randn(3, 64), None, "bf16").codes()


@FORMATS_OF_ALL
def test_the_first_outputs_of_a_product(kind: str) -> None:
    torch.manual_seed(0)
    whole, x = product_of(kind, 50, LARGE), randn(6, LARGE)
    part = whole.first(32)
    assert part.shape == (32, LARGE)
    assert torch.equal(part(x), whole(x)[:, :32])
    assert torch.equal(part.weight(), whole[:32])
    assert part.nbytes == whole.nbytes // 2
    assert whole(x).shape == (6, 50)
    with pytest.raises(AssertionError, match="40 is within a block"):
        whole.first(40)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("of", WEIGHTS)
def test_a_product_is_laid_out_again_in_other_codes(of: Weights, kind: Weights) -> None:
    """In slices: 5,000 rows of 192 are read in two."""
    torch.manual_seed(0)
    product = Product(randn(5000, 192), None, of)
    assert torch.equal(product[32:50], product.weight()[32:50])
    again = Product(product, None, kind)
    assert torch.equal(again.weight(), exact_weight(product.weight(), kind).bfloat16())


@FORMATS_OF_ALL
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_what_is_no_number_gives_none(kind: str, value: float) -> None:
    torch.manual_seed(0)
    product, x = product_of(kind, 32, LARGE), randn(3, LARGE)
    expected = product(x)
    x[1, 5] = value
    found = product(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_of_zero(kind: Weights) -> None:
    product = Product(torch.zeros(3, 64).bfloat16(), torch.ones(3), kind)
    assert not product.weight().any()
    assert torch.equal(product(randn(2, 64)), torch.ones(2, 3).bfloat16())


# -- rooms --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usual", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_torchs_default_type_changes_nothing(kind: Weights, usual: torch.dtype) -> None:
    """transformers sets it while it loads a model, for all threads."""
    torch.manual_seed(0)
    weight, x = randn(64, 2 * GROUP), randn(5, 2 * GROUP)
    product = Product(weight, None, kind)
    expected, noise = product(x), sampling.exponentials(1, 0, 0, 9)
    logits, outputs, mixed = randn(300), randn(300, 16), randn(16)
    probs = torch.empty(300)
    place = sampling.draw_after(logits, outputs, mixed, 0.7, 0.3, probs)
    torch.set_default_dtype(usual)
    try:
        assert torch.equal(product(x), expected)
        assert torch.equal(Product(weight, None, kind)(x), expected)
        found = sampling.exponentials(1, 0, 0, 9)
        again = torch.empty(300, dtype=torch.float32)
        assert sampling.draw_after(logits, outputs, mixed, 0.7, 0.3, again) == place
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, noise)
    assert torch.equal(again, probs)
