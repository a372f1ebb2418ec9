"""Experts of quantised GGUF files on the kernels' codes, against each expert as dense layers in the same codes."""

import logging
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.gguf.converted import EVERY, random_model
from tests.models.gguf.files import write_matrices
from tests.models.gguf.test_codes import check_drafts_change_nothing
from tests.tiles import LEVELS, kernels_of, needs_kernels
from volley import Engine, native
from volley.errors import ConfigError
from volley.models.gguf.codes import codes_for, describe, held_bytes
from volley.models.gguf.file import GGUFFile
from volley.models.gguf.model import FileCodes, load_model, open_model
from volley.models.layers.accelerate import accelerate, weight_bytes
from volley.models.layers.fingerprint import target_fingerprint
from volley.models.layers.fused import FusedLayer
from volley.models.layers.host_memory import MappedFiles
from volley.models.layers.routed import GatedExperts
from volley.models.targets.target import Target
from volley.native import Product, Weights
from volley.native.decoder import ChosenExperts
from volley.weights import BY_GRID, OF_FILES

pytestmark = needs_kernels
PROMPT = list(range(40, 75))
HIDDEN, ROUTED = {"hidden_size": 256, "num_hidden_layers": 2}, {"moe_intermediate_size": 256}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3moe": {**HIDDEN, **ROUTED, "head_dim": 64},
    "gpt-oss": {**HIDDEN, "intermediate_size": 256},
    "qwen2moe": {**HIDDEN, **ROUTED, "shared_expert_intermediate_size": 256},
    "deepseek2": {**HIDDEN, **ROUTED, **LATENT},
    "deepseek3": {**HIDDEN, **ROUTED, **LATENT},
    "qwen3next": {"hidden_size": 256, **ROUTED, "shared_expert_intermediate_size": 256},
    "qwen35moe": {"hidden_size": 256, **ROUTED, "shared_expert_intermediate_size": 256},
}
"""Sizes that are whole blocks of every type."""
FUSED = ("qwen3moe", "gpt-oss")
PARTS = ("gate", "up", "down")
MIXED = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q5_0", "ffn_down_exps": "Q6_K"}
Kind = str | Callable[[str], str]
KINDS: dict[str, Kind] = {
    **{kind: kind for kind in ("Q8_0", "Q4_K", "Q6_K", "MXFP4")},
    "IQ2_XS": "IQ2_XS",
    "mixed": lambda name: next((kind for part, kind in MIXED.items() if part in name), "Q4_K"),
}


def write(folder: Path, family: str, kind: Kind, **changes: Any) -> Path:
    model = random_model(family, **{**FAMILIES[family], **changes})
    return write_matrices(folder / "model.gguf", model, EVERY[family][0], kind)


def loaded(path: Path, weights: Weights | None = None) -> Target:
    """A target without a tokenizer."""
    kind = weights or codes_for(GGUFFile(path))
    model, unread = open_model(path, torch.bfloat16, kind)
    accelerate(model, kind, release=True, fill=unread.fill)
    return Target(model)


def layers_of(target: Target) -> list[tuple[int, nn.Module, Any]]:
    """Layers with experts: their numbers and experts, and what holds the products."""
    found: list[tuple[int, nn.Module, Any]] = []
    for index, layer in enumerate(target.model.get_submodule("model.layers").children()):
        experts, fused = dict(layer.named_modules()).get("mlp.experts"), vars(layer).get("forward")
        if isinstance(fused, FusedLayer):
            found.append((index, layer.get_submodule("mlp.experts"), fused.weights))
        elif experts is not None:
            own = vars(experts)["forward"]
            assert isinstance(own, ChosenExperts)
            found.append((index, experts, own))
    return found


def tensors_of(layer: int) -> list[str]:
    return [f"blk.{layer}.ffn_{part}_exps.weight" for part in PARTS]


def numbers(product: Product) -> Tensor:
    return torch.cat([codes.dense() for codes in product.codes()])


class OneByOne:
    """Experts one by one, each as three dense layers in the codes of the file: the reference."""

    def __init__(self, path: Path, layer: int, experts: Any) -> None:
        is_clamped = hasattr(experts, "alpha")
        self.activation = native.Activation("clamped", experts.alpha, experts.limit) if is_clamped else native.SILU
        file, known = GGUFFile(path), GatedExperts(experts, self.activation)
        biases = {name: known.bias(f"{name}_proj") for name in ("gate_up", "down")}
        self.experts: list[list[Product]] = []
        for expert in range(known.number):
            layers = []
            for name, tensor in zip(PARTS, tensors_of(layer), strict=True):
                codes = FileCodes(file, MappedFiles(), tensor, OF_FILES[file.type(tensor)], expert=expert)
                (_, *shape), of_all = file.shape(tensor), biases["down" if name == "down" else "gate_up"]
                place, size = expert if name == "down" else 2 * expert + (name == "up"), shape[0]
                bias = None if of_all is None else of_all[place * size : (place + 1) * size]
                layers.append(Product(torch.empty(shape, device="meta"), bias, "int8", [(codes, size)]))
            self.experts.append(layers)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros(x.shape)
        for token, row in enumerate(x.split(1)):
            chosen = sorted(zip(ids[token].tolist(), weights[token].float(), strict=True), key=lambda pair: pair[0])
            for expert, weight in chosen:
                gate, up, down = self.experts[expert]
                active = native.gated(torch.cat((gate(row), up(row)), dim=1), self.activation)
                found[token] += (down(active)[0].float() * weight).bfloat16().float()
        return found.bfloat16()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_codes_and_memory_are_those_of_the_file(
    tmp_path: Path, family: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, family, KINDS[kind])
    with caplog.at_level(logging.WARNING, "volley"):
        target = loaded(path)
    assert "stay bf16" not in caplog.text
    file, found = GGUFFile(path), layers_of(target)
    assert (target.fused is not None) == (family in FUSED)
    assert len(found) == target.num_layers - family.startswith("deepseek")
    stored = counted = held = 0
    for layer, _, own in found:
        names = tensors_of(layer)
        gate, up, down = map(file.dense, names)
        assert torch.equal(numbers(own.gate_up), torch.cat((gate, up), dim=1).flatten(0, 1))
        assert torch.equal(numbers(own.down), down.flatten(0, 1))
        gate_of, up_of, down_of = (OF_FILES[file.type(name)] for name in names)
        assert set(own.gate_up.formats) == {gate_of, up_of}
        assert set(own.down.formats) == {down_of}
        stored += sum(file.place(name)[1] for name in names)
        counted += sum(prod(file.shape(name)) for name in names)
        held += own.gate_up.nbytes + own.down.nbytes
    if kind in BY_GRID:
        assert held == counted * BY_GRID[kind].held_bits / 8
        return
    assert stored <= held <= stored + counted * 0.6 / 8
    assert weight_bytes(target.model) < 1.2 * path.stat().st_size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_experts_compute_as_dense_layers_do(tmp_path: Path, family: str, kind: str) -> None:
    """To the bit, whichever experts a token has and how many tokens there are."""
    path = write(tmp_path, family, KINDS[kind])
    target = loaded(path)
    layer, experts, own = layers_of(target)[-1]
    slow = OneByOne(path, layer, experts)
    fast = ChosenExperts(own.gate_up, own.down, len(slow.experts), slow.activation) if family in FUSED else own
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(37, 256, generator=chance).bfloat16()
    ids, weights = torch.rand(37, len(slow.experts), generator=chance).topk(2)[1], torch.rand(37, 2, generator=chance)
    found = fast(x, ids, weights)
    assert torch.equal(found, slow(x, ids, weights))
    for level in LEVELS:
        with kernels_of(level):
            assert torch.equal(fast(x, ids, weights), found), level
    for begin, end in ((0, 1), (1, 6), (6, 37)):
        assert torch.equal(fast(x[begin:end], ids[begin:end], weights[begin:end]), found[begin:end])
    assert not len(fast(x[:0], ids[:0], weights[:0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_dense_layers(tmp_path: Path, family: str) -> None:
    """To the bit. Weights of the experts of fused layers are 1, as the kernel's exponential is not PyTorch's."""
    is_fused = family in FUSED
    chosen = {"qwen3moe": {"num_experts_per_tok": 1}, "gpt-oss": {"num_experts_per_tok": 1}}.get(family, {})
    path = write(tmp_path, family, KINDS["MXFP4" if family == "gpt-oss" else "mixed"], **chosen)
    target = loaded(path)
    expected = Engine(target).next_logits(PROMPT)
    target.fused = None  # its layers one by one
    for layer, experts, own in layers_of(target):
        slow = OneByOne(path, layer, experts)
        if not is_fused:
            experts.forward = slow  # type: ignore[assignment]
            continue

        def mix(x: Tensor, slow: OneByOne = slow, own: Any = own) -> Tensor:
            ids = own.routing.scores(x).argmax(dim=-1, keepdim=True)
            return slow(x, ids, torch.ones(ids.shape))

        vars(target.model.get_submodule(f"model.layers.{layer}"))["forward"].experts = mix
    assert torch.equal(Engine(target).next_logits(PROMPT), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_fingerprints_are_those_of_the_decoded_model(tmp_path: Path, family: str) -> None:
    path = write(tmp_path, family, KINDS["mixed"])
    assert target_fingerprint(loaded(path).model) == target_fingerprint(load_model(path, torch.bfloat16))


@pytest.mark.parametrize("family", FUSED)
def test_greedy_answers_are_those_of_plain_decoding(tmp_path: Path, family: str) -> None:
    check_drafts_change_nothing(loaded(write(tmp_path, family, KINDS["mixed"])), 30)


@pytest.mark.parametrize("family", ["qwen3moe", "qwen2moe", "gpt-oss"])
def test_codes_of_fewer_bits_may_be_asked_for(tmp_path: Path, family: str) -> None:
    """Experts of more bits are rounded again, and those of no more keep their codes."""
    path = write(tmp_path, family, lambda name: "Q4_K" if "ffn_down_exps" in name else "Q8_0")
    said = "Q4_K exact in int4 with minima, groups of 32; Q8_0 rounded again to int4, groups of 64"
    assert describe(GGUFFile(path), "int4") == said
    decoded = load_model(path, torch.bfloat16)
    for layer, _, own in layers_of(loaded(path, "int4")):
        assert [[of.name for of in product.formats] for product in (own.gate_up, own.down)] == [["int4"], ["Q4_K"]]
        experts = GatedExperts(decoded.get_submodule(f"model.layers.{layer}.mlp.experts"), native.SILU)
        rounded = Product(torch.cat(experts.rows("gate_up_proj")), None, "int4")
        assert torch.equal(own.gate_up.weight(), rounded.weight())


@pytest.mark.parametrize(("family", "rounded"), [("qwen3moe", "F16"), ("deepseek2", "F16 and Q8_0")])
def test_experts_of_other_types_are_rounded_to_eight_bits(tmp_path: Path, family: str, rounded: str) -> None:
    """So are projections of latents, which a file holds in another order."""
    path = write(tmp_path, family, lambda name: "F16" if "ffn_up_exps" in name else "Q8_0")
    said = f"Q8_0 exact in int8, groups of 32; {rounded} rounded again to int8, groups of 32"
    file = GGUFFile(path)
    assert describe(file, "int8") == said
    for layer, _, own in layers_of(loaded(path)):
        assert {of.name for of in own.gate_up.formats} == {"Q8_0"}
        gate, up = (file.dense(name) for name in tensors_of(layer)[:2])
        found = numbers(own.gate_up).view(len(gate), 2, *gate.shape[1:])
        assert torch.equal(found[:, 0], gate)
        assert 0 < (found[:, 1] - up).abs().max() <= 0.51 * up.abs().max() / 127


# -- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["bf16", "int4", "int8"])
def test_memory_is_known_from_the_header(tmp_path: Path, family: str, weights: Weights) -> None:
    path = write(tmp_path, family, KINDS["mixed"])
    found, held = held_bytes(GGUFFile(path), weights), weight_bytes(loaded(path, weights).model)
    assert 0.95 * held < found < 1.05 * held


@pytest.mark.parametrize("family", ["qwen3moe", "deepseek2"])
def test_a_file_that_does_not_fit_is_refused_before_it_is_read(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, family, KINDS["mixed"])
    codes, dense = (held_bytes(GGUFFile(path), weights) for weights in ("int4", "bf16"))
    monkeypatch.setattr("volley.models.gguf.model.memory_bytes", lambda _: 2**20)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(
        ConfigError, match=r"with int4 codes, need 0\.0 GiB of memory, .* has 0\.0; use a file of fewer"
    ):
        open_model(path, torch.bfloat16, "int4")
    monkeypatch.setattr("volley.models.gguf.model.memory_bytes", lambda _: (codes + dense) // 2)
    with pytest.raises(ConfigError, match=r"decoded to bfloat16, need .* in codes, as .* \(--weights auto.* they need"):
        open_model(path, torch.bfloat16)


def test_a_file_that_exceeds_the_free_memory_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "qwen3moe", "Q8_0")
    monkeypatch.setattr("volley.models.gguf.model.free_bytes", lambda: 2**20)
    with caplog.at_level(logging.WARNING, "volley"):
        open_model(path, torch.bfloat16, "int8")
    assert "need 0.0 GiB of memory, of which 0.0 are free now: the system may end this process" in caplog.text
