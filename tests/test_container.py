"""The Dockerfile and the compose file run commands that exist, on files that are there, and keep /data in a named volume."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from volley.cli import app
from volley.serve.config import KEY_VARIABLE

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


def test_each_instruction_is_one_that_docker_knows() -> None:
    joined = re.sub(r"\\\n", " ", DOCKERFILE)
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    names = [line.split()[0] for line in joined.splitlines() if line and not line.startswith("#")]
    assert set(names) <= known
    assert names[0] == "FROM"


def test_what_is_copied_is_there_and_not_ignored() -> None:
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]
    ]
    assert copied
    assert set(copied) <= set(allowed)
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_commands_and_options_exist(service: str) -> None:
    name, *words = COMPOSE["services"][service]["command"]
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_data_lie_in_a_named_volume(service: str) -> None:
    assert COMPOSE["services"][service]["volumes"] == ["volley-data:/data"]
    assert "volley-data" in COMPOSE["volumes"]
    assert "VOLUME /data" in DOCKERFILE


def test_the_server_keeps_what_it_learns_in_the_volume() -> None:
    given = COMPOSE["services"]["volley"]["environment"]
    assert given["VOLLEY_RECALIBRATE"] == "${VOLLEY_RECALIBRATE-/data/recalibrate}"


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_variables_are_those_of_options(service: str) -> None:
    name, *_ = COMPOSE["services"][service]["command"]
    known = {parameter.envvar for parameter in COMMANDS[name].params}
    assert COMPOSE["services"][service]["environment"].keys() <= {*known, KEY_VARIABLE}
