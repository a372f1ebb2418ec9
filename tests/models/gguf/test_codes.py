"""Quantised GGUF files on the kernels' codes: which codes, that they are those of the decoded model, and what is said."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.gguf.files import bpe_tokenizer, random_model, write_model
from tests.tiles import needs_kernels
from volley import Engine, SamplingParams
from volley.errors import CheckpointError
from volley.models.gguf.codes import codes_for, open_model
from volley.models.gguf.file import GGUFFile
from volley.models.gguf.target import load_model
from volley.models.layers.accelerate import accelerate
from volley.models.targets.target import Target
from volley.native import Weights

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
MIXED = "Q4_K and Q6_K"
PROMPT = list(range(40, 75))


def kinds(name: str) -> Any:
    return (lambda tensor: "Q6_K" if "ffn_down" in tensor else "Q4_K") if name == MIXED else name


def write(folder: Path, kind: str, family: str = "llama", **changes: Any) -> Path:
    model = random_model(family, **{**WIDE, **changes})
    return write_model(folder / "model.gguf", model, family, kinds(kind), tokenizer=bpe_tokenizer())


@pytest.mark.parametrize(
    ("kind", "codes"),
    [("Q8_0", "int8"), ("Q4_0", "int4"), (MIXED, "int4"), ("Q5_0", "bf16"), ("BF16", "bf16"), ("F32", "bf16")],
)
def test_codes_are_chosen_by_the_type_of_most_weights(tmp_path: Path, kind: str, codes: str) -> None:
    assert codes_for(GGUFFile(write(tmp_path, kind))) == codes


def test_experts_stay_bf16(tmp_path: Path) -> None:
    assert codes_for(GGUFFile(write(tmp_path, "Q8_0", "qwen3moe"))) == "bf16"


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "codes"), [("Q8_0", "int8"), ("Q4_0", "int4"), (MIXED, "int4")])
def test_the_codes_are_those_of_the_decoded_model(
    tmp_path: Path, family: str, tied: bool, kind: str, codes: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, kind, family, tie_word_embeddings=tied)
    with caplog.at_level(logging.WARNING, "volley"):
        target = Target.from_pretrained(path)
    scales = "a scale for each output" if codes == "int8" else "groups of 64"
    assert f"{kind} requantised to {codes}, {scales}" in caplog.text
    dense = load_model(path, torch.bfloat16)
    accelerate(dense, codes, release=True)  # a shared embedding is then read from codes, too
    assert torch.equal(Engine(target).next_logits(PROMPT), Engine(Target(dense)).next_logits(PROMPT))
    exact = Target.from_pretrained(path, weights="bf16")
    assert not torch.equal(Engine(exact).next_logits(PROMPT), Engine(target).next_logits(PROMPT))


@needs_kernels
def test_greedy_answers_are_those_of_plain_decoding(tmp_path: Path) -> None:
    path, params = write(tmp_path, "Q4_0", "qwen3"), SamplingParams(max_tokens=40)
    plain, fast = (Engine.from_pretrained(path, policy=policy) for policy in ("fixed:1", "goodput"))
    (expected,), (found,) = (list(engine.generate([PROMPT * 3], params)) for engine in (plain, fast))
    assert found.token_ids == expected.token_ids


def test_in_fp32_the_file_is_decoded(tmp_path: Path) -> None:
    path = write(tmp_path, "Q8_0")
    target = Target.from_pretrained(path, dtype=torch.float32)
    expected = Target(load_model(path, torch.float32))
    assert torch.equal(Engine(target).next_logits(PROMPT), Engine(expected).next_logits(PROMPT))


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

    def fill(module: nn.Module) -> None:
        unread.fill(module)
        sizes.append(sum(weight.nbytes for weight in model.parameters() if weight.device.type != "meta"))

    accelerate(model, "int8", release=True, fill=fill)
    assert len(sizes) == 1 + 8 + 1  # the head, the layers, and the rest
    assert 0 < max(sizes) < 1.1 * layer
