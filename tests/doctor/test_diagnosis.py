"""Each fault planted in the bundled pair is the first that is named, and the pair as it is gets silence."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.doctor.answers import TARGET, write_answers
from volley import Engine
from volley.chat import template_digest
from volley.doctor.diagnosis import Doctor, evenly
from volley.engine.kv_manager import TargetPages
from volley.errors import CheckpointError, InputError
from volley.files import REFERENCE
from volley.models.diagnosis import diagnose
from volley.models.drafters.export import export
from volley.models.targets.target import load_tokenizer
from volley.procedures.request import Request
from volley.tensors import load_tensors, save_tensors
from volley.train.features import FrozenTarget


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy answers of the bundled target, as ``volley collect`` writes them."""
    return write_answers(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def fingerprint() -> str:
    return FrozenTarget(TARGET, torch.float32, torch.device("cpu")).fingerprint


@pytest.fixture
def drafter(tmp_path: Path, fingerprint: str) -> Path:
    """The bundled drafter in a folder of its own, with a report of its training."""
    shutil.copytree(REFERENCE / "drafter-dflash", tmp_path / "drafter")
    note(tmp_path / "drafter", fingerprints={"target": fingerprint})
    return tmp_path / "drafter"


def note(folder: Path, **facts: Any) -> None:
    data = {"longest": 512, "temperatures": [0.0, 1.0], "thinking": ["None"], **facts.pop("data", {})}
    report = {"options": {"dtype": "float32"}, "data": data, **facts}
    (folder / "training_report.json").write_text(json.dumps(report))


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def altered(rows: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Return a file of the rows after ``change`` was called with each."""
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    for row in found:
        change(row)
    file = folder / "altered.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    return file


def names(drafter: Path, rows: Path, target: str = TARGET, **served: Any) -> list[str]:
    return [finding.name for finding in Doctor(target, drafter, [rows], **served).examine().findings]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drafter", "drafter-dflash"])
def test_a_healthy_pair_gets_silence_and_its_tau_is_foretold(rows: Path, name: str) -> None:
    drafter = REFERENCE / name
    engine = Engine.from_pretrained(drafter=drafter, dtype=torch.float32)
    found = Doctor(TARGET, drafter, [rows], temperature=0.0, block_size=8).examine(engine)
    assert found.findings == []
    assert found.measured is not None
    assert found.expected == pytest.approx(found.measured, rel=0.02)


def shift_taps(config: dict[str, Any]) -> None:
    dflash = config["dflash_config"]
    dflash["target_layer_ids"] = [tap + 1 for tap in dflash["target_layer_ids"]]


def turn(config: dict[str, Any]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 3.0


@pytest.mark.slow
@pytest.mark.parametrize(("change", "name"), [(shift_taps, "taps shifted by one"), (turn, "rotary settings")])
def test_a_wrong_setting_is_named(
    drafter: Path, rows: Path, change: Callable[[dict[str, Any]], None], name: str
) -> None:
    edit(drafter, change)
    assert names(drafter, rows)[:1] == [name]


@pytest.mark.slow
def test_a_replaced_head_and_a_wrong_table(drafter: Path, rows: Path, tmp_path: Path) -> None:
    counts = list(range(json.loads(Path(TARGET, "config.json").read_text())["vocab_size"], 0, -1))
    export(
        REFERENCE / "drafter-dflash",
        tmp_path / "own",
        "zlab",
        target=TARGET,
        draft_vocab_size=len(counts) - 7,
        counts=counts,
    )
    weights = tmp_path / "own" / "model.safetensors"
    tensors = load_tensors(weights)
    shuffled = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(0))
    save_tensors(weights, {**tensors, "lm_head.weight": tensors["lm_head.weight"][shuffled]})
    assert names(tmp_path / "own", rows)[:1] == ["wrong d2t"]
    save_tensors(weights, {**tensors, "lm_head.weight": torch.randn(tensors["lm_head.weight"].shape)})
    assert names(tmp_path / "own", rows)[:1] == ["replaced head"]
    save_tensors(weights, tensors)
    assert names(tmp_path / "own", rows) == []


@pytest.mark.slow
def test_another_mask_and_a_mask_in_the_text(drafter: Path, rows: Path) -> None:
    answers = [json.loads(line)["response_token_ids"] for line in rows.read_text().splitlines()]
    token, _ = Counter(token for answer in answers for token in answer).most_common(1)[0]

    def replace(config: dict[str, Any]) -> None:
        config["dflash_config"]["mask_token_id"] = token

    edit(drafter, replace)
    assert names(drafter, rows) == ["mask token", "mask token in text"]


@pytest.mark.slow
def test_a_mask_that_prompts_hold(drafter: Path, rows: Path, tmp_path: Path) -> None:
    """The drafter's own mask stands in every tenth place of the prompts; it drafts as well as it can."""

    def mask(row: dict[str, Any]) -> None:
        row["prompt_token_ids"] = [
            3 if place % 10 == 9 else token for place, token in enumerate(row["prompt_token_ids"])
        ]
        del row["messages"]

    assert names(drafter, altered(rows, tmp_path, mask))[:1] == ["mask token in text"]


@pytest.mark.slow
def test_what_is_served_otherwise_than_it_was_trained(drafter: Path, rows: Path, fingerprint: str) -> None:
    assert names(drafter, rows, block_size=2) == ["block size"]
    note(drafter, fingerprints={"target": fingerprint}, data={"temperatures": [0.0], "thinking": ["off"]})
    found = names(drafter, rows, block_size=12, temperature=1.0)
    assert found == ["thinking mode", "temperature not trained for", "block size"]


@pytest.mark.slow
def test_context_beyond_training(drafter: Path, rows: Path, fingerprint: str, tmp_path: Path) -> None:
    """Answers that the drafter cannot follow from a place on, which is where its training ended, or is not."""
    starts, random = list[int](), Random(0)

    def confuse(row: dict[str, Any]) -> None:
        row["response_token_ids"][20:] = random.choices(range(100, 8000), k=60)
        starts.append(len(row["prompt_token_ids"]) + 20)

    long = altered(rows, tmp_path, confuse)
    assert names(drafter, long) == []
    note(drafter, fingerprints={"target": fingerprint}, data={"longest": max(starts)})
    assert names(drafter, long) == ["context beyond training"]
    assert names(drafter, rows) == []


@pytest.mark.slow
def test_answers_to_prompts_of_another_template(drafter: Path, rows: Path, tmp_path: Path) -> None:
    cut = altered(rows, tmp_path, lambda row: row.update(prompt_token_ids=row["prompt_token_ids"][3:]))
    assert names(drafter, cut) == ["chat template"]
    other = altered(rows, tmp_path, lambda row: row.update(chat_template="0123456789abcdef"))
    assert names(drafter, other)[:1] == ["chat template"]


class WithoutDraftContext(TargetPages):
    """A prefix hit brings the target's K/V and leaves holes in the drafter's."""

    def match_prefix(self, request: Request, most: int) -> int:
        found = super().match_prefix(request, most)
        if found:
            slots = torch.from_numpy(request.table.slot_array(0, found))
            self.draft_store.move(slots[:1].expand(len(slots)), slots)  # type: ignore[attr-defined]
        return found


@pytest.mark.slow
def test_holes_in_the_prefix_cache(drafter: Path, rows: Path) -> None:
    engine = Engine.from_pretrained(drafter=drafter, dtype=torch.float32, draft_window=0)
    pages = engine.core.kv_manager.pages
    holes = WithoutDraftContext(pages.pool, pages.store, prefix_caching=True)
    assert engine.core.draft_model is not None
    holes.draft_store = engine.core.draft_model.store  # type: ignore[attr-defined]
    engine.core.kv_manager.pages, engine.core.kv_manager.states = holes, (holes, *engine.core.kv_manager.states[1:])
    found = Doctor(TARGET, drafter, [rows]).examine(engine)
    assert [finding.name for finding in found.findings] == ["prefix-cache holes"]


def test_no_answers(drafter: Path, tmp_path: Path) -> None:
    empty = tmp_path / "rows.jsonl"
    empty.write_text(json.dumps({"prompt_token_ids": [5], "response_token_ids": [6]}) + "\n")
    with pytest.raises(InputError, match="none of 1 rows, spread over the data, has three tokens of an answer"):
        Doctor(TARGET, drafter, [empty])


def test_a_drafter_of_a_target_of_another_shape_is_refused(drafter: Path, rows: Path) -> None:
    def deeper(config: dict[str, Any]) -> None:
        config["num_target_layers"] = 99

    edit(drafter, deeper)
    with pytest.raises(CheckpointError, match="number of target layers is 99"):
        Doctor(TARGET, drafter, [rows])


def test_what_inspect_finds_is_said_before_weights_are_loaded(drafter: Path, rows: Path) -> None:
    tensors = load_tensors(drafter / "model.safetensors")
    save_tensors(drafter / "model.safetensors", {name: tensors[name] for name in sorted(tensors)[1:]})
    [problem] = diagnose(drafter, TARGET).problems
    with pytest.raises(CheckpointError, match=f"{re.escape(problem)}$"):
        Doctor(TARGET, drafter, [rows])


@pytest.mark.slow
def test_a_drafter_that_was_trained_with_another_template(drafter: Path, rows: Path, fingerprint: str) -> None:
    own = template_digest(load_tokenizer(TARGET))
    for learnt, expected in (([own], []), (["None"], []), (["0123456789abcdef"], ["chat template"])):
        note(drafter, fingerprints={"target": fingerprint}, data={"chat_templates": learnt})
        assert names(drafter, rows) == expected


@pytest.mark.slow
def test_what_comes_long_behind_the_beginning_of_an_answer(
    drafter: Path, rows: Path, fingerprint: str, tmp_path: Path
) -> None:
    """The end of a long answer, and answers to prompts of any length."""
    random = Random(0)
    long = altered(
        rows, tmp_path, lambda row: row["response_token_ids"].extend(random.choices(range(100, 8000), k=300))
    )
    note(drafter, fingerprints={"target": fingerprint}, data={"longest": 200})
    assert names(drafter, long) == ["context beyond training"]
    row = {**json.loads(long.read_text().splitlines()[0]), "prompt_token_ids": random.choices(range(100, 8000), k=1100)}
    del row["messages"]
    long.write_text(json.dumps(row) + "\n")
    note(drafter, fingerprints={"target": fingerprint}, data={"longest": 900})
    assert "context beyond training" in names(drafter, long)


def test_rows_are_taken_from_the_whole_file() -> None:
    assert evenly(range(100), 4) == [0, 25, 50, 75]
    assert evenly("abc", 24) == ["a", "b", "c"]
