"""EAGLE-3 checkpoints: what the kinds of configs mean, what loads, and what is refused with a remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import eagle
from tests.conftest import TinyPair
from tests.tiny import Pair, eager_model, make_pair, target_config
from volley import Engine, SamplingParams
from volley.bench.run import run_bench
from volley.bench.tasks import BenchConfig
from volley.errors import CheckpointError, ConfigError, MismatchError, VolleyError
from volley.models.checkpoints.eagle_format import is_eagle, usual_taps
from volley.models.checkpoints.formats import parse_config, read_checkpoint
from volley.models.diagnosis import diagnose
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.eagle import EagleDrafter

SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.5.0",
    "speculators_config": {"algorithm": "eagle3"},
    "draft_vocab_size": 7,
    "norm_before_residual": True,
    "norm_before_fc": False,
    "embed_requires_grad": False,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}


def test_speculators_configs_count_taps_from_one_and_leave_out_what_is_usual() -> None:
    config = parse_config(SPECULATORS)
    assert config.target_layer_ids == (0, 1, 2)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-6, 500000.0, 2048)
    assert config.eagle is not None
    assert (config.eagle.norm_before_residual, config.eagle.norm_before_fc) == (True, False)


@pytest.mark.slow
def test_taps_that_a_config_does_not_name_are_the_authors(tmp_path: Path) -> None:
    assert (usual_taps(32), usual_taps(36)) == ((1, 15, 28), (1, 17, 32))
    bare = {key: value for key, value in eagle.config().items() if key != "eagle_config"}
    eagle.write(tmp_path, {**bare, "architectures": ["LlamaForCausalLM"]}, eagle.tensors())
    pair = make_pair(num_hidden_layers=6)
    engine = Engine(pair.target, load_drafter(tmp_path, pair.target, "bf16"))
    assert engine.core.draft_model is not None
    assert engine.core.draft_model.taps == (1, 2, 2)
    assert [len(result.token_ids) for result in engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9))] == [9]
    shallow = make_pair(num_hidden_layers=4).target
    with pytest.raises(ConfigError, match="need a target of 5 layers or more, not of 4; write eagle_aux_hidden"):
        Engine(shallow, load_drafter(tmp_path, shallow, "bf16"))


def test_both_namings_are_the_same_drafter(tmp_path: Path) -> None:
    some = [1, 2, 5, 8, 13, 21, 34]
    tensors = eagle.tensors(drafted=some)
    own = eagle.write(tmp_path / "own", eagle.config(draft_vocab_size=7), tensors)
    theirs = eagle.write(tmp_path / "theirs", SPECULATORS, renamed(tensors))
    one, other = (read_checkpoint(path).tensors for path in (own, theirs))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_targets_and_block_drafters_are_told_apart() -> None:
    assert is_eagle({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000})
    assert is_eagle({"architectures": ["Eagle3LlamaForCausalLM"]})
    assert not is_eagle({"architectures": ["LlamaForCausalLM"]})
    assert not is_eagle({"architectures": ["DFlashDraftModel"], "draft_vocab_size": 9, "dflash_config": {}})
    assert not is_eagle({"speculators_model_type": "dflash", "draft_vocab_size": 9})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "volley reads EAGLE-3 drafters of one layer"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        (
            {"eagle_config": {"use_last_layernorm": False, "parallel_draft_step": 2}},
            "parallel_draft_step are not known",
        ),
        ({"parallel_drafting": True}, "parallel_drafting are not known to volley and may change"),
        ({"use_aux_hidden_state": False, "eagle_config": {}}, "EAGLE-3 reads three layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "must be a list of 3 layer numbers"),
        ({"eagle_config": 3}, "must be an object"),
        ({"hidden_size": None}, "EAGLE-3 config lacks 'hidden_size'"),
        ({"draft_vocab_size": 51}, "between 1 and the vocabulary of 50"),
        (
            {"transformer_layer_config": {"model_type": "gpt_oss"}},
            "of type 'gpt_oss'; volley reads 'llama' and 'qwen3'",
        ),
    ],
)
def test_what_a_config_may_not_say(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(VolleyError, match=message):
        parse_config(eagle.config(**changes))


def test_other_targets_and_other_weights_are_refused(pair: Pair, tmp_path: Path) -> None:
    folder = eagle.checkpoint(tmp_path / "one")
    other = make_pair(hidden_size=16, drafter={"hidden_size": 16}).target
    with pytest.raises(MismatchError, match="hidden size is 32, this target's is 16; use the drafter of this target"):
        Engine(other, load_drafter(folder, other, "bf16"))
    tensors = eagle.tensors()
    del tensors["midlayer.hidden_norm.weight"]
    eagle.write(tmp_path / "two", eagle.config(), tensors)
    with pytest.raises(CheckpointError, match=r"missing hidden_norm\.weight"):
        load_drafter(tmp_path / "two", pair.target, "bf16")
    assert "hidden_norm.weight is missing" in diagnose(tmp_path / "two").problems
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"is a pickle; write it as model.safetensors, with safetensors.torch.save"
    ):
        load_drafter(folder, pair.target, "bf16")


def test_inspect_says_what_it_is(tmp_path: Path) -> None:
    folder = eagle.checkpoint(tmp_path / "drafter", norm_before_fc=True, drafted=[3, 4, 5])
    eager_model(target_config()).save_pretrained(tmp_path / "target")
    found = diagnose(folder, str(tmp_path / "target"))
    assert (found.title, found.problems) == ("an EAGLE-3 drafter", [])
    assert found.facts["taps"] == "0, 1, 2 (0-based)"
    assert found.facts["vocabulary"] == "50 tokens, drafts 3 of them"
    assert found.facts["as published"] == "with norm_before_fc"
    assert found.facts["loads in"] == "volley, and what else reads EAGLE-3"


def test_what_else_drafters_are_for_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is an EAGLE-3 drafter, .*; give a block drafter"):
        Drafter.from_pretrained(eagle.checkpoint(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_bf16_and_codes_run(tmp_path: Path, weights: Any) -> None:
    torch.manual_seed(0)
    pair = make_pair()
    target = type(pair.target)(pair.hf.to(torch.bfloat16))
    drafter = load_drafter(eagle.checkpoint(tmp_path), target, weights)
    assert isinstance(drafter, EagleDrafter)
    params = SamplingParams(max_tokens=20)
    drafted = next(Engine(target, drafter, policy="fixed").generate([[1, 2, 3]], params))
    assert drafted.token_ids == next(Engine(target).generate([[1, 2, 3]], params)).token_ids


@pytest.mark.slow
def test_a_benchmark_measures_it(tiny_pair: TinyPair, tmp_path: Path) -> None:
    file, folder = tmp_path / "p.jsonl", tmp_path / "eagle"
    file.write_text('{"prompt": "Hello"}\n')
    target = Engine.from_pretrained(tiny_pair.target, dtype=torch.float32).target
    shape = {"vocab_size": target.vocab_size, "draft_vocab_size": target.vocab_size}
    assert target.hidden_size == eagle.HIDDEN
    eagle.write(folder, eagle.config(**shape), eagle.tensors(vocab=target.vocab_size))
    alone = Engine.from_pretrained(tiny_pair.target, folder, dtype=torch.float32)
    report = run_bench(alone, BenchConfig(datasets=(str(file),), repeats=1, max_tokens=9, block_sizes=(4,)), {})
    assert [(one.case.label, one.identical) for one in report.summaries] == [("plain", 1), ("B=4", 1)]
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == target.vocab_size
