"""Options from dataclasses: which fields become options, and what the command gets."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from volley.cli import app
from volley.cli.train import INTERNAL
from volley.config import CapacityConfig, DecodingConfig
from volley.options import Without, expand, field_docs
from volley.train.options import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Sizes:
    sizes: tuple[int, ...] = (1,)
    """Sizes to try."""
    seed: int = 0
    """First seed."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    policy: str | Any | None = None
    """A name, or an object from Python."""
    seed: int = 7
    """Taken by Sizes on a command that has both."""
    sizes: int = 5
    hidden: int = 9


def called(command: Any, *args: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    application = typer.Typer()
    application.command()(expand(command(found)))
    result = CliRunner().invoke(application, args)
    assert result.exit_code == 0, result.output
    return found


def both(found: dict[str, Any]) -> Any:
    def command(first: Sizes, second: Annotated[Rules, Without("hidden")], quiet: bool = False) -> None:
        found.update(first=first, second=second, quiet=quiet)

    return command


def test_a_field_whose_option_is_taken_keeps_its_default() -> None:
    found = called(both, "--seed", "3", "--sizes", "4,8")
    assert found == {"first": Sizes(sizes=(4, 8), seed=3), "second": Rules(), "quiet": False}


def test_several_values_are_separated_by_commas_or_given_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (("--sizes", "4,8"), ("--sizes", "4", "--sizes", "8")):
        assert called(both, *given)["first"].sizes == (4, 8)
    monkeypatch.setenv("VOLLEY_SIZES", "4, 8")
    assert called(both)["first"].sizes == (4, 8)


def test_a_plain_parameter_before_takes_an_option_too() -> None:
    def command(found: dict[str, Any]) -> Any:
        def command(seed: int, rules: Rules) -> None:
            found.update(seed=seed, rules=rules)

        return command

    found = called(command, "--sizes", "2", "3")
    assert found == {"seed": 3, "rules": Rules(sizes=2)}


def test_what_may_be_an_object_is_text() -> None:
    assert called(both, "--policy", "fixed:8")["second"] == Rules(policy="fixed:8")


def test_a_field_that_is_left_out_is_no_option() -> None:
    application = typer.Typer()
    application.command()(expand(both({})))
    result = CliRunner().invoke(application, ["--hidden", "1"])
    assert result.exit_code == 2
    assert "No such option" in result.output


def every_command(found: Any, name: str = "volley") -> Iterator[tuple[str, Any]]:
    """Yield all commands, those of groups and hidden ones included."""
    commands = getattr(found, "commands", None)
    if commands is None:
        yield name, found
    else:
        for part, command in commands.items():
            yield from every_command(command, f"{name} {part}")


COMMANDS = dict(every_command(typer.main.get_command(app)))


def test_there_are_the_commands_that_are_looked_at() -> None:
    assert {"volley doctor", "volley presets", "volley certify", "volley reservoir erase"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_may_come_from_the_environment(name: str) -> None:
    options = [option for option in COMMANDS[name].params if option.param_type_name == "option"]
    for option in options:
        assert option.envvar == f"VOLLEY_{option.name.upper()}", f"{name}: {option.name}"


def test_what_is_in_the_environment_is_taken(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "num_hidden_layers": 14, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = CliRunner()
    assert "Qwen3 MoE" in runner.invoke(app, ["presets"]).output
    found = json.loads(runner.invoke(app, ["presets"], env={"VOLLEY_TARGET": str(tmp_path)}).output)
    assert found["family"] == "Qwen3"
    folder = str(tmp_path)
    given = {"VOLLEY_TARGET": folder, "VOLLEY_DRAFTER": "d", "VOLLEY_DATA": "nowhere.jsonl"}
    assert "Missing option" not in runner.invoke(app, ["doctor"], env=given).output
    assert "Missing option '--target'" in runner.invoke(app, ["doctor"]).output
    for model in ([], ["--model", "own"]):  # of an endpoint, and here of another command in the one case
        command = [
            "collect",
            "--target",
            folder,
            "--out",
            str(tmp_path / "out.jsonl"),
            "--prompts",
            "nowhere.jsonl",
            *model,
        ]
        refused = runner.invoke(app, command, env={"VOLLEY_MODEL": "m"})
        assert ("are of an endpoint" in str(refused.exception)) == bool(model)
    refused = runner.invoke(app, ["certify", "http://localhost:1"], env={"VOLLEY_TARGET": "t"})
    assert "leave --target and --drafter out" in str(refused.exception)


FOR_PYTHON = ("cuda_graphs", "draft_kv_dtype", "num_pages", "num_states", "page_size", "verification")
ENGINE = (DecodingConfig, CapacityConfig)
SETTINGS: dict[str, tuple[tuple[type, ...], tuple[str, ...]]] = {
    "generate": (ENGINE, FOR_PYTHON),
    "serve": (ENGINE, FOR_PYTHON),
    "bench": (ENGINE, (*FOR_PYTHON, "policy", "block_size")),  # it has lists of the last two
    "train": ((TrainConfig,), INTERNAL),
}
"""Settings of each command, and those of them that are no options."""


@pytest.mark.parametrize("command", SETTINGS)
def test_every_setting_is_an_option_with_help(command: str) -> None:
    kinds, left_out = SETTINGS[command]
    docs = {name: doc for kind in kinds for name, doc in field_docs(kind).items()}
    assert set(docs) == {field.name for kind in kinds for field in fields(kind)}
    assert set(left_out) <= set(docs)
    found = CliRunner().invoke(app, [command, "--help"]).output.split()
    for name in docs:
        assert (f"--{name.replace('_', '-')}" in found) == (name not in left_out), name
