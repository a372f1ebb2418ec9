"""The effect of the environment on vLLM. The engine's arguments are played here; ``test_activated.py`` has real ones."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import eagle
from tests.conftest import TinyPair
from tests.tiny import random_drafter
from volley.errors import ConfigError
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.vllm import options, register
from volley.vllm.activation import NOTHING, configure
from volley.vllm.options import LOGGER

from ..test_cli import run


class Arguments(SimpleNamespace):
    """Fields of vLLM's ``EngineArgs`` that matter here. ``refused`` names methods whose configuration vLLM cannot make."""

    def __init__(self, target: Path, **given: Any) -> None:
        plain = {"speculative_config": None, "additional_config": {}, "enforce_eager": False, "spec_method": None}
        sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        super().__init__(**{"model": str(target), **plain, **sizes, "refused": (), **given})

    def make(self) -> dict[str, Any]:
        method = (self.speculative_config or {}).get("method")
        if method in self.refused:
            raise ValueError(f"no {method}\nin this vLLM")
        return {"method": method, **vars(self)}


@pytest.fixture(autouse=True)
def _environment(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "is_cpu_build", lambda: False)
    monkeypatch.setenv("VOLLEY_DRAFTER", str(tiny_pair.drafter))


def configured(target: Path, **given: Any) -> tuple[dict[str, Any], str]:
    args = Arguments(target, **given)
    found, line = configure(args, args.make)
    assert "\n" not in line
    return found, line


def test_a_plain_drafter_goes_to_the_built_in_method(tiny_pair: TinyPair, tmp_path: Path) -> None:
    found, line = configured(tiny_pair.target)
    drafter = str(tiny_pair.drafter)
    assert found["speculative_config"] == {"method": "dflash", "model": drafter, "num_speculative_tokens": 5}
    assert not found["enforce_eager"]
    assert line == f"volley: vLLM's built-in dflash, compiled, drafts with {drafter}, in blocks of up to 6 tokens"


def test_a_measured_window_does_not_matter_to_the_built_in_method(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_drafter(vocab_size=260, draft_window=64).save_pretrained(tmp_path)
    monkeypatch.setenv("VOLLEY_DRAFTER", str(tmp_path))
    assert configured(tiny_pair.target)[0]["method"] == "dflash"


@pytest.mark.parametrize(
    ("variables", "method", "expected"),
    [
        ({"BLOCK_SIZE": "4"}, "dflash", {"num_speculative_tokens": 3}),
        ({"BLOCK_SIZE": "9", "COMPILE": "1", "PRESET": "qwen3-8b"}, "dflash", {"num_speculative_tokens": 8}),
        ({"DRAFT_TEMPERATURE": "0"}, "dflash", {}),
        ({"DENOISING_STEPS": "2", "BLOCK_SIZE": "4"}, "custom_class", {"policy": "fixed:4", "denoising_steps": 2}),
        ({"POLICY": "feedback"}, "custom_class", {"policy": "feedback"}),
        ({"DRAFT_WINDOW": "64", "DENOISING_SCHEDULE": "sqrt"}, "custom_class", {"denoising_schedule": "sqrt"}),
    ],
)
def test_variables_mean_what_they_mean_to_the_commands(
    tiny_pair: TinyPair,
    variables: dict[str, str],
    method: str,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"VOLLEY_{name}", value)
    found, _ = configured(tiny_pair.target, additional_config={"other": 1})
    assert found["method"] == method
    assert found["additional_config"]["other"] == 1
    assert found["enforce_eager"] == (method == "custom_class")
    told = {**found["speculative_config"], **found["additional_config"].get("volley", {})}
    assert expected.items() <= told.items()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"DRAFTER": "/nowhere"}, "/nowhere"),
        ({"BLOCK_SIZE": "1"}, "plain decoding was asked for"),
        ({"POLICY": "plain"}, "plain decoding was asked for"),
        ({"BLOCK_SIZE": "four"}, "VOLLEY_BLOCK_SIZE: Input should be a valid integer"),
        ({"BLOCK_SIZE": "4", "POLICY": "goodput"}, "give one of them"),
        ({"POLICY": "magic"}, "unknown policy 'magic'"),
        ({"DRAFT_TEMPERATURE": "0.5"}, "tells a proposer no temperatures"),
        ({"DENOISING_STEPS": "0"}, "denoising_steps is 0"),
    ],
)
def test_where_nothing_can_draft_vllm_starts_plain_and_says_why(
    tiny_pair: TinyPair, variables: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"VOLLEY_{name}", value)
    found, line = configured(tiny_pair.target)
    assert (found["method"], found["enforce_eager"], found["additional_config"]) == (None, False, {})
    assert line.startswith(NOTHING)
    assert reason in line


def test_drafters_of_other_targets_and_kinds(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_drafter().save_pretrained(tmp_path / "other")
    monkeypatch.setenv("VOLLEY_DRAFTER", str(tmp_path / "other"))
    assert "whose vocabulary is 50, this target's is 260" in configured(tiny_pair.target)[1]
    monkeypatch.setenv("VOLLEY_DRAFTER", str(eagle.checkpoint(tmp_path / "eagle")))
    assert "is an EAGLE-3 drafter" in configured(tiny_pair.target)[1]
    random_drafter(vocab_size=260, head=HeadConfig(type="residual", rank=4)).save_pretrained(tmp_path / "head")
    monkeypatch.setenv("VOLLEY_DRAFTER", str(tmp_path / "head"))
    found, line = configured(tiny_pair.target)
    assert (found["method"], found["enforce_eager"]) == ("custom_class", True)
    assert line.startswith("volley: volley's proposer, eagerly, drafts with")
    found, line = configured(tiny_pair.target, tensor_parallel_size=2)
    assert found["method"] is None
    assert "dflash does not have a sequential head" in line
    assert "split over processes" in line


def test_a_way_that_vllm_refuses_gives_way_to_the_next(tiny_pair: TinyPair) -> None:
    found, line = configured(tiny_pair.target, refused=("dflash",))
    assert (found["method"], found["enforce_eager"]) == ("custom_class", True)
    found, line = configured(tiny_pair.target, refused=("dflash", "custom_class"))
    assert (found["method"], found["enforce_eager"], found["additional_config"]) == (None, False, {})
    assert line == f"{NOTHING}: no dflash in this vLLM; no custom_class in this vLLM"
    with pytest.raises(ValueError, match="no None"):
        configured(tiny_pair.target, refused=("dflash", "custom_class", None))


def test_vllms_own_options_come_first(tiny_pair: TinyPair) -> None:
    for given in ({"speculative_config": {"method": "ngram"}}, {"spec_method": "ngram"}):
        found, line = configured(tiny_pair.target, **given)
        assert given.items() <= found.items()
        assert line == f"{NOTHING}: vLLM's own options say how to speculate, so VOLLEY_DRAFTER is not looked at"


def test_an_untested_vllm_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(LOGGER, "warning", lambda text, *parts: said.append(text % parts))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.0"))  # it has nothing to change
    register()
    (line,) = said
    assert line.startswith(f"{NOTHING}: this is vLLM 0.33.0")


def test_the_doctor_asks_for_a_pair_or_vllm(tiny_pair: TinyPair) -> None:
    with pytest.raises(ConfigError, match="give --drafter and --data, or --vllm"):
        run("doctor", "--target", tiny_pair.target)
