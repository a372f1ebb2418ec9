"""Drafters in other programs' formats: round trips, what a format cannot hold, and what can be wrong with a file."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import eagle
from tests.conftest import byte_tokenizer
from tests.models.drafters.test_eagle import SPECULATORS
from tests.tiny import VOCAB, drafter_config, eager_model, random_drafter, target_config
from volley.errors import CheckpointError, ConfigError, MismatchError, VolleyError
from volley.files import read_json
from volley.models.checkpoints.checkpoint import Checkpoint, HeadConfig
from volley.models.checkpoints.formats import Format, parse_config, read_checkpoint, write_checkpoint
from volley.models.diagnosis import diagnose
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.eagle import drafter_class
from volley.models.drafters.export import TargetEnds, TargetShape, export
from volley.tensors import load_tensors, save_tensors
from volley.train.shape import drafter_to_train_on

FORMATS: tuple[Format, ...] = ("zlab", "speculators", "sglang", "transformers")
SLIDING = {"sliding_window": 8, "layer_types": ("sliding_attention", "full_attention")}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("target")
    eager_model(target_config()).save_pretrained(path)
    return str(path)


def saved(folder: Path, **changes: Any) -> Path:
    random_drafter(**changes).save_pretrained(folder)
    return folder


def assert_equal(one: Checkpoint, other: Checkpoint) -> None:
    assert one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name]), name


def counts() -> list[int]:
    return [(7 * token) % VOCAB for token in range(VOCAB)]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "changes", [{}, SLIDING, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"draft_window": 512}]
)
def test_a_round_trip_changes_nothing(tmp_path: Path, form: Format, changes: dict[str, Any]) -> None:
    source = saved(tmp_path / "own", **changes)
    export(source, tmp_path / "theirs", form)
    assert_equal(read_checkpoint(tmp_path / "theirs"), read_checkpoint(source))
    export(tmp_path / "theirs", tmp_path / "back", "zlab")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    theirs, own = (Drafter.from_pretrained(tmp_path / name) for name in ("theirs", "own"))
    assert all(torch.equal(a, b) for a, b in zip(theirs.state_dict().values(), own.state_dict().values(), strict=True))


@pytest.mark.parametrize("form", ["zlab", "speculators"])
@pytest.mark.parametrize("size", [None, 20])
@pytest.mark.parametrize("with_embeddings", [False, True])
def test_round_trips_of_embedding_head_and_vocabulary(
    tmp_path: Path, target: str, form: Format, size: int | None, with_embeddings: bool
) -> None:
    options: dict[str, Any] = {"target": target, "with_embeddings": with_embeddings, "draft_vocab_size": size}
    written = export(saved(tmp_path / "own"), tmp_path / "one", form, counts=counts(), **options)
    assert_equal(read_checkpoint(tmp_path / "one"), written)
    other: Format = "zlab" if form == "speculators" else "speculators"
    export(tmp_path / "one", tmp_path / "two", other)
    export(tmp_path / "two", tmp_path / "three", form, target=target)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "three" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    ends = TargetEnds.from_pretrained(target)
    drafter = Drafter.from_pretrained(tmp_path / "one", torch.float32)
    assert (drafter.embed_tokens is not None) == with_embeddings
    if drafter.embed_tokens is not None:
        assert torch.equal(drafter.embed_tokens.weight, ends.embedding)
    for bare in ("sglang", "transformers"):  # what the target has is left out, and the drafter is the one it was
        export(tmp_path / "one", tmp_path / bare, bare, target=target)
        assert_equal(read_checkpoint(tmp_path / bare), read_checkpoint(tmp_path / "own"))


def test_the_speculators_layout(tmp_path: Path, target: str) -> None:
    export(saved(tmp_path / "own"), tmp_path, "speculators", target=target, draft_vocab_size=20, counts=counts())
    raw, tensors = read_json(tmp_path / "config.json"), load_tensors(tmp_path / "model.safetensors")
    assert raw["architectures"] == ["DFlashSpeculator"]
    assert raw["speculators_config"] == {
        "algorithm": "dflash",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": target, "architectures": ["Qwen3ForCausalLM"]},
    }
    assert (raw["aux_hidden_state_layer_ids"], raw["draft_vocab_size"], raw["block_size"]) == ([1, 3], 20, 6)
    assert raw["transformer_layer_config"]["vocab_size"] == VOCAB
    kept = torch.tensor(counts()).topk(20).indices.sort().values
    assert torch.equal(tensors["d2t"] + torch.arange(20), kept)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], kept)
    assert torch.equal(tensors["lm_head.weight"], TargetEnds.from_pretrained(target).head[kept])


def test_the_block_size_stands_where_old_and_new_readers_look(tmp_path: Path) -> None:
    raw = read_json(saved(tmp_path) / "config.json")
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 6
    assert "causal" not in raw["dflash_config"]
    assert read_json(saved(tmp_path, **SLIDING) / "config.json")["dflash_config"]["causal"] is False


def test_a_foreign_speculators_config_is_understood() -> None:
    config = drafter_config()
    raw = {
        **foreign(),
        "dflash_context_residual": False,
        "dflash2_selector_rank": 256,
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
    }
    found = parse_config(raw)
    assert found.num_target_layers is None
    assert found.target_layer_ids == config.target_layer_ids
    with pytest.raises(MismatchError, match="taps layer 2, this target has 2 layers"):
        found.check_target(hidden_size=32, vocab_size=VOCAB, num_layers=2)


def foreign() -> dict[str, Any]:
    """A config as the speculators library writes it, without what volley adds."""
    layers = {k: v for k, v in drafter_config().to_json().items() if k not in ("dflash_config", "block_size", "dtype")}
    del layers["num_target_layers"]
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": layers,
        "draft_vocab_size": VOCAB,
        "block_size": 6,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 3,
        "sample_from_anchor": False,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"speculators_model_type": "eagle"},
            "speculators_model_type is 'eagle'; volley reads 'dflash', 'dflash2', 'dspark' and 'eagle3'",
        ),
        ({"dflash_context_residual": True}, "dflash_context_residual are not supported"),
        ({"conv_kernel": 4}, "conv_kernel are not supported"),
        ({"aux_hidden_state_layer_ids": None}, "lacks 'aux_hidden_state_layer_ids'"),
        ({"aux_hidden_state_layer_ids": "1,3"}, "must be a list of layer numbers"),
        ({"transformer_layer_config": 3}, "lacks a transformer_layer_config"),
        ({"sample_from_anchor": 1}, "sample_from_anchor is 1; it must be true or false"),
        ({"target_hidden_size": -1}, "target_hidden_size is -1; it must be an integer of at least 1"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size is 51; it must be between 1 and the vocabulary of 50"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size is 'many'; it must be an integer"),
    ],
)
def test_wrong_speculators_configs_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**foreign(), **changes})


def test_dspark_in_the_layout_of_its_other_trainer() -> None:
    raw = drafter_config().to_json()
    raw["dflash_config"] |= {"projector_type": "dspark", "markov_rank": 4, "enable_confidence_head": True}
    config = parse_config(raw)
    assert (config.head, config.sample_from_anchor) == (HeadConfig(type="dspark", rank=4), False)
    raw["dflash_config"]["markov_head_type"] = "looped"
    with pytest.raises(ConfigError, match="markov_head_type is 'looped'; volley reads 'vanilla'"):
        parse_config(raw)


UNTRAINED = [
    {"head": HeadConfig(type="domino", rank=4, state=5)},
    {"head": HeadConfig(type="selector", rank=4), "conv_kernel_size": 2, "conv_group_size": 8},
    {"causal_layers": (True, False)},
    {"hidden_size": 24, "target_hidden_size": 32, "own_embedding": True, "draft_vocab_size": VOCAB},
]


def test_a_drafter_of_another_width_needs_ends_of_its_own(tmp_path: Path) -> None:
    assert parse_config({**foreign(), "target_hidden_size": 64}).target_hidden_size == 64
    saved(tmp_path, hidden_size=24, target_hidden_size=32)
    with pytest.raises(CheckpointError, match="needs an embedding and a head of its own, and the weights lack them"):
        read_checkpoint(tmp_path)
    assert any("needs an embedding and a head of its own" in problem for problem in diagnose(tmp_path).problems)


@pytest.mark.parametrize("changes", UNTRAINED)
def test_what_is_only_read_is_neither_written_nor_trained(tmp_path: Path, target: str, changes: dict[str, Any]) -> None:
    source = saved(tmp_path / "own", **changes)
    assert read_checkpoint(source).config == drafter_config(**changes)
    for form in (*FORMATS, "gguf"):
        with pytest.raises(ConfigError, match="which volley reads and does not write; serve the checkpoint it came in"):
            export(source, tmp_path / "out", form, target=target)
    with pytest.raises(ConfigError, match="which volley does not train; name another"):
        drafter_to_train_on(str(source), eager_model(target_config()))


def test_a_drafter_whose_anchor_drafts_without_a_head(tmp_path: Path, target: str) -> None:
    source = saved(tmp_path / "own", sample_from_anchor=True)
    export(source, tmp_path / "theirs", "speculators")
    assert_equal(read_checkpoint(tmp_path / "theirs"), read_checkpoint(source))
    raw = read_json(tmp_path / "theirs" / "config.json")
    assert (raw["speculators_model_type"], raw["markov_rank"], raw["block_size"]) == ("dspark", 0, 5)
    for form in ("sglang", "transformers", "gguf"):
        with pytest.raises(ConfigError, match="its anchor's slot drafts without a sequential head, which has no place"):
            export(source, tmp_path / "other", form, target=target)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="drafts from the anchor's slot, which volley does not train; name another"):
        drafter_to_train_on(str(source), eager_model(target_config()))


def test_a_confidence_head_without_a_markov_head(tmp_path: Path) -> None:
    own = read_checkpoint(saved(tmp_path / "own", block_size=8, sample_from_anchor=True))
    save_tensors(tmp_path / "model.safetensors", {**own.tensors, "confidence_head.proj.weight": torch.ones(1, 32)})
    raw = {**deepspec(), "markov_rank": 0, "confidence_head_with_markov": False}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    read = read_checkpoint(tmp_path)
    assert (read.config.head, read.config.sample_from_anchor, read.config.confidence_width) == (None, True, 32)
    drafter = Drafter.from_pretrained(tmp_path)
    assert (drafter.head, drafter.confidence_head is None) == (None, False)


@given(st.data())
def test_a_damaged_config_is_a_clear_error(data: st.DataObject) -> None:
    whole = [foreign(), drafter_config().to_json(), eagle.config(), SPECULATORS]
    raw = json.loads(json.dumps(data.draw(st.sampled_from(whole))))
    inner = [raw.get(name, raw) for name in ("dflash_config", "eagle_config", "transformer_layer_config")]
    place = data.draw(st.sampled_from([raw, *inner]))
    key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(st.sampled_from([None, -1, 0, 2.5, "x", True, [], ["x"], {}, {"a": 1}, [1, None]]))
    try:
        with torch.device("meta"):
            config = parse_config(raw)
            drafter_class(config)(config)
    except VolleyError as error:
        assert len(str(error)) > 20  # noqa: PT017


@pytest.mark.parametrize("raw", [{}, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}])
def test_what_is_no_drafter_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="this is no DFlash drafter"):
        parse_config(raw)


@pytest.mark.parametrize("form", FORMATS)
def test_a_sequential_head_fits_no_other_engine(tmp_path: Path, form: Format) -> None:
    source = saved(tmp_path / "own", head=HeadConfig(type="residual", rank=4))
    with pytest.raises(ConfigError, match=r"cannot be written in .*--drop-head exports the plain drafter"):
        export(source, tmp_path / "out", form)
    assert not (tmp_path / "out").exists()
    plain = export(source, tmp_path / "out", form, drop_head=True)
    assert plain.config.head is None
    whole = read_checkpoint(source).tensors
    assert plain.tensors.keys() == {name for name in whole if not name.startswith("head.")}


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("transformers", {"target_layer_ids": (-1, 2)}, "not the embedding"),
        ("sglang", {"target_layer_ids": (-1,)}, "not the embedding"),
        ("transformers", {"draft_vocab_size": 20}, "an embedding or a head of its own"),
        ("sglang", {"own_embedding": True}, "an embedding or a head of its own"),
        ("transformers", {"attention_bias": True}, "its attention has biases"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    tmp_path: Path, target: str, form: Format, changes: dict[str, Any], message: str
) -> None:
    source = saved(tmp_path / "own", **changes)
    with pytest.raises(ConfigError, match=message):
        export(source, tmp_path / "out", form)
    with pytest.raises(ConfigError, match=message):  # they are not the target's either
        export(source, tmp_path / "out", form, target=target)


def test_wrong_wishes_are_refused(tmp_path: Path, target: str) -> None:
    source = saved(tmp_path / "own")
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="out is the drafter's own folder"):
        export(source, source, "zlab")
    with pytest.raises(ConfigError, match="give target"):
        export(source, out, "zlab", with_embeddings=True)
    with pytest.raises(ConfigError, match="draft_vocab_size is 50; it must be between 1 and 49"):
        export(source, out, "zlab", target=target, draft_vocab_size=VOCAB, counts=counts())
    with pytest.raises(MismatchError, match="whose vocabulary is 60, this target's is 50"):
        export(saved(tmp_path / "other", vocab_size=60), out, "zlab", target=target)
    with pytest.raises(CheckpointError, match=r"has no config\.json: it holds other, own; give a folder"):
        export(source, out, "zlab", target=str(tmp_path))
    reduced = export(source, tmp_path / "reduced", "zlab", target=target, draft_vocab_size=20, counts=counts())
    assert reduced.config.draft_vocab_size == 20
    with pytest.raises(ConfigError, match="has a head of its own already"):
        export(tmp_path / "reduced", out, "zlab", target=target, draft_vocab_size=10, counts=counts())
    assert not out.exists()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"d2t": [0, 0, 50]}, "outside the vocabulary"),
        ({"d2t": [1, 0, 3]}, "names a token twice"),
        ({"d2t": [-1, 0, 0]}, "outside the vocabulary"),
        ({"d2t": [5, 5, 5], "t2d": [token < 3 for token in range(VOCAB)]}, "t2d and d2t do not name the same tokens"),
    ],
)
def test_a_wrong_vocabulary_table_is_refused(tmp_path: Path, tables: dict[str, list[int]], message: str) -> None:
    saved(tmp_path, draft_vocab_size=3)
    wrong = {name: torch.tensor(numbers) for name, numbers in tables.items()}
    save_tensors(tmp_path / "model.safetensors", {**load_tensors(tmp_path / "model.safetensors"), **wrong})
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path)


def test_sharded_weights_are_read(tmp_path: Path) -> None:
    whole = read_checkpoint(saved(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    names = sorted(whole.tensors)
    where = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(where.values()):
        save_tensors(tmp_path / file, {name: whole.tensors[name] for name in names if where[name] == file})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_equal(read_checkpoint(tmp_path), whole)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no 'weight_map'"):
        read_checkpoint(tmp_path)


def test_stored_numbers_keep_their_type(tmp_path: Path) -> None:
    fp32 = Checkpoint(drafter_config(), dict(random_drafter().state_dict()))
    write_checkpoint(tmp_path, fp32, "speculators")
    assert_equal(read_checkpoint(tmp_path), fp32)
    assert read_json(tmp_path / "config.json")["dtype"] == "float32"


def test_the_shape_of_a_target(target: str) -> None:
    assert TargetShape.from_pretrained(target) == TargetShape(target, ("Qwen3ForCausalLM",), 32, VOCAB, 4)


DSPARK = HeadConfig(type="dspark", rank=5)


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("size", [None, 20])
def test_a_markov_head_in_the_speculators_format(tmp_path: Path, from_anchor: bool, size: int | None) -> None:
    source = saved(tmp_path / "own", head=DSPARK, sample_from_anchor=from_anchor, draft_vocab_size=size)
    export(source, tmp_path / "theirs", "speculators")
    assert_equal(read_checkpoint(tmp_path / "theirs"), read_checkpoint(source))
    raw, tensors = (
        read_json(tmp_path / "theirs" / "config.json"),
        load_tensors(tmp_path / "theirs" / "model.safetensors"),
    )
    assert (raw["speculators_model_type"], raw["markov_rank"], raw["markov_head_type"]) == ("dspark", 5, "vanilla")
    assert (raw["sample_from_anchor"], raw["block_size"]) == (from_anchor, 5 if from_anchor else 6)
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert tensors["markov_head.markov_w1.weight"].shape == (VOCAB, 5)
    assert tensors["markov_head.markov_w2.weight"].shape == (size or VOCAB, 5)


def test_a_trained_markov_head_and_a_reduced_vocabulary(tmp_path: Path, target: str) -> None:
    source = saved(tmp_path / "own", head=HeadConfig(type="markov", rank=5))
    options: dict[str, Any] = {"target": target, "draft_vocab_size": 20, "counts": counts()}
    one = export(source, tmp_path / "one", "speculators", target=target)
    two = export(source, tmp_path / "two", "speculators", **options)
    kept = torch.tensor(counts()).topk(20).indices.sort().values
    assert torch.equal(two.tensors["head.markov_w1.weight"], one.tensors["head.markov_w1.weight"])
    assert torch.equal(two.tensors["head.markov_w2.weight"], one.tensors["head.markov_w2.weight"][kept])
    assert_equal(read_checkpoint(tmp_path / "two"), two)
    for form in ("zlab", "sglang", "transformers"):
        with pytest.raises(ConfigError, match=r"head \(markov\) has no place there; speculators and gguf hold it"):
            export(source, tmp_path / "other", form, target=target)  # type: ignore[arg-type]


def deepspec() -> dict[str, Any]:
    """A config as DeepSpec writes it: seven slots, of which the anchor's predicts too."""
    own = drafter_config(block_size=8).to_json()
    layers = {
        key: value for key, value in own.items() if key not in ("dflash_config", "block_size", "num_target_layers")
    }
    return {
        **layers,
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "mask_token_id": 3,
        "target_layer_ids": [0, 2],
        "target_hidden_size": 32,
        "markov_rank": 5,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def test_a_foreign_dspark_drafter_is_understood(tmp_path: Path) -> None:
    found = parse_config(deepspec())
    assert found.block_size == 8
    assert found.sample_from_anchor
    assert found.head == DSPARK
    assert found.target_layer_ids == (0, 2)
    assert parse_config({**deepspec(), "sample_from_anchor": False}).block_size == 7
    assert parse_config({**foreign(), "speculators_model_type": "dspark", "markov_rank": 5}).head == DSPARK
    own = read_checkpoint(saved(tmp_path / "own", block_size=8, head=DSPARK, sample_from_anchor=True))
    names = {f"head.markov_{name}.weight": f"markov_head.markov_{name}.weight" for name in ("w1", "w2")}
    tensors = {names.get(name, name): tensor for name, tensor in own.tensors.items()}
    save_tensors(tmp_path / "model.safetensors", {**tensors, "confidence_head.proj.weight": torch.ones(1, 37)})
    (tmp_path / "config.json").write_text(json.dumps(deepspec()))
    read = read_checkpoint(tmp_path)
    confidence = {"confidence_head.proj.weight": torch.ones(1, 37), "confidence_head.proj.bias": torch.zeros(1)}
    assert_equal(Checkpoint(replace(found, confidence_width=37), {**own.tensors, **confidence}), read)
    assert Drafter.from_pretrained(tmp_path).head is not None
    assert diagnose(tmp_path).problems == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head_type": "looped"}, "markov_head_type is 'looped'; volley reads 'vanilla'"),
        ({"dflash_config": 3}, "dflash_config is 3; it must be an object"),
        ({"markov_rank": -1}, r"head\.rank is -1; it must be a positive integer"),
        ({"query_zero_predicts_next": True, "sample_from_anchor": False}, "contradict each other"),
        ({"sample_from_anchor": "yes"}, "sample_from_anchor is 'yes'"),
        ({"block_size": "7"}, "block_size is '7'; it must be an integer"),
        ({"confidence_layers": 2}, "unknown drafter config key 'confidence_layers'"),
    ],
)
def test_wrong_dspark_configs_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**deepspec(), **changes})


def test_a_markov_head_is_dsparks() -> None:
    for changes in ({"speculators_model_type": "dspark"}, {"markov_rank": 5}):
        with pytest.raises(ConfigError, match="only dspark has one"):
            parse_config({**foreign(), **changes})


def test_a_mask_token_named_by_its_text(tmp_path: Path) -> None:
    source = saved(tmp_path)
    raw = read_json(source / "config.json")
    del raw["dflash_config"]["mask_token_id"]
    raw["dflash_config"]["mask_token"] = "<|mask|>"
    (source / "config.json").write_text(json.dumps(raw))
    missing = r"'<\|mask\|>', and there is no tokenizer\.json; put the target's"
    with pytest.raises(ConfigError, match=missing):
        read_checkpoint(source)
    assert re.search(missing, diagnose(source).problems[0])
    byte_tokenizer().save_pretrained(source)
    assert read_checkpoint(source).config.mask_token_id == 3
    assert diagnose(source).problems == []
    raw["dflash_config"]["mask_token"] = "<|blank|>"
    (source / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="does not have it"):
        read_checkpoint(source)
