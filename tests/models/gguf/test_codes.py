"""Quantised GGUF files on the kernels' codes: which codes, whose numbers they are, and what is said."""

import logging
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.gguf.converted import random_model
from tests.models.gguf.files import VOCAB, bpe_tokenizer, write_model
from tests.tiles import needs_kernels
from tests.tiny import random_drafter
from volley import Engine, SamplingParams
from volley.errors import CheckpointError
from volley.models.gguf.codes import codes_for, describe
from volley.models.gguf.file import GGUFFile
from volley.models.gguf.model import load_model, open_model
from volley.models.gguf.target import row_order
from volley.models.layers.accelerate import accelerate, weight_bytes
from volley.models.layers.fingerprint import target_fingerprint
from volley.models.layers.fused import FusedLayer
from volley.models.layers.host_memory import MappedFiles
from volley.models.targets.target import Target
from volley.native import Product, Weights
from volley.weights import OF_FILES, STORED

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
MIXED = "Q4_K and Q6_K"
PROMPT = list(range(40, 75))
JOINED: dict[str, tuple[str, ...]] = {
    "attn_q": ("attn_q", "attn_k", "attn_v"),
    "attn_output": ("attn_output",),
    "ffn_gate": ("ffn_gate", "ffn_up"),
    "ffn_down": ("ffn_down",),
}


def kinds(name: str) -> Any:
    return (lambda tensor: "Q6_K" if "ffn_down" in tensor else "Q4_K") if name == MIXED else name


def write(folder: Path, kind: str, family: str = "llama", **changes: Any) -> Path:
    model = random_model(family, **{**WIDE, **changes})
    return write_model(folder / "model.gguf", model, family, kinds(kind), tokenizer=bpe_tokenizer())


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        *(("Q8_0", "int8"), ("Q5_1", "int8"), ("Q4_1", "int4"), (MIXED, "int4"), ("Q2_K", "int4"), ("IQ1_M", "int4")),
        ("BF16", "bf16"),
    ],
)
def test_codes_are_chosen_by_the_type_of_most_weights(tmp_path: Path, kind: str, codes: str) -> None:
    assert codes_for(GGUFFile(write(tmp_path, kind))) == codes


def products(target: Target) -> dict[str, Product]:
    """The products that a target consists of, by GGUF's name of the first of their weights."""
    found: dict[str, Product] = {}
    for index, layer in enumerate(target.model.get_submodule("model.layers").children()):
        fused = vars(layer)["forward"]
        assert isinstance(fused, FusedLayer)
        for name, product in zip(JOINED, fused.weights.products, strict=True):
            found[f"blk.{index}.{name}.weight"] = product
    head = target.kept_head
    assert isinstance(head, Product)
    return {**found, "output.weight": head}


def numbers(path: Path, name: str, target: Target) -> Tensor:
    """Return the file's weights of a product, in fp32."""
    file, stem = GGUFFile(path), name.removesuffix(".weight")
    if name not in file.names:
        return file.dense("token_embd.weight")
    prefix, _, first = stem.rpartition(".")
    names = [f"{prefix}.{part}.weight" if prefix else name for part in JOINED.get(first, (first,))]
    return torch.cat([file.dense(one, row_order(file.architecture, one, target.model.config)) for one in names])


SAID = {
    "Q8_0": "int8, groups of 32",
    "Q5_0": "int5, groups of 32",
    "Q4_0": "int4, groups of 32",
    "Q5_1": "int5 with minima, groups of 32",
    "Q4_1": "int4 with minima, groups of 32",
    "Q6_K": "int6, groups of 16",
    "Q5_K": "int5 with minima, groups of 32",
    "Q4_K": "int4 with minima, groups of 32",
    "Q3_K": "int3, groups of 16",
    "Q2_K": "int2 with minima, groups of 16",
    "IQ4_NL": "int4 by a table, groups of 32",
    "IQ4_XS": "int4 by a table, groups of 32",
    "MXFP4": "int4 by a table, groups of 32",
    **dict.fromkeys(("IQ3_XXS", "IQ3_S"), "int4 by a table, groups of 32"),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"), "int3 by a table, groups of 16"),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), "int2, groups of 32"),
}


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
@pytest.mark.parametrize("kind", OF_FILES)
def test_products_have_the_numbers_of_the_file(
    tmp_path: Path, family: str, tied: bool, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, kind, family, tie_word_embeddings=tied)
    with caplog.at_level(logging.WARNING, "volley"):
        target = Target.from_pretrained(path)
    assert f"{kind} exact in {SAID[kind]}" in caplog.text
    assert "rounded" not in caplog.text
    for name, product in products(target).items():
        (found,) = product.codes()
        assert found.format == OF_FILES[kind]
        assert torch.equal(found.dense(), numbers(path, name, target)), name
    tokens, file = torch.tensor([3, 271, 3, 40]), GGUFFile(path)
    assert target.model.get_input_embeddings().weight.device.type == "meta", "rows are looked up in codes"
    assert torch.equal(target.embed(tokens), file.dense("token_embd.weight")[tokens].bfloat16())
    others = sum(weight.nbytes for weight in target.model.parameters() if weight.device.type != "meta")
    matrices = [name for name in file if len(file.shape(name)) > 1]
    numbers_of_them, stored = (
        sum(prod(file.shape(name)) for name in matrices),
        sum(file.place(name)[1] for name in matrices),
    )
    held = weight_bytes(target.model) - others
    if kind in STORED:
        assert stored <= held <= stored + numbers_of_them * 0.5 / 8
    else:
        assert held == numbers_of_them * OF_FILES[kind].held_bits / 8


GRIDS = {
    "attn_q": "IQ2_XS",
    "attn_k": "IQ2_S",
    "attn_v": "Q4_K",
    "attn_output": "IQ3_S",
    "ffn_gate": "IQ1_S",
    "ffn_up": "IQ2_XXS",
    "ffn_down": "IQ3_XXS",
    "token_embd": "TQ2_0",
}
"""As in IQ2_M, whose tensors have several types of fewer bits."""
MANY = {"attn_q": "Q5_0", "attn_k": "Q5_0", "attn_v": "Q8_0", "ffn_gate": "Q4_K", "ffn_up": "Q6_K", "ffn_down": "Q3_K"}
"""As in Q4_K_M: some values and down projections have more bits, and are one product with others."""
MIXES = {"grids": (GRIDS, "IQ1_M", ["IQ2", "Q4_K"]), "many": (MANY, "Q4_1", ["Q5_0", "Q8_0"])}


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_a_file_of_many_types_keeps_its_numbers(
    tmp_path: Path, family: str, tied: bool, mix: str, caplog: pytest.LogCaptureFixture
) -> None:
    kinds, usual, of_attention = MIXES[mix]

    def of_tensor(name: str) -> str:
        return next((kind for part, kind in kinds.items() if part in name), usual)

    model = random_model(family, **{**WIDE, "tie_word_embeddings": tied})
    path = write_model(tmp_path / "model.gguf", model, family, of_tensor, tokenizer=bpe_tokenizer())
    with caplog.at_level(logging.WARNING, "volley"):
        target = Target.from_pretrained(path)
    assert "rounded" not in caplog.text
    found = products(target)
    assert [of.name for of in found["blk.1.attn_q.weight"].formats] == of_attention
    for name, product in found.items():
        dense = torch.cat([codes.dense() for codes in product.codes()])
        assert torch.equal(dense, numbers(path, name, target)), name
    tokens = torch.tensor([3, 271, 3, 40])
    assert torch.equal(target.embed(tokens), GGUFFile(path).dense("token_embd.weight")[tokens].bfloat16())
    assert target_fingerprint(target.model) == target_fingerprint(load_model(path, torch.bfloat16))
    decoded = load_model(path, torch.float32)
    logits = [Engine(one).next_logits(PROMPT) for one in (Target(decoded), target)]
    assert (logits[1] - logits[0]).norm() < 0.05 * logits[0].norm()


@needs_kernels
@pytest.mark.parametrize("tied", [False, True])
def test_other_types_in_such_a_file_are_rounded_to_eight_bits(
    tmp_path: Path, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def of_tensor(name: str) -> str:
        is_other = name in ("blk.1.attn_v.weight", "output.weight") or (tied and "token_embd" in name)
        return "F16" if is_other else "Q4_0"

    model = random_model("qwen3", **{**WIDE, "tie_word_embeddings": tied})
    path = write_model(tmp_path / "model.gguf", model, "qwen3", of_tensor, tokenizer=bpe_tokenizer())
    with caplog.at_level(logging.WARNING, "volley"):
        target = Target.from_pretrained(path)
    assert "Q4_0 exact in int4, groups of 32; F16 rounded again to int8, groups of 32" in caplog.text
    queries_and_keys = (4 + 2) * 64
    for name, product in products(target).items():
        found, expected = torch.cat([codes.dense() for codes in product.codes()]), numbers(path, name, target)
        exact = {"blk.1.attn_q.weight": queries_and_keys, "output.weight": 0}.get(name, len(expected))
        assert torch.equal(found[:exact], expected[:exact])
        if exact < len(expected):
            error, most = found - expected, expected.view(len(expected), -1, 32).abs().amax(-1)
            assert 0 < error[exact:].abs().max() <= 0.51 * most.max() / 127


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "weights", "said"),
    [
        ("Q4_0", "int8", "Q4_0 exact in int4, groups of 32"),
        ("Q8_0", "int4", "Q8_0 rounded again to int4, groups of 64"),
        (MIXED, "int8", "Q4_K exact in int4 with minima, groups of 32; Q6_K exact in int6, groups of 16"),
    ],
)
def test_codes_of_another_kind_may_be_asked_for(tmp_path: Path, kind: str, weights: Weights, said: str) -> None:
    """A format with more bits than the file's keeps the file's own."""
    path = write(tmp_path, kind)
    assert describe(GGUFFile(path), weights) == said
    target = Target.from_pretrained(path, weights=weights)
    bits = [of.bits for product in products(target).values() for of in product.formats]
    assert max(bits) <= int(weights.removeprefix("int"))


def test_taps_of_convolutions_are_no_matrices(tmp_path: Path) -> None:
    extra = {"blk.0.shortconv.conv.weight": torch.zeros(256, 3)}
    path = write_model(tmp_path / "model.gguf", random_model("llama", **WIDE), "llama", "Q4_0", extra=extra)
    assert describe(GGUFFile(path), "int4") == "Q4_0 exact in int4, groups of 32"


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_rounded_is_the_decoded_model(tmp_path: Path, family: str, tied: bool) -> None:
    path = write(tmp_path, "Q6_K", family, tie_word_embeddings=tied)
    target = Target.from_pretrained(path, weights="int4")
    dense = load_model(path, torch.bfloat16)
    accelerate(dense, "int4", release=True)  # an embedding is then read from codes, too
    if tied:
        assert torch.equal(Engine(target).next_logits(PROMPT), Engine(Target(dense)).next_logits(PROMPT))
    else:
        assert torch.equal(
            products(target)["output.weight"].weight(), products(Target(dense))["output.weight"].weight()
        )


def check_drafts_change_nothing(target: Target, max_tokens: int) -> None:
    """Greedy answers with prompt lookup and with a drafter are those of plain decoding."""
    params = SamplingParams(max_tokens=max_tokens)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    drafter = random_drafter(
        **sizes, num_key_value_heads=2, vocab_size=VOCAB, num_target_layers=2, target_layer_ids=(0, 1)
    )
    prompts = [PROMPT * 3, PROMPT[:20], PROMPT]
    expected, *rest = (
        [result.token_ids for result in engine.generate(prompts, params)]
        for engine in (
            Engine(target, policy="fixed:1", max_running=1, exact=True),
            Engine(target, policy="goodput"),
            Engine(target, drafter.to(torch.bfloat16), policy="fixed", exact=True),
        )
    )
    assert rest == [expected, expected]


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", MIXED])
def test_greedy_answers_are_those_of_plain_decoding(tmp_path: Path, kind: str) -> None:
    check_drafts_change_nothing(Target.from_pretrained(write(tmp_path, kind, "qwen3")), 40)


@needs_kernels
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "of_head"), [("Q8_0", "Q8_0"), ("Q4_0", "Q6_K"), ("Q4_K", "Q6_K"), ("Q4_K", "Q4_K")])
def test_fingerprints_are_those_of_the_decoded_model(tmp_path: Path, tied: bool, kind: str, of_head: str) -> None:
    """Although a head and an embedding are never decoded as a whole."""

    def of_tensor(name: str) -> str:
        return of_head if name.startswith(("token_embd", "output.")) else kind

    model = random_model("llama", **{**WIDE, "tie_word_embeddings": tied})
    path = write_model(tmp_path / "model.gguf", model, "llama", of_tensor, tokenizer=bpe_tokenizer())
    expected = target_fingerprint(load_model(path, torch.bfloat16))
    assert target_fingerprint(Target.from_pretrained(path).model) == expected


def test_in_fp32_the_file_is_decoded(tmp_path: Path) -> None:
    path = write(tmp_path, "Q8_0")
    target = Target.from_pretrained(path, dtype=torch.float32)
    decoded = load_model(path, torch.float32)
    accelerate(decoded, release=True)  # norms are kernels
    assert torch.equal(Engine(target).next_logits(PROMPT), Engine(Target(decoded)).next_logits(PROMPT))


@needs_kernels
def test_pages_of_reordered_rows_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of Llama have the rows of queries and keys in another order; these are copied."""
    path, forgotten = write(tmp_path, "Q8_0", "llama"), set[int]()
    original = MappedFiles.forget_bytes

    def forget(files: MappedFiles, address: int, size: int) -> None:
        if files.covers(address, address + size):
            forgotten.add(address)
        original(files, address, size)

    monkeypatch.setattr(MappedFiles, "forget_bytes", forget)
    model, unread = open_model(path, torch.bfloat16, "int8")
    accelerate(model, "int8", release=True, fill=unread.fill)
    assert {unread._file.place(name)[0] for name in unread._file} <= forgotten


@needs_kernels
def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    model = random_model("qwen3", **WIDE)
    path = write_model(
        tmp_path / "model.gguf", model, "qwen3", "Q8_0", keys={"feed_forward_length": 256}, tokenizer=bpe_tokenizer()
    )
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.ffn_gate\.weight has shape \(512, 256\), where .* \(256, 256\)"
    ):
        open_model(path, torch.bfloat16, "int8")


@needs_kernels
def test_the_decoded_model_is_never_in_memory_whole(tmp_path: Path) -> None:
    path = write(tmp_path, "Q8_0", "qwen3", num_hidden_layers=8, tie_word_embeddings=True)
    model, unread = open_model(path, torch.bfloat16, "int8")
    layer = sum(weight.nbytes for weight in model.model.layers[0].parameters())
    sizes: list[int] = []

    def fill(module: nn.Module, /, *, coded: bool = True) -> None:
        unread.fill(module, coded=coded)
        sizes.append(sum(weight.nbytes for weight in model.parameters() if weight.device.type != "meta"))

    accelerate(model, "int8", release=True, fill=fill)
    assert len(sizes) == 8 + 2  # the layers, and the rest, twice; of the head its codes are read alone
    assert 0 < max(sizes) < 0.1 * layer  # of the layers too, so only norms are decoded


@needs_kernels
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_widths_of_half_a_group_keep_their_codes(tmp_path: Path, kind: str) -> None:
    """288 is the width of llama2.c's stories15M: a multiple of a file's blocks of 32, and of no 64."""
    heads = {"head_dim": 48, "num_attention_heads": 6, "num_key_value_heads": 6}
    path = write(tmp_path, kind, hidden_size=288, intermediate_size=352, **heads)
    target = Target.from_pretrained(path, dtype=torch.bfloat16)
    found = products(target)
    assert {of for product in found.values() for of in product.formats} == {STORED[kind]}
    torch.manual_seed(0)
    for name, product in found.items():
        dense = numbers(path, name, target)
        x = torch.randn(3, dense.shape[1]).bfloat16()
        expected = x.float() @ dense.T
        assert (product(x).float() - expected).norm() < 0.02 * expected.norm()
    engine = Engine(target, exact=True)
    plain = next(engine.generate(PROMPT, SamplingParams(max_tokens=20))).token_ids
    copies = Engine(target, policy="goodput", max_batch_tokens=7)
    assert next(copies.generate(PROMPT, SamplingParams(max_tokens=20))).token_ids == plain
