"""From a model and prompts to a certified drafter: every step, a stop in the middle, and models of other families."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from tests.conftest import byte_tokenizer
from tests.models.gguf.converted import random_model
from tests.models.gguf.files import bpe_tokenizer, write_model
from tests.serve.running import running
from tests.train.runs import EXPERTS, MIXED, SHAPE, write_rows
from volley import Engine, SamplingParams, files
from volley.certify.certificate import read_certificate
from volley.errors import ConfigError, InputError, WriteError
from volley.files import REFERENCE, make_folder, read_json, write_atomically
from volley.models.checkpoints.certificate import digest
from volley.models.checkpoints.formats import read_checkpoint
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import export
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.models.targets.target import Target, load_tokenizer
from volley.prompts import read_jsonl
from volley.train.collect import Progress as Collected
from volley.train.data import TrainingData, read_rows
from volley.train.documents import Document
from volley.tune import run
from volley.tune.data import ANSWER_TOKENS, Pace, held_out_prompts, progress_line
from volley.tune.options import TuneConfig
from volley.tune.run import Tuning, batch_tokens, read_together, tune
from volley.tune.state import alone_in

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "gemma3_text": Gemma3TextConfig(**SHAPE, **MIXED, query_pre_attn_scalar=8),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, moe_intermediate_size=24),
    "gpt_oss": GptOssConfig(**SHAPE, **MIXED, **EXPERTS, num_local_experts=4),
}


def make_target(folder: Path, config: PretrainedConfig) -> Path:
    """A random base model: it has no chat template."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder / "target")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "target")
    return folder / "target"


def options(folder: Path, target: Path, **changes: Any) -> TuneConfig:
    prompts = write_rows(folder / "prompts.jsonl", [{"prompt": f"Once {word} upon"} for word in "abcdefgh"])
    given: dict[str, Any] = {
        "max_minutes": 0.02,
        "max_tokens": 12,
        "temperatures": (0.0,),
        "bias": 0.3,
        "dtype": "float32",
    }
    given |= {"target": str(target), "prompts": (str(prompts),), "out": folder / "out"}
    return TuneConfig(**{**given, **changes})


def collected(config: TuneConfig) -> Tuning:
    make_folder(config.out)
    tuning = Tuning(config, lambda _: None)
    tuning.collect()
    return tuning


@pytest.mark.slow
def test_a_run_that_stops_goes_on_behind_its_last_step_and_its_folder_is_a_drafter(tmp_path: Path) -> None:
    config = options(tmp_path, make_target(tmp_path, CONFIGS["llama"]))
    said: list[str] = []

    def stop_at_training(line: str) -> None:
        said.append(line)
        if "[2/6] train" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(config, stop_at_training)
    responses = (config.out / "responses.jsonl").read_bytes()
    out = tune(config, said.append)
    assert [line for line in said if "done before" in line] == [
        "[1/6] collect: done before",
    ]
    assert (out / "responses.jsonl").read_bytes() == responses
    assert read_certificate(out / "certificate.json")["verdict"] == "lossless"
    report = (out / "report.md").read_text()
    assert "| draft vocabulary | all tokens |" in report
    (window,) = [line for line in said if "draft window: " in line]
    kept = read_json(out / "drafter" / "config.json")["draft_window"]
    assert f"the last {kept} tokens" in window
    assert f"| draft window | {kept} |" in report
    for step, words in (("1/6] collect", "min at most"), ("3/6] measure", "at most about"), ("4/6] certify", "about")):
        assert any(re.search(rf"{step}: .*{words} |{step}: .*{words}$", line) for line in said), step
    assert "block size 8, head markov, head rank 16" in report
    assert f"drafter={str(out)!r})" in report
    assert f"volley serve --target {config.target} --drafter {out}\n```" in report
    assert "checks found its output lossless." in report
    assert "Certificate: lossless" in report
    for form in ("speculators", "gguf"):
        assert read_certificate(out / "exports" / form / "certificate.json")["verdict"] == "lossless"
    assert read_checkpoint(out / "exports" / "gguf" / "drafter.gguf").config.block_size == run.BLOCK
    assert (
        read_checkpoint(out).config.target_fingerprint
        == read_checkpoint(out / "exports/speculators").config.target_fingerprint
    )

    engine = Engine.from_pretrained(config.target, drafter=out, dtype=torch.float32, policy="fixed")
    (mine,) = engine.generate("Once", SamplingParams(max_tokens=20))
    (plain,) = Engine(engine.target, block_size=1).generate("Once", SamplingParams(max_tokens=20))
    assert mine.token_ids == plain.token_ids
    again: list[str] = []
    tune(config, again.append)
    assert len(again) == 6
    assert all("done before" in line for line in again)
    with pytest.raises(ConfigError, match="other values of max_tokens; give the same to go on"):
        tune(options(tmp_path, Path(config.target), max_tokens=13), said.append)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "another"}\n')
    with pytest.raises(ConfigError, match="other values of what the files hold; give the same to go on"):
        tune(config, said.append)

    export(out, tmp_path / "written", "speculators", target=config.target)
    assert read_certificate(tmp_path / "written" / "certificate.json")["verdict"] == "lossless"
    export(out, tmp_path / "reduced", "speculators", target=config.target, draft_vocab_size=9, counts=[1] * 260)
    assert not (tmp_path / "reduced" / "certificate.json").exists()


@pytest.mark.slow
def test_a_target_of_a_bundled_drafters_shape_begins_with_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled drafter is measured before the first step, so that what comes out is not worse on held-out prompts."""
    config = options(tmp_path, make_target(tmp_path, CONFIGS["llama"]))
    bundled = tune(config) / "drafter"
    text = read_json(bundled / "config.json")
    shape = {key: text[key] for key in ("hidden_size", "vocab_size")} | {
        "num_target_layers": SHAPE["num_hidden_layers"]
    }
    write_atomically(bundled / "config.json", json.dumps(text | shape))
    monkeypatch.setattr(files, "PUBLISHED_DRAFTERS", {"tiny": bundled})
    monkeypatch.setattr(run, "PUBLISHED_DRAFTERS", files.PUBLISHED_DRAFTERS)
    said: list[str] = []
    out = tune(replace(config, out=tmp_path / "again"), said.append)
    assert any("train: begins with the bundled drafter tiny" in line for line in said)
    assert "| options | begins with the bundled drafter tiny |" in (out / "report.md").read_text()
    evaluations = [row for _, row in read_jsonl(out / "train" / "log.jsonl") if row["kind"] == "eval"]
    assert evaluations[0]["step"] == 0
    assert read_json(out / "tune.json")["done"]["train"]["tau"] >= evaluations[0]["decoded"]["tau"]
    make_folder(tmp_path / "other")
    other = replace(config, block_size=4, out=tmp_path / "other")
    assert Tuning(other, said.append).bundled is None, "a block of another size begins anew"


def test_documents_longer_than_a_batch_are_learnt_from_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a response has blocks by its length once the target has read all; many where it must read during the training."""
    rows = [{"prompt_token_ids": [4 + i] * 40, "response_token_ids": list(range(5, 25 + i))} for i in range(8)]
    data = write_rows(tmp_path / "responses.jsonl", rows)
    target = make_target(tmp_path, CONFIGS["llama"])
    tuning = collected(options(tmp_path, target, prompts=(), data=(str(data),)))
    found = TrainingData(replace(tuning.base, tokens_per_batch=16), tuning.frozen)
    lengths = sorted(len(row["prompt_token_ids"]) + len(row["response_token_ids"]) for row in rows)
    assert sorted([*found.lengths, *map(len, found.held_out)]) == lengths
    monkeypatch.setattr(run, "READ_SHARE", 0.0)
    assert tuning.read(found) == run.ANCHORS
    monkeypatch.setattr(run, "READ_SHARE", 1000.0)
    assert tuning.read(found) == 3
    tuning.frozen.remembered.clear()
    tuning.frozen.remembered.budget = 0
    assert tuning.read(found) == run.ANCHORS


@pytest.mark.parametrize("window", [1, 7, 1000])
def test_every_document_is_read_once_and_no_pass_is_large(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "READ_WINDOW", window)
    monkeypatch.setattr(run, "READ_TOKENS", 100)
    documents = [Document(torch.arange(1 + 37 * i % 130), 0) for i in range(50)]
    passes = list(read_together(documents))
    assert sorted(map(id, chain(*passes))) == sorted(map(id, documents))
    assert all(len(together) == 1 or len(together) * max(map(len, together)) <= 100 for together in passes)


PLACES = {
    "collect": "[1/6] collect: 6 responses",
    "train": "[2/6] train: the best real",
    "measure": "[3/6] measure: T = 0",
    "certify": "  passed  greedy",
    "export": "[5/6] export: written",
    "report": "[6/6] report: ",
}
"""A line that each step says before it is done."""


def killed_at(config: TuneConfig, place: str) -> tuple[int, list[str]]:
    """The status of a fork of this process that tunes and is killed as it says ``place``, and what it has said."""
    heard = config.out.with_name("heard")
    heard.write_text("")
    pid = os.fork()
    if pid == 0:

        def say(line: str) -> None:
            with heard.open("a") as file:
                file.write(f"{line}\n")
            if line.startswith(place):
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            tune(config, say)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1], heard.read_text().splitlines()


@pytest.mark.slow
def test_a_run_that_is_killed_in_each_step_goes_on(tmp_path: Path) -> None:
    """kill −9, in a process of its own, once in each step; what was finished before is not done again."""
    config = options(tmp_path, make_target(tmp_path, CONFIGS["llama"]))
    for number, (step, place) in enumerate(PLACES.items()):
        status, said = killed_at(config, place)
        assert os.WIFSIGNALED(status), f"{step}: {said}"
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert sum("done before" in line for line in said) == max(0, number - 1)  # the step it was killed in goes on
    tune(config, lambda _: None)
    assert read_certificate(config.out / "certificate.json")["verdict"] == "lossless"
    assert (config.out / "report.md").exists()


@pytest.mark.slow
def test_an_endpoint_of_the_same_target_answers_the_prompts(tmp_path: Path) -> None:
    target = make_target(tmp_path, CONFIGS["llama"])
    own = options(tmp_path, target)
    collected(own)
    with running(Engine.from_pretrained(target, drafter=None, dtype=torch.float32)) as server:
        asked = options(tmp_path, target, endpoint=f"{server.url}/v1", out=tmp_path / "asked")
        collected(asked)
    answers = [
        {row["messages"][0]["content"]: row["messages"][1]["content"] for row in read_rows([out / "responses.jsonl"])}
        for out in (own.out, asked.out)
    ]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8


def test_prompts_are_answered_and_judged_with_or_without_thinking(tmp_path: Path) -> None:
    """Responses have token ids, as those of the target here, or text alone, as those of an endpoint."""
    target = make_target(tmp_path, CONFIGS["llama"])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ 'T' if enable_thinking else 'F' }}"
    (target / "chat_template.jinja").write_text(template)
    for thinking, mark, name in ((True, "T", "on"), (False, "F", "off")):
        config = options(tmp_path, target, thinking=thinking, out=tmp_path / name)
        collected(config)
        tokenizer = load_tokenizer(target)
        rows = list(read_rows([config.out / "responses.jsonl"]))
        assert {row["thinking"] for row in rows} == {name}
        prompts = held_out_prompts(config.out, tokenizer, 256)
        assert len(prompts) == 2
        assert all(tokenizer.decode(prompt).endswith(f"upon{mark}") for prompt in prompts)
        held = [
            {key: row[key] for key in ("messages", "thinking")} for row in read_rows([config.out / "held-out.jsonl"])
        ]
        write_rows(config.out / "held-out.jsonl", held)
        assert held_out_prompts(config.out, tokenizer, 256) == prompts


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "qwen3_moe"])
def test_a_target_with_experts_or_sliding_windows_runs_through(tmp_path: Path, family: str) -> None:
    out = tune(options(tmp_path, make_target(tmp_path, CONFIGS[family])), lambda _: None)
    assert read_certificate(out / "certificate.json")["verdict"] == "lossless"
    assert (out / "report.md").exists()


@pytest.mark.slow
def test_a_narrow_target_in_gguf_learns_in_float32_and_serves_in_bfloat16(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", random_model("llama"), "llama", tokenizer=bpe_tokenizer())
    config = options(tmp_path, path, dtype="auto")
    tune(config, lambda _: None)
    tuning = Tuning(config, print)
    assert tuning.serving.dtype == torch.bfloat16
    assert tuning.base.dtype == "float32"
    assert read_certificate(config.out / "certificate.json")["verdict"] == "lossless"


@pytest.mark.slow
def test_what_cannot_be_tuned_is_said_at_once(tmp_path: Path) -> None:
    for changes in ({"data": ("d",)}, {"prompts": ()}, {"prompts": (), "data": ("d",), "endpoint": "http://h"}):
        with pytest.raises(ConfigError, match=r"one of the two|name them with --prompts"):
            TuneConfig(**{"target": "t", "out": tmp_path, "prompts": ("p",), **changes})
    with pytest.raises(ConfigError, match="--thinking is for prompts that are answered here"):
        TuneConfig(target="t", out=tmp_path, data=("d",), thinking=False)
    for changes, said in (
        ({"max_minutes": 0}, "max_minutes is 0; it must be positive"),
        ({"block_size": 1}, "block_size is 1; it must be at least 2"),
        ({"bias": 0}, "bias is 0; it must be between 0 and 0.5"),
    ):
        with pytest.raises(ConfigError, match=said):
            TuneConfig(**{"target": "t", "out": tmp_path, "prompts": ("p",), **changes})
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    few = write_rows(tmp_path / "few.jsonl", [{"messages": chat}])
    with pytest.raises(InputError, match="give at least 4"):
        tune(TuneConfig(target="t", out=tmp_path / "o", data=(str(few),)), lambda _: None)
    ids = [{"prompt_token_ids": [5] * length, "response_token_ids": [6, 7]} for length in (36, 37, 36)]
    write_rows(tmp_path / "held-out.jsonl", ids)
    assert held_out_prompts(tmp_path, byte_tokenizer(), 100) == [[5] * 36]
    tuning = object.__new__(Tuning)
    tuning.out, tuning.serving = tmp_path, cast(Target, SimpleNamespace(tokenizer=byte_tokenizer(), context_length=999))
    for most, prompts in ((100, [[5] * 36]), (101, [[5] * 36, [5] * 37])):
        engine = SimpleNamespace(snapshot=lambda most=most: SimpleNamespace(max_tokens=most))
        assert tuning._held_out(cast(Engine, engine)) == prompts, "an engine may hold less than the target's context"
    with pytest.raises(InputError, match="leaves 64 of the 99 tokens that an engine holds of one; give shorter ones"):
        held_out_prompts(tmp_path, byte_tokenizer(), 99)


def test_a_full_disk_ends_the_exports_and_they_are_made_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(tmp_path, CONFIGS["llama"])
    tuning = Tuning(options(tmp_path, target), print)

    def export_to(*given: Any, **_: Any) -> None:
        error = WriteError if given[2] == "sglang" else ConfigError
        raise error("why")

    monkeypatch.setattr(run, "export", export_to)
    with pytest.raises(WriteError):
        tuning.export()
    monkeypatch.setattr(run, "EXPORTS", {"speculators": ""})
    assert tuning.export() == {"speculators": "why"}


@pytest.mark.parametrize(
    ("seconds", "per_token", "update", "expected"),
    [
        (3600, 2e-4, 0.0, 4096),  # as many as leave four thousand steps
        (1200, 2e-4, 0.15, 2048),  # the optimizer would take two thirds of the 512 that four thousand steps leave
        (180, 2e-4, 0.15, 1024),  # five hundred steps are left
        (60, 2e-4, 0.15, 512),  # not even these
        (10**6, 2e-4, 0.15, 8192),
    ],
)
def test_batches_leave_steps_and_keep_the_optimizer_small(
    seconds: float, per_token: float, update: float, expected: int
) -> None:
    assert batch_tokens(seconds, per_token, update) == expected


@pytest.mark.slow
def test_few_prompts_are_refused_before_anything_is_loaded_or_answered(tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": word} for word in "abca"])
    config = TuneConfig(target="t", out=tmp_path / "o", prompts=(str(prompts),))
    with pytest.raises(InputError, match=r"there are 3 different prompts.*give at least 4"):
        tune(config, lambda _: None)
    assert not (tmp_path / "o" / "tune.json").exists(), "so a longer file goes into the same folder"


def test_what_judges_has_an_answer_and_room_for_another(tmp_path: Path) -> None:
    """Empty answers, and prompts that fill the context, are not held out."""
    target = make_target(tmp_path, CONFIGS["llama"])
    rows = [
        {"prompt_token_ids": [5 + index] * size, "response_token_ids": [7] * answer, "temperature": 0.0}
        for index, (size, answer) in enumerate([(4, 0), (4, 1), (200, 9), (230, 9), (4, 9), (5, 9), (6, 9), (7, 9)])
    ]

    def parted(some: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        data, out = write_rows(tmp_path / "rows.jsonl", some), tmp_path / f"out-{len(some)}"
        collected(TuneConfig(target=str(target), out=out, data=(str(data),), dtype="float32"))
        return tuple(list(read_rows([out / f"{name}.jsonl"])) for name in ("held-out", "train"))  # type: ignore[return-value]

    held, train = parted(rows)
    assert len(held) == 2
    assert all(len(row["prompt_token_ids"]) < 10 for row in held)
    assert len(train) == 4
    assert min(len(row["response_token_ids"]) for row in [*held, *train]) == 9
    with pytest.raises(InputError, match="responses of two tokens or more answer 3 different prompts"):
        parted(rows[:5])
    with pytest.raises(InputError, match="1 prompts leave 64 tokens of the target's context of 256"):
        parted([{**row, "prompt_token_ids": [9 + index] * 200} for index, row in enumerate(rows[2:7])] + rows[7:])


def test_a_folder_that_holds_a_model_is_refused(tmp_path: Path) -> None:
    """A file in the folder would be measured, certified and served instead of the drafter inside."""
    config = options(tmp_path, tmp_path / "target")
    make_folder(config.out)
    (config.out / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds a model \(config\.json\).*give another --out"):
        tune(config, lambda _: None)


def test_one_tuning_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    config = options(tmp_path, tmp_path / "target")
    make_folder(config.out)
    with alone_in(config.out), pytest.raises(ConfigError, match="another volley tune works in"):
        tune(config, lambda _: None)
    with alone_in(config.out):
        pass


def test_another_target_of_the_same_name_is_noticed(tmp_path: Path) -> None:
    target = make_target(tmp_path, CONFIGS["llama"])
    config = options(tmp_path, target)
    collected(config)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(target)
    with pytest.raises(ConfigError, match="other weights of the target; restore them to go on, or give another --out"):
        tune(config, lambda _: None)


def test_prompts_that_judge_the_training_are_those_that_judge_the_pair(tmp_path: Path) -> None:
    """Also where they leave no more room than they must; and so often that a training can stop early."""
    rows = [{"prompt_token_ids": [5 + i] * (256 - ANSWER_TOKENS), "response_token_ids": [7] * 9} for i in range(8)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    target = make_target(tmp_path, CONFIGS["llama"])
    config = options(tmp_path, target, prompts=(), data=(str(data),), max_minutes=60)
    tuning = collected(config)
    training = tuning.training({"anchors": 3, "batch": 512, "minutes": 60.0})
    assert tuning.serving.tokenizer is not None
    judging = held_out_prompts(config.out, tuning.serving.tokenizer, 256)
    assert len(TrainingData(training, tuning.frozen).prompts) == len(judging) == 2
    assert training.max_minutes is not None
    assert training.eval_minutes is not None
    assert training.max_minutes / training.eval_minutes - 1 >= 2 * run.PATIENCE


def test_how_long_collecting_takes_is_said_from_the_beginning() -> None:
    pace = Pace(at_once=64, longest_seconds=0.6)
    assert progress_line(Collected(0, 0, 1000, 0, 0.0), pace) == "0 of 1000 responses, about 10.0 min at most"
    assert progress_line(Collected(0, 400, 1000, 0, 0.0), Pace(16)) == "400 of 1000 responses"
    early, late = (progress_line(Collected(n, 0, 1000, 100 * n, s), pace) for n, s in ((28, 30.0), (968, 484.0)))
    assert early == "28 of 1000 responses, 93 tokens/s, about 7.8 min left"
    assert late == "968 of 1000 responses, 200 tokens/s, about 0.1 min left"


def test_a_certificate_goes_only_with_the_drafter_that_it_names(tmp_path: Path) -> None:
    """Not one that is torn, was changed, or names none."""
    drafter = tmp_path / "drafter"
    shutil.copytree(REFERENCE / "drafter-dflash", drafter)
    mine = drafter_fingerprint(Drafter.from_pretrained(drafter))

    def certificate(**subject: str) -> dict[str, Any]:
        body = {"verdict": "lossless", "subject": subject}
        return {**body, "sha256": digest(body)}

    changed = {**certificate(drafter=mine), "verdict": "not lossless"}
    for number, (text, why) in enumerate(
        [
            ('{"verdict": ', "is not valid JSON"),
            (json.dumps(changed), "was changed after it was written"),
            (json.dumps(certificate(url="http://host")), "names no drafter; run volley certify"),
            (json.dumps(certificate(drafter="0" * 32)), "is of other weights; run volley certify again"),
        ]
    ):
        (drafter / "certificate.json").write_text(text)
        with pytest.warns(UserWarning, match=f"no certificate comes along: .*{why}"):
            export(drafter, tmp_path / str(number), "zlab")
        assert not (tmp_path / str(number) / "certificate.json").exists()
    (drafter / "certificate.json").write_text(json.dumps(certificate(drafter=mine)))
    export(drafter, tmp_path / "whole", "zlab")
    assert read_certificate(tmp_path / "whole" / "certificate.json")["verdict"] == "lossless"
