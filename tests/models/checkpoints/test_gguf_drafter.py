"""Drafters in llama.cpp's file: what is written is read again, and what its layout says. ``tests/llamacpp`` runs them there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import AutoTokenizer

from tests.models.gguf.converted import random_model
from tests.models.gguf.files import bpe_tokenizer, decoded, write_model
from tests.tiny import random_drafter
from volley.errors import CheckpointError, ConfigError, UnsupportedModelError
from volley.models.checkpoints.checkpoint import Checkpoint, HeadConfig
from volley.models.checkpoints.formats import read_checkpoint
from volley.models.checkpoints.gguf_drafter import write_gguf
from volley.models.diagnosis import diagnose
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import export

TARGET = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 300}  # more rows than the tokenizer has tokens
SHAPE: dict[str, Any] = {"vocab_size": 300}
HEAD_DIM = random_drafter().config.head_dim
SLIDING = {"sliding_window": 8, "layer_types": ("sliding_attention", "full_attention")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    random_model("qwen3", **TARGET).save_pretrained(path)
    bpe_tokenizer().save_pretrained(path)
    return path


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def saved(path: Path, **changes: Any) -> Path:
    random_drafter(**{**SHAPE, **changes}).save_pretrained(path)
    return path


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    """But for the target's depth, which the file does not hold."""
    ours, theirs = vars(one.config), vars(other.config)
    assert {**ours, "num_target_layers": None} == {**theirs, "num_target_layers": None}
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        SLIDING,
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": YARN},
        {"rope_scaling": {**YARN, "beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 1.25}},
        {"draft_vocab_size": 20},
        {"final_logit_softcapping": 30.0},
        {"head": HeadConfig(type="dspark", rank=5)},
        {"head": HeadConfig(type="dspark", rank=5), "sample_from_anchor": True, "draft_vocab_size": 20},
    ],
)
def test_a_round_trip_changes_nothing(tmp_path: Path, folder: Path, changes: dict[str, Any]) -> None:
    source, file = saved(tmp_path / "own", **changes), tmp_path / "drafter.gguf"
    export(source, file, "gguf", target=str(folder))
    assert_same(read_checkpoint(file), read_checkpoint(source))
    found = diagnose(file, str(folder))
    assert (found.title, found.problems) == ("a DFlash drafter in GGUF", [])
    drafters = (Drafter.from_pretrained(path) for path in (file, source))
    for one, other in zip(*(drafter.state_dict().values() for drafter in drafters), strict=True):
        assert torch.equal(one, other)


def test_a_file_that_says_that_the_anchor_drafts(tmp_path: Path, folder: Path) -> None:
    """Forks of llama.cpp write such files; volley does not, because llama.cpp itself drafts from masks alone."""
    checkpoint, file = read_checkpoint(saved(tmp_path / "own", sample_from_anchor=True)), tmp_path / "drafter.gguf"
    write_gguf(file, checkpoint, str(folder), AutoTokenizer.from_pretrained(folder))
    found = read_checkpoint(file).config
    assert (found.block_size, found.sample_from_anchor, found.head) == (6, True, None)


def test_the_layout_that_llama_cpp_reads(tmp_path: Path, folder: Path) -> None:
    source = saved(tmp_path / "own", head=HeadConfig(type="dspark", rank=5), draft_vocab_size=20)
    export(source, tmp_path / "drafter.gguf", "gguf", target=str(folder))
    reader = GGUFReader(tmp_path / "drafter.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "dflash"
    assert (fields["dflash.block_size"], fields["dflash.target_layers"]) == (6, [1, 3])
    assert fields["dflash.sample_from_anchor"] is fields["dflash.has_confidence_head"] is False
    assert fields["tokenizer.ggml.mask_token_id"] == 3
    assert len(fields["tokenizer.ggml.tokens"]) == 300
    types = {tensor.name: (tensor.tensor_type.name, list(tensor.shape)) for tensor in reader.tensors}
    assert types["fc.weight"] == ("BF16", [64, 32])
    assert types["enc.output_norm.weight"] == ("F32", [32])
    assert types["markov_w1.weight"] == ("BF16", [5, 300])
    assert types["markov_w2.weight"] == ("BF16", [5, 20])
    assert types["output.weight"] == ("BF16", [32, 20])
    assert types["d2t"] == ("I64", [20])
    attention = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"]
    names = [*attention, "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    assert {name for name in types if name.startswith("blk.1.")} == {f"blk.1.{name}.weight" for name in names}


def test_the_tokens_of_a_target_in_gguf_are_copied(tmp_path: Path, folder: Path) -> None:
    target = write_model(tmp_path / "target.gguf", random_model("qwen3", **TARGET), "qwen3", tokenizer=bpe_tokenizer())
    export(saved(tmp_path / "own"), tmp_path / "drafter.gguf", "gguf", target=str(target))
    theirs, own = (GGUFReader(path).fields for path in (target, tmp_path / "drafter.gguf"))
    names = [name for name in theirs if name.startswith("tokenizer.")]
    assert len(names) > 5
    for name in names:
        assert own[name].contents() == theirs[name].contents(), name
        assert own[name].types == theirs[name].types, name


def test_a_trained_markov_head_becomes_the_tables_of_its_corrections(tmp_path: Path, folder: Path) -> None:
    source = saved(tmp_path / "own", head=HeadConfig(type="markov", rank=5))
    drafter, target = Drafter.from_pretrained(source, torch.float32), random_model("qwen3", **TARGET)
    export(source, tmp_path / "drafter.gguf", "gguf", target=str(folder))
    tensors = decoded(tmp_path / "drafter.gguf")
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    state = torch.randn(32)
    for before in (0, 7, 299):
        corrected = drafter.head(state[None], embedding[before][None])[0]  # type: ignore[misc]
        bias = tensors["markov_w2.weight"] @ tensors["markov_w1.weight"][before]
        torch.testing.assert_close(bias, output @ (corrected - state), rtol=0.02, atol=0.005)
        assert bias.abs().max() > 0.2
    for form in ("speculators", "gguf"):
        with pytest.raises(ConfigError, match="becomes tables of the target's tokens; give target"):
            export(source, tmp_path / "other", form)  # type: ignore[arg-type]


def test_what_has_no_place_in_the_file(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="the file names the target's tokens; give target"):
        export(saved(tmp_path / "own"), tmp_path / "drafter.gguf", "gguf")
    head = saved(tmp_path / "head", head=HeadConfig(type="residual", rank=4))
    with pytest.raises(ConfigError, match=r"head \(residual\) has no place there; --drop-head .*--head markov"):
        export(head, tmp_path / "drafter.gguf", "gguf", target=str(folder))
    export(head, tmp_path / "drafter.gguf", "gguf", target=str(folder), drop_head=True)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = saved(tmp_path / "scaled", rope_scaling={**llama3, "original_max_position_embeddings": 64})
    with pytest.raises(ConfigError, match="cannot scale rotary positions by 'llama3'"):
        export(scaled, tmp_path / "drafter.gguf", "gguf", target=str(folder))


def test_files_that_are_no_drafter(tmp_path: Path, folder: Path) -> None:
    target = write_model(tmp_path / "target.gguf", random_model("qwen3"), "qwen3")
    with pytest.raises(UnsupportedModelError, match="of architecture 'qwen3', not a drafter of 'dflash'"):
        Drafter.from_pretrained(target)
    assert diagnose(target).of_target
    export(saved(tmp_path / "own"), tmp_path / "drafter.gguf", "gguf", target=str(folder))
    file = tmp_path / "drafter.gguf"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"blk.1.ffn_down", b"blk.1.ffn_dawn"))
    with pytest.raises(CheckpointError, match=r"has unknown blk\.1\.ffn_dawn\.weight"):
        Drafter.from_pretrained(file)
    file.write_bytes(whole.replace(b"tokenizer.ggml.mask_token_id", b"tokenizer.ggml.mosk_token_id"))
    with pytest.raises(CheckpointError, match="names no tokens or no mask token"):
        Drafter.from_pretrained(file)
    file.write_bytes(whole[:-5000])
    with pytest.raises(CheckpointError, match="is truncated or damaged"):
        Drafter.from_pretrained(file)


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("hidden_activation", "silu", "gelu_pytorch_tanh"),
        ("embedding_scale", 1.0, 5.5),
        ("logit_scale", 1.0, 0.5),
        ("attention.scale", HEAD_DIM**-0.5, 1.0),
        ("attention.value_scale", 1.0, 0.5),
        ("rope.dimension_count", HEAD_DIM, HEAD_DIM // 2),
        ("rope.scaling.attn_factor", 1.0, 1.2),
    ],
)
def test_what_others_drafters_compute_otherwise_is_refused(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, neutral: Any, other: Any
) -> None:
    source, file = saved(tmp_path / "own"), tmp_path / "drafter.gguf"
    add = {str: GGUFWriter.add_string, int: GGUFWriter.add_uint32, float: GGUFWriter.add_float32}[type(other)]
    for value in (neutral, other):
        monkeypatch.setattr(GGUFWriter, "add_name", lambda writer, _, value=value: add(writer, f"dflash.{key}", value))
        export(source, file, "gguf", target=str(folder))
        if value == neutral:
            read_checkpoint(file)
    with pytest.raises(UnsupportedModelError, match=rf"{key} is {other!r}"[:-1]):
        read_checkpoint(file)


def test_a_vocabulary_that_is_none_is_refused(tmp_path: Path, folder: Path) -> None:
    export(saved(tmp_path / "own", draft_vocab_size=20), tmp_path / "drafter.gguf", "gguf", target=str(folder))
    whole, places = (
        (tmp_path / "drafter.gguf").read_bytes(),
        next(tensor for tensor in GGUFReader(tmp_path / "drafter.gguf").tensors if tensor.name == "d2t"),
    )
    for value, said in ((300, "outside the vocabulary of 300"), (int(places.data[1]), "names a token twice")):
        wrong = bytearray(whole)
        wrong[places.data_offset : places.data_offset + 8] = value.to_bytes(8, "little")
        (tmp_path / "wrong.gguf").write_bytes(wrong)
        with pytest.raises(CheckpointError, match=said):
            Drafter.from_pretrained(tmp_path / "wrong.gguf")
        assert any(said in problem for problem in diagnose(tmp_path / "wrong.gguf").problems)


def test_parameters_of_a_scaling_that_the_file_cannot_hold_are_named(tmp_path: Path, folder: Path) -> None:
    yarn = {**YARN, "mscale": 0.7}
    with pytest.raises(ConfigError, match="no place for mscale of rope_scaling"):
        export(saved(tmp_path / "own", rope_scaling=yarn), tmp_path / "drafter.gguf", "gguf", target=str(folder))
