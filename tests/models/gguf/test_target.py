"""Targets from GGUF files: same tokens as transformers, on the weights that the package decodes; and what is refused."""

import builtins
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFEndian, GGUFWriter
from transformers import PreTrainedModel

from tests.models.gguf.converted import random_model
from tests.models.gguf.files import (
    HALVES,
    bpe_tokenizer,
    decoded,
    fill,
    finish,
    write_model,
)
from tests.tiny import greedy
from volley import Engine, SamplingParams
from volley.errors import CheckpointError, ConfigError, UnsupportedModelError
from volley.models.drafters.export import TargetEnds, TargetShape
from volley.models.gguf import file
from volley.models.gguf.file import GGUFFile, is_gguf
from volley.models.gguf.header import read_header
from volley.models.gguf.model import load_model
from volley.models.gguf.tokens import stop_tokens
from volley.models.targets.sampling_defaults import sampling_defaults
from volley.models.targets.target import Target

PROMPTS = [[5, 9, 17, 33, 8], list(range(40, 75))]


def answers(path: Path, dtype: torch.dtype = torch.float32) -> list[list[int]]:
    engine = Engine(Target(load_model(path, dtype)))
    return [result.token_ids for result in engine.generate(PROMPTS, SamplingParams(max_tokens=30))]


def expected(model: PreTrainedModel) -> list[list[int]]:
    return [greedy(model, prompt, 30) for prompt in PROMPTS]


def test_a_file_whose_queries_are_not_interleaved_is_another_model(tmp_path: Path) -> None:
    model = random_model("llama")
    path = write_model(tmp_path / "model.gguf", model, "qwen3", keys={"attention.key_length": None})
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"llama"))  # its writer left the rows as they are
    assert answers(path) != expected(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K", "IQ4_XS", "mixed"])
def test_quantised_files_are_what_the_package_decodes(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    wide = (
        {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
        if kind in HALVES or kind == "mixed"
        else {}
    )
    model = random_model("llama", **wide)
    chosen: Any = kind if kind != "mixed" else lambda name: "Q6_K" if "ffn_down" in name else "Q4_K"
    path = write_model(tmp_path / "model.gguf", model, "llama", chosen)
    fill(model, "llama", decoded(path))
    with caplog.at_level(logging.WARNING, "volley"):
        assert answers(path) == expected(model)
    assert ("are decoded to float32" in caplog.text) == (kind not in ("F16", "BF16"))


def test_bf16_weights_are_not_touched(tmp_path: Path) -> None:
    model = random_model("qwen3").bfloat16()
    loaded = load_model(write_model(tmp_path / "model.gguf", model, "qwen3", "BF16"), torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("F16", "weights of type F16 are rounded to bfloat16"),
        ("F32", "weights of type F32 are rounded to bfloat16"),
        ("Q6_K", "weights of type Q6_K are decoded to bfloat16"),
        ("BF16", ""),
    ],
)
def test_what_loses_bits_is_told(tmp_path: Path, kind: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(
        tmp_path / "model.gguf", random_model("llama", hidden_size=256, intermediate_size=256), "llama", kind
    )
    with caplog.at_level(logging.WARNING, "volley"):
        load_model(path, torch.bfloat16)
    assert [record.getMessage() for record in caplog.records] == [f"{path}: {said}"] * bool(said)


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
    ],
)
def test_scaled_positions(tmp_path: Path, keys: dict[str, Any], rope: dict[str, Any]) -> None:
    model = random_model("qwen2", rope_parameters={"rope_theta": 20_000.0, **rope})
    assert answers(write_model(tmp_path / "model.gguf", model, "qwen2", keys=keys)) == expected(model)


@pytest.mark.slow
def test_llama_3_scales_its_frequencies_by_a_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    model, plain = random_model("llama", rope_parameters=rope), random_model("llama")
    scaled = model.get_submodule("model.rotary_emb").get_buffer("inv_freq")
    factors = plain.get_submodule("model.rotary_emb").get_buffer("inv_freq") / scaled
    path = write_model(tmp_path / "model.gguf", model, "llama", extra={"rope_freqs.weight": factors})
    assert answers(path) == expected(model)
    assert answers(path) != expected(plain)


def test_every_way_to_load_a_target_takes_a_file(tmp_path: Path) -> None:
    model = random_model("qwen3")
    path = write_model(tmp_path / "model.gguf", model, "qwen3", tokenizer=bpe_tokenizer())
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (result,) = Engine.from_pretrained(str(path), dtype=torch.float32).generate("the tar", params)
    assert result.token_ids == greedy(model, bpe_tokenizer()("the tar")["input_ids"], 8)
    shape = TargetShape.from_pretrained(path)
    assert (shape.hidden_size, shape.num_layers, shape.architectures) == (64, 3, ("Qwen3ForCausalLM",))
    assert torch.equal(TargetEnds.from_pretrained(path).head, model.get_parameter("lm_head.weight"))
    renamed = path.rename(tmp_path / "model")
    assert is_gguf(renamed)
    assert not is_gguf(tmp_path)
    assert not is_gguf("org/name")


def test_sampling_defaults_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_header = GGUFWriter.write_header_to_file

    def with_sampling(writer: GGUFWriter, *args: Any) -> None:
        for name, value in (("temp", 0.6), ("top_p", 0.95), ("penalty_repeat", 1.1)):
            writer.add_float32(f"general.sampling.{name}", value)
        writer.add_int32("general.sampling.top_k", 20)
        write_header(writer, *args)

    monkeypatch.setattr(GGUFWriter, "write_header_to_file", with_sampling)
    model = load_model(write_model(tmp_path / "model.gguf", random_model("llama"), "llama"), torch.float32)
    own = {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1, "top_k": 20}
    assert sampling_defaults(model.generation_config) == own


def test_a_header_is_read_once_and_again_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = tmp_path / "model.gguf", list[Path]()
    write_model(path, random_model("qwen3"), "qwen3", tokenizer=bpe_tokenizer())
    monkeypatch.setattr(file, "read_header", lambda path: reads.append(path) or read_header(path))
    monkeypatch.setattr(gguf, "GGUFReader", None)  # transformers is not to look for it either
    Engine.from_pretrained(str(path))
    assert reads == [path]
    write_model(path, random_model("qwen3", num_hidden_layers=2), "qwen3", tokenizer=bpe_tokenizer())
    assert len(Target.from_pretrained(path).kv_shapes) == 2
    assert reads == [path, path]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"general.architecture": b"mamba"},
            UnsupportedModelError,
            "architecture 'mamba'; volley reads .* llama, qwen2",
        ),
        ({"qwen3.block_count": None}, CheckpointError, "has no key qwen3.block_count"),
        ({"qwen3.rope.dimension_count": 8}, UnsupportedModelError, "rope.dimension_count is 8 with heads of 24"),
        (
            {"split.count": 3},
            CheckpointError,
            r"is one of 3 parts of a model, .* found by their names.*-00001-of-00003.gguf",
        ),
        (
            {"qwen3.attention.scale": 0.5},
            UnsupportedModelError,
            r"qwen3.attention.scale is 0.5, which .* does not read this key",
        ),
        (
            {"llama.expert_count": 8},
            UnsupportedModelError,
            "llama model with experts, such as Mixtral; of these volley reads",
        ),
        ({"qwen3.rope.scaling.type": "longrope"}, UnsupportedModelError, "by 'longrope'; none, linear and yarn"),
        (
            {"qwen3.rope.scaling.attn_factor": 1.25},
            UnsupportedModelError,
            r"rope\.scaling\.attn_factor is 1\.25, which is",
        ),
        ({"qwen3.rope.scaling.yarn_ext_factor": 0.5}, UnsupportedModelError, r"yarn_ext_factor is 0\.5, which is not"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, change: dict[str, Any], error: Any, message: str) -> None:
    ((key, value),) = change.items()
    keys = {} if value == b"mamba" else {key.removeprefix("qwen3."): value}
    family = "llama" if "llama" in key else "qwen3"
    keys = {name.removeprefix("llama."): number for name, number in keys.items()}
    path = write_model(tmp_path / "model.gguf", random_model(family), family, keys=keys)
    if value == b"mamba":
        path.write_bytes(path.read_bytes().replace(b"qwen3", b"mamba"))
    with pytest.raises(error, match=message):
        Target.from_pretrained(path)


def test_a_tensor_without_a_place_and_one_that_is_missing(tmp_path: Path) -> None:
    model = random_model("qwen3")
    surplus = {"blk.0.attn_sinks.weight": torch.zeros(4)}
    with pytest.raises(
        UnsupportedModelError, match=r"tensor blk\.0\.attn_sinks\.weight, for which Qwen3ForCausalLM has no"
    ):
        load_model(write_model(tmp_path / "one.gguf", model, "qwen3", extra=surplus), torch.float32)
    bias = {"blk.0.attn_q.bias": torch.zeros(96)}
    with pytest.raises(CheckpointError, match=r"has unknown model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_model(write_model(tmp_path / "two.gguf", model, "qwen3", extra=bias), torch.float32)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.3\.input_layernorm\.weight"):
        load_model(write_model(tmp_path / "three.gguf", model, "qwen3", keys={"block_count": 4}), torch.float32)


def test_damaged_files(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", random_model("qwen3"), "qwen3")
    whole = path.read_bytes()
    for length in (3, 20, 300, 2000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.gguf (is truncated or damaged|is not a GGUF file)"):
            Target.from_pretrained(path)
    path.write_bytes(b"PK\x03\x04" + whole)
    with pytest.raises(CheckpointError, match="is not a GGUF file: it does not begin with GGUF"):
        Target.from_pretrained(path)
    with pytest.raises(CheckpointError, match=r"absent\.gguf cannot be read \(No such file"):
        Target.from_pretrained(tmp_path / "absent.gguf")


def test_a_type_of_tensor_that_the_package_does_not_know_is_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", random_model("qwen3"), "qwen3")
    whole = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    kind = whole.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and two of them
    assert int.from_bytes(whole[kind : kind + 4], "little") in (0, 1, 30), "F32, F16 or BF16"
    whole[kind : kind + 4] = (99).to_bytes(4, "little")
    path.write_bytes(whole)
    with pytest.raises(UnsupportedModelError, match=r"tensor of type 99, which the package gguf .*pip install -U gguf"):
        Target.from_pretrained(path)


@pytest.mark.slow
def test_any_part_stands_for_the_whole_model(tmp_path: Path) -> None:
    model, tokenizer = random_model("qwen3"), bpe_tokenizer()
    first = write_model(tmp_path / "model.gguf", model, "qwen3", tokenizer=tokenizer, tensors_a_part=13)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert (len(parts), parts[0]) == (3, first)
    for part in parts:
        assert answers(part) == expected(model)
        target = Target.from_pretrained(part, dtype=torch.float32)
        assert target.tokenizer("the then")["input_ids"] == tokenizer("the then")["input_ids"]
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf is not beside it; fetch every part"):
        load_model(parts[2], torch.float32)


def test_a_file_without_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", random_model("qwen3"), "qwen3")
    with pytest.raises(CheckpointError, match="holds no tokenizer; convert the model again"):
        Target.from_pretrained(path)


def test_without_the_package_the_error_names_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def absent(name: str, *rest: Any, **named: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match="install it: pip install gguf"):
        GGUFFile(tmp_path / "model.gguf")


def test_control_tokens_that_end_a_text_are_found_by_their_spelling(tmp_path: Path) -> None:
    """The file names one of them."""
    tokenizer = bpe_tokenizer()
    path = write_model(tmp_path / "model.gguf", random_model("llama"), "llama", "Q8_0", tokenizer=tokenizer)
    ends = sorted(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
    assert stop_tokens(GGUFFile(path)) == ends
    for target in (Target(load_model(path, torch.float32)), Target.from_pretrained(path)):
        assert sorted(target.stop_token_ids) == ends


def test_a_file_of_the_other_byte_order_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), dtype=np.float32))
    finish(writer)
    with pytest.raises(UnsupportedModelError, match="other byte order; convert it"):
        GGUFFile(tmp_path / "model.gguf")
