"""docs/clients.md: its table says what the server takes, and its examples run."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from tests.serve.lm_eval import SUBJECTS, evaluate, numbers, write_tasks
from tests.serve.running import MODEL, Running, Tiny, running
from tests.serve.test_tools import TEMPLATE
from volley.serve.anthropic import CountRequest, MessagesRequest
from volley.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from volley.serve.responses import ResponsesRequest

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients" / "bin"
GUIDELLM = ROOT / ".venv-guidellm" / "bin"
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
TABLE = PAGE[PAGE.index("## Fields") : PAGE.index("## How calls")]
SHARED = "chats and completions"
SECTIONS: dict[str, tuple[Any, ...]] = {
    SHARED: (ChatRequest, CompletionRequest),
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions": (ChatRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/messages": (MessagesRequest,),
    "/tokenize": (TokenizeRequest,),
    "/detokenize": (DetokenizeRequest,),
}
NO_FIELDS = {"strict", "message", "usage"}
"""Fields of a tool, and of answers."""


def taken(model: Any) -> set[str]:
    return {own.alias or name for name, own in model.model_fields.items()}


def refused(model: Any) -> set[str]:
    return set(getattr(model, "unsupported", {}))


def ignored(model: Any) -> set[str]:
    return set(getattr(model, "without_effect", ()))


def rows() -> list[tuple[str, list[str], str]]:
    """Section, names of fields, and what volley does with them, of each row of the table."""
    found, section = [], ""
    for line in TABLE.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 4 or cells[0] in ("field", "---"):
            continue
        if heading := re.match(r"\*\*`?([^`*]+)`?\*\*", cells[0]):
            section = heading[1]
        else:
            found.append((section, re.findall(r"`([\w.*]+)`", cells[0]), cells[3]))
    return found


def test_every_row_is_true() -> None:
    for section, names, told in rows():
        fields = {name.split(".")[0] for name in names} - NO_FIELDS
        for model in SECTIONS[section]:
            known = taken(model) | refused(model) | ignored(model)
            for name in fields:
                assert name in known, f"{model.__name__} knows no {name}"
            if told.startswith("yes"):
                assert fields <= taken(model), f"{names} are taken: {told}"
            elif told.startswith("refused"):
                assert fields <= refused(model), f"{names} are refused: {told}"
            elif told.startswith("ignored"):
                assert fields <= ignored(model), f"{names} are ignored"


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != SHARED])
def test_every_field_has_a_row(section: str) -> None:
    (model,) = SECTIONS[section]
    sections = {section, SHARED} if model in SECTIONS[SHARED] else {section}
    named = {name.split(".")[0] for own, names, _ in rows() if own in sections for name in names}
    for name in taken(model) | refused(model) | ignored(model):
        assert name in named, f"{name} of {section} has no row"


@pytest.mark.parametrize(
    ("params", "model"),
    [
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (chat_params.CompletionCreateParamsBase, ChatRequest),
        (response_create_params.ResponseCreateParamsBase, ResponsesRequest),
        (message_create_params.MessageCreateParamsBase, MessagesRequest),
        (message_count_tokens_params.MessageCountTokensParams, CountRequest),
    ],
)
def test_every_field_of_a_client_is_known(params: Any, model: Any) -> None:
    """Taken, refused with a reason, or without effect: none is an unknown field."""
    assert len(params.__annotations__) > 5
    assert set(params.__annotations__) <= taken(model) | refused(model) | ignored(model)


def blocks(client: str, language: str = "") -> list[str]:
    """The code of one client's example."""
    part = PAGE[PAGE.index(f"### {client}\n") :]
    part = part[: part.index("\n## ") if "\n### " not in part[4:] else part.index("\n### ", 4)]
    return re.findall(rf"```{language}\n(.*?)```", part, re.DOTALL)


@pytest.fixture(scope="module")
def server(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    with running(tiny.engine(), chat_template=file) as server:
        yield server
        server.settle()


def program(name: str, folder: Path = CLIENTS) -> Path:
    """A program of one of the clients' own environments."""
    if not (folder / name).exists():
        pytest.skip(f"{name} is not installed; make test-clients installs the clients")
    return folder / name


def run(command: list[str], folder: Path = CLIENTS, **environment: str) -> str:
    """Return the output of a command in one of the clients' own environments."""
    own = {**os.environ, "OPENAI_API_KEY": "any", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    line = [program(command[0], folder), *command[1:]]
    done = subprocess.run(line, env={**own, **environment}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def for_server(code: str, server: Running) -> str:
    return code.replace("http://127.0.0.1:8000", server.url).replace("volley-reference", MODEL)


@pytest.mark.slow
def test_the_examples_of_openai_run(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, Any] = {}
    for code in blocks("openai", "python"):
        code = for_server(code, server).replace("messages=messages", "messages=messages, max_tokens=120, seed=1")
        code = code.replace("input=items", "input=items, max_output_tokens=120")  # a random model needs bounds
        code = code.replace('"type": "string"', '"type": "string", "maxLength": 5')
        exec(code.replace('"required": ["city"]', '"required": ["city"], "additionalProperties": False'), known)
    assert capsys.readouterr().out
    assert [message["role"] for message in known["messages"] if isinstance(message, dict)] == ["user", "tool"]
    assert known["items"][1].type == "function_call"


def test_the_example_of_anthropic_runs(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, Any] = {}
    (code,) = blocks("anthropic", "python")
    code = for_server(code, server).replace("max_tokens=1000", 'max_tokens=120, extra_body={"seed": 1}')
    code = code.replace('"type": "string"', '"type": "string", "maxLength": 5')
    exec(code.replace('"required": ["city"]', '"required": ["city"], "additionalProperties": False'), known)
    assert capsys.readouterr().out
    assert known["call"].type == "tool_use"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_examples_of_curl_run(server: Running) -> None:
    (commands,) = blocks("curl")
    for command in commands.replace("\\\n", " ").strip().splitlines():
        line = for_server(command, server).replace('"thinking_token_budget": 200', '"thinking_token_budget": 9')
        line = line.replace('"messages"', '"max_tokens": 20, "messages"') if "completions" in line else line
        done = subprocess.run([*shlex.split(line), "-s"], capture_output=True, text=True, timeout=60)
        answer = json.loads(done.stdout)
        assert "tokens" in answer or answer["choices"][0]["message"]["reasoning_content"], answer


def test_the_example_of_litellm_runs(server: Running) -> None:
    (example,), chat = blocks("litellm", "python"), blocks("openai", "python")[0]
    definitions = chat[chat.index("weather = {") : chat.index("answer = (")]
    code = f"{definitions}{example}print(answer.choices[0].message.tool_calls[0].function.name)"
    assert run(["python", "-c", for_server(code, server)]).strip() == "weather"


def test_the_examples_of_llm_run(server: Running, tmp_path: Path) -> None:
    (models,), (commands,) = blocks("llm", "yaml"), blocks("llm")[-1:]
    (tmp_path / "extra-openai-models.yaml").write_text(for_server(models, server))
    for command in commands.strip().splitlines():
        before = server.service.metrics.generation_tokens._value.get()
        assert run(shlex.split(command.replace("max_tokens 100", "max_tokens 20")), LLM_USER_PATH=str(tmp_path))
        assert server.service.metrics.generation_tokens._value.get() > before


def test_the_example_of_guidellm_runs(server: Running, tmp_path: Path) -> None:
    """All requests are answered, with as many tokens as it asked for."""
    (command,) = blocks("guidellm")
    root = server.client.get("/v1/models").json()["data"][0]["root"]
    line = for_server(command.replace("\\\n", " "), server).replace("path/to/target", root)
    for most, fewer in (
        ("count=20", "count=3"),
        ("prompt_tokens=64", "prompt_tokens=16"),
        ("output_tokens=24", "output_tokens=5"),
    ):
        assert most in line
        line = line.replace(most, fewer)
    run([*shlex.split(line), "--disable-progress", "--output", f"kind=json,path={tmp_path}/report.json"], GUIDELLM)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert benchmark["requests"]["errored"] == []
    assert [own["output_tokens"] for own in benchmark["requests"]["successful"]] == [5] * 3
    server.settle()


def test_lm_eval_runs(server: Running, tmp_path: Path) -> None:
    """Its log-likelihoods, perplexities and generations through ``echo`` and ``stop``; that they are transformers' own is what
    ``test_eval_clients.py`` says."""
    own = program("lm_eval")
    write_tasks(tmp_path / "tasks")
    arguments = {"model": MODEL, "base_url": f"{server.url}/v1/completions", "max_length": server.service.max_model_len}
    arguments |= {"num_concurrent": 4, "tokenizer_backend": "remote"}
    found = evaluate(own, tmp_path / "tasks", tmp_path / "out", "local-completions", arguments)
    assert len(numbers(found["answers"]["choice"])) == 3 * len(SUBJECTS)
    assert all(value < 0 for name in ("choice", "perplexity") for value in numbers(found["answers"][name]))
    assert len(found["answers"]["generation"]) == len(SUBJECTS)
    server.settle()
