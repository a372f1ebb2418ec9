"""One rule, three implementations and their reference; and nothing leaks between blocks, documents or from behind the anchor."""

from collections.abc import Callable

import pytest
import torch

from volley.errors import ConfigError
from volley.train import attention
from volley.train.attention import ATTENTION, Layout, attend_grouped, attend_sdpa
from volley.train.learner import choose_attention
from volley.train.options import TrainConfig

from .dense import attend_dense, dense_mask

D, S, A, B, HEADS, KV_HEADS, DIM = 3, 13, 4, 3, 4, 2, 8


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE_SCORES", 2 * B * (S + B))
    monkeypatch.setattr(attention, "MASK_CELLS", 2 * A * B * (S + A * B))


def make_layout(window: int | None = None) -> Layout:
    anchors = torch.tensor([[0, 2, 5, 12], [1, 1, 6, 9], [3, 4, 0, 0]])
    return Layout(anchors, S, B, window)


def make_inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(1)
    shapes = [(D * S, KV_HEADS)] * 2 + [(D * A * B, HEADS)] + [(D * A * B, KV_HEADS)] * 2
    return [torch.randn(*shape, DIM, dtype=dtype).requires_grad_() for shape in shapes]


def outputs(name: str, layout: Layout, inputs: list[torch.Tensor]) -> torch.Tensor:
    context_keys, context_values, queries, keys, values = inputs
    attend = {**ATTENTION, "dense": attend_dense}[name]
    return attend(layout, [(context_keys, context_values)])(0, queries, keys, values)


@pytest.mark.parametrize("window", [None, 4])
def test_dense_mask_is_the_rule_spelled_out(window: int | None) -> None:
    layout = make_layout(window)
    mask = dense_mask(layout)
    assert mask.shape == (D * A * B, D * S + D * A * B)
    for row in range(D * A * B):
        document, block = row // (A * B), row // B
        anchor = int(layout.anchors[document, block % A])
        seen = {document * S + position for position in range(max(0, anchor - (window or S)), anchor)}
        seen |= {D * S + block * B + slot for slot in range(B)}
        assert set(mask[row].nonzero().flatten().tolist()) == seen


@pytest.mark.parametrize("fast", ["grouped", "sdpa"])
@pytest.mark.parametrize("window", [None, 4])
def test_fast_ones_equal_dense_in_output_and_gradients(window: int | None, fast: str) -> None:
    layout, inputs = make_layout(window), make_inputs()
    found = []
    for name in ("dense", fast):
        mixed = outputs(name, layout, inputs)
        weight = torch.linspace(-1, 1, mixed.numel()).view_as(mixed)
        found.append([mixed, *torch.autograd.grad((mixed * weight).sum(), inputs)])
    for reference, other in zip(*found, strict=True):
        torch.testing.assert_close(other, reference)


def test_grouped_in_bf16_stays_close() -> None:
    layout, inputs = make_layout(), make_inputs()
    rounded = [x.bfloat16() for x in inputs]
    torch.testing.assert_close(
        outputs("grouped", layout, rounded).float(), outputs("dense", layout, inputs), atol=0.05, rtol=0.05
    )


@pytest.mark.parametrize("window", [None, 4])
def test_flex_attentions_mask_function_is_the_same_rule(window: int | None) -> None:
    from torch.nn.attention.flex_attention import create_mask

    layout = make_layout(window)
    rows, keys = D * A * B, D * S + D * A * B
    made = create_mask(lambda b, h, q, k: layout.allowed(q, k), None, None, rows, keys, device="cpu")
    assert torch.equal(made[0, 0], dense_mask(layout))


def test_the_log_says_once_how_long_flex_attention_was_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "compiled_flex", [])
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *given, **options: given[0] + 1)
    assert [attention._flex_kernel()(place) for place in (1, 2)] == [2, 3]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "FlexAttention was compiled in 0 s"


def test_flex_attention_is_refused_where_it_does_not_train() -> None:
    config = TrainConfig(target="t", data=("d",), out="o", attention="flex")
    with pytest.raises(ConfigError, match="no backward pass on a CPU; train with attention='grouped' here"):
        choose_attention(config, torch.device("cpu"))
    assert choose_attention(config, torch.device("cuda")) == "flex"


@pytest.mark.parametrize("attend", [attend_dense, attend_grouped, attend_sdpa])
def test_nothing_leaks(attend: Callable[..., attention.Attend]) -> None:
    """Each input, changed by itself, changes exactly the blocks that may see it."""
    layout = make_layout()
    inputs = [x.detach() for x in make_inputs()]
    base = attend(layout, [tuple(inputs[:2])])(0, *inputs[2:]).view(D * A, B, HEADS, DIM)

    def changed_blocks(which: tuple[int, ...], rows: slice | int) -> set[int]:
        other = [x.clone() for x in inputs]
        for index in which:
            other[index][rows] += 1.0
        after = attend(layout, [tuple(other[:2])])(0, *other[2:]).view_as(base)
        return set((after != base).flatten(1).any(1).nonzero().flatten().tolist())

    for block in range(D * A):
        assert changed_blocks((2, 3, 4), slice(block * B, block * B + B)) == {block}
    for document in range(D):
        for position in range(S):
            may_see = {document * A + i for i in range(A) if int(layout.anchors[document, i]) > position}
            assert changed_blocks((0, 1), document * S + position) == may_see
