"""Which procedure answers, and by which settings."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.conftest import byte_tokenizer
from tests.hybrid import model as recurrent_model
from tests.procedures.test_denoising import BOTH_WAYS
from volley import DiffusionParams, Engine, SamplingParams
from volley.config import DecodingConfig
from volley.decode.rules import AtLeast
from volley.errors import CheckpointError, ConfigError, MismatchError, UnsupportedModelError
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.diffusion import load_target
from volley.models.targets.families import FAST_DLLM, JOINT, SDAR
from volley.models.targets.target import Target
from volley.params import DiffusionMode
from volley.policies.cost import PassCost
from volley.procedures.denoising import Denoising
from volley.procedures.in_place import InPlace
from volley.procedures.make import Procedures
from volley.procedures.self_speculative import SelfSpeculative
from volley.procedures.speculative import Speculative


@pytest.fixture(scope="module")
def procedures() -> Procedures:
    target = Target(tiny.eager_model(tiny.target_config()), None, replace(BOTH_WAYS, mask_token_id=3))
    return Procedures(target, Speculative(DecodingConfig()))


def test_each_mode_has_its_procedure(procedures: Procedures) -> None:
    for mode, kind in (("diffusion", Denoising), ("self", SelfSpeculative), ("autoregressive", Speculative)):
        procedure, _ = procedures.choose(SamplingParams(diffusion={"mode": mode}))  # type: ignore[arg-type]
        assert type(procedure) is kind
    assert type(procedures.choose(SamplingParams())[0]) is Denoising


def test_a_model_whose_rows_predict_their_own_place_is_asked_by_masks() -> None:
    target = Target(tiny.eager_model(tiny.target_config()), None, replace(SDAR, mask_token_id=3))
    procedures = Procedures(target, Speculative(DecodingConfig()))
    for mode, kind in (("self", SelfSpeculative), ("autoregressive", InPlace)):
        procedure, _ = procedures.choose(SamplingParams(diffusion={"mode": mode}))  # type: ignore[arg-type]
        assert type(procedure) is kind
    with pytest.raises(ConfigError) as error:
        Engine(target, page_size=32).add_request([1], SamplingParams(prompt_logprobs=0))
    assert "mode=" not in str(error.value), "no remedy names a mode that refuses the same"
    for refused in (
        SamplingParams(max_tokens=0),
        SamplingParams(rules=(lambda *_: AtLeast(2, [5], torch.device("cpu")),)),
    ):
        with pytest.raises(ConfigError, match="mode='autoregressive'"):
            Engine(target, page_size=32).add_request([1], refused)


@pytest.mark.parametrize("mode", ["autoregressive", "self"])
def test_a_model_that_neither_writes_causally_nor_has_a_mask_has_one_mode(mode: DiffusionMode) -> None:
    target = Target(tiny.eager_model(tiny.target_config()), None, replace(SDAR, mask_token_id=None))
    procedures = Procedures(target, Speculative(DecodingConfig()))
    with pytest.raises(ConfigError, match=f"mode '{mode}' is not for this model.*use mode='diffusion'"):
        procedures.choose(SamplingParams(diffusion=DiffusionParams(mode=mode)))


@pytest.mark.parametrize(("family", "plain"), [(SDAR, 2), (JOINT, 1)])
def test_a_token_without_a_draft_costs_its_mask_too(family: BlockDiffusion, plain: int) -> None:
    target = Target(tiny.eager_model(tiny.target_config()), None, replace(family, mask_token_id=3))
    procedures = Procedures(target, Speculative(DecodingConfig()))
    procedures.use_costs(PassCost(lambda tokens, requests: 1.0))
    drafting = procedures.by_mode["self"]
    assert isinstance(drafting, SelfSpeculative)
    assert drafting.steps is not None
    assert drafting.steps.plain == plain


def test_a_drafter_of_a_model_that_does_not_write_causally_is_refused() -> None:
    pair = tiny.make_pair()
    with pytest.raises(MismatchError, match="leave the drafter out"):
        Engine(Target(pair.hf, None, replace(SDAR, mask_token_id=3)), pair.drafter)


def test_what_is_not_said_is_the_models_own(procedures: Procedures) -> None:
    _, params = procedures.choose(SamplingParams(diffusion=DiffusionParams(threshold=0.5)))
    own = {"mode": "diffusion", "threshold": 0.5, "entropy_bound": 0.35}
    assert params.diffusion == replace(BOTH_WAYS.defaults, **own), (
        "what no strategy of the family reads is there for others"
    )
    _, params = procedures.choose(SamplingParams(diffusion=DiffusionParams(mode="self")))
    assert params.diffusion is not None
    assert (params.diffusion.max_steps, params.diffusion.canvas_length) == (None, 4), "how many is measured"
    _, params = procedures.choose(SamplingParams(diffusion=DiffusionParams(mode="self", max_steps=3)))
    assert params.diffusion is not None
    assert params.diffusion.max_steps == 3


def test_a_model_may_name_the_mode_of_requests_that_name_none() -> None:
    family = replace(BOTH_WAYS, mask_token_id=3, defaults=replace(BOTH_WAYS.defaults, mode="self"))
    procedures = Procedures(Target(tiny.eager_model(tiny.target_config()), None, family), Speculative(DecodingConfig()))
    procedure, params = procedures.choose(SamplingParams())
    assert type(procedure) is SelfSpeculative
    assert params.diffusion is not None
    assert params.diffusion.mode == "self"
    asked = SamplingParams(diffusion=DiffusionParams(mode="diffusion"))
    assert type(procedures.choose(asked)[0]) is Denoising
    assert (procedures.mode(SamplingParams()), procedures.mode(asked)) == ("self", "diffusion")


@pytest.mark.parametrize(("family", "mode"), [(JOINT, "autoregressive"), (SDAR, "diffusion")])
def test_commands_of_drafters_write_causally_where_the_model_does(family: BlockDiffusion, mode: str) -> None:
    target = Target(tiny.eager_model(tiny.target_config()), None, replace(family, mask_token_id=3))
    procedures = Procedures(target, Speculative(DecodingConfig()))
    procedures.write_causally()
    assert procedures.mode(SamplingParams()) == mode


def test_a_strategy_of_another_family_is_refused(procedures: Procedures) -> None:
    with pytest.raises(ConfigError, match="begin with mask tokens; leave it out"):
        procedures.choose(SamplingParams(diffusion=DiffusionParams(strategy="entropy_renoise")))


@pytest.mark.parametrize(
    ("mask_token_id", "name", "instead"),
    [(1, "t_max", "threshold"), (None, "threshold", "t_max"), (None, "sub_block", "confidence_threshold")],
)
def test_a_setting_that_the_model_does_not_read_is_refused(mask_token_id: int | None, name: str, instead: str) -> None:
    target = Target(tiny.eager_model(tiny.target_config()), diffusion=replace(SDAR, mask_token_id=mask_token_id))
    procedures = Procedures(target, Speculative(DecodingConfig()))
    own = DiffusionParams(**{name: 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{name} is not for this model.*{instead}"):
        procedures.choose(SamplingParams(diffusion=own))


def test_other_models_refuse_diffusion_settings() -> None:
    engine = Engine(Target(tiny.eager_model(tiny.target_config())))
    with pytest.raises(ConfigError, match="no diffusion language model; leave"):
        engine.add_request([1], SamplingParams(diffusion=DiffusionParams()))


def test_settings_are_read_from_words() -> None:
    own = DiffusionParams.from_words(["mode=self", "threshold=.8", "max_steps=3"])
    assert own == DiffusionParams(mode="self", threshold=0.8, max_steps=3)
    assert isinstance(own.max_steps, int)
    with pytest.raises(ConfigError, match="write NAME=VALUE"):
        DiffusionParams.from_words(["threshold"])
    with pytest.raises(ConfigError, match="did you mean 'max_steps'"):
        DiffusionParams.from_words(["max_step=3"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"treshold": 0.5}, "did you mean 'threshold'"),
        ({"mode": "diffuse"}, "did you mean 'diffusion'"),
        ({"strategy": "sequentially"}, "did you mean 'sequential'"),
        ({"max_steps": 0}, "≥ 1"),
        ({"max_steps": 2.5}, "a whole number"),
        ({"threshold": "0.9"}, "a number"),
        ({"max_steps": True}, "a whole number"),
        ({"stream_drafts": 1}, "true or false"),
        ({"t_min": 0.9, "t_max": 0.5}, "t_min 0.9 is above"),
    ],
)
def test_settings_that_cannot_be_used_say_so(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(diffusion=values)  # type: ignore[arg-type]
    if "treshold" not in values:
        with pytest.raises(ConfigError, match=message):
            DiffusionParams(**values)  # type: ignore[arg-type]


def test_drafts_are_of_whole_canvases_unless_a_request_says_otherwise() -> None:
    target = Target(tiny.eager_model(tiny.target_config()), None, replace(FAST_DLLM, mask_token_id=3))
    procedures = Procedures(target, Speculative(DecodingConfig()))
    for asked, sub_block in ((None, None), (2, 2)):
        own = SamplingParams(diffusion=DiffusionParams(mode="self", sub_block=asked))
        _, params = procedures.choose(own)
        assert params.diffusion is not None
        assert (params.diffusion.sub_block, params.diffusion.strategy) == (sub_block, "low_confidence_static")
    _, params = procedures.choose(SamplingParams())
    assert params.diffusion is not None
    assert params.diffusion.sub_block == 8, "of texts"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"mode": "self"}, (None, "low_confidence_static")),
        ({"mode": "self", "max_steps": 2, "strategy": "sequential"}, (2, "sequential")),
        ({"max_steps": 2}, (None, "low_confidence_static")),  # said of texts
    ],
)
def test_a_model_that_drafts_for_itself_may_say_how(
    tmp_path: Path, own: dict[str, Any], expected: tuple[int | None, str]
) -> None:
    procedures = saved(tmp_path, block_diffusion={"mask_token_id": 3, **own})
    _, params = procedures.choose(SamplingParams(diffusion=DiffusionParams(mode="self")))
    assert params.diffusion is not None
    assert (params.diffusion.max_steps, params.diffusion.strategy) == expected


def saved(folder: Path, **changes: Any) -> Procedures:
    """Return the decoding methods of a tiny model with this config."""
    tiny.eager_model(tiny.target_config()).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    byte_tokenizer().save_pretrained(folder)
    return Procedures(load_target(folder, torch.float32, "cpu"), Speculative(DecodingConfig()))


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"mode": "self"}, (None, "low_confidence_dynamic", 0.9)),
        # two passes are said of drafts
        ({"mode": "self", "max_steps": 2, "threshold": 0.6}, (None, "low_confidence_dynamic", 0.6)),
        ({"max_steps": 2, "strategy": "sequential"}, (2, "sequential", 0.9)),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "sdar"])
def test_texts_have_what_the_config_says_of_texts(
    tmp_path: Path, own: dict[str, Any], expected: tuple[int | None, str, float], family: str
) -> None:
    mask = {"mask_token_id": 3}
    changes = {"block_diffusion": own, **mask} if family == "sdar" else {"block_diffusion": {**own, **mask}}
    procedures = saved(tmp_path, model_type=family, **changes)
    assert procedures.default_mode == own.get("mode", "diffusion")
    _, params = procedures.choose(SamplingParams(diffusion=DiffusionParams(mode="diffusion")))
    found = params.diffusion
    assert found is not None
    assert (found.max_steps, found.strategy, found.threshold) == expected


@pytest.mark.parametrize("own", [{"strategy": "entropy_renoise"}, {"t_max": 0.5}, {"treshold": 0.5}, 8])
@pytest.mark.parametrize("family", ["qwen3", "sdar"])
def test_a_config_may_say_nothing_that_nobody_reads(tmp_path: Path, own: Any, family: str) -> None:
    said = {"mask_token_id": 3, **own} if isinstance(own, dict) and family == "qwen3" else own
    with pytest.raises(CheckpointError, match="block_diffusion"):
        saved(tmp_path, model_type=family, mask_token_id=3, block_diffusion=said)


def test_canvases_of_recurrent_layers_are_refused() -> None:
    target = Target(recurrent_model("qwen3_next"), None, replace(JOINT, mask_token_id=3))
    with pytest.raises(UnsupportedModelError, match="leave block_diffusion out"):
        Engine(target)
