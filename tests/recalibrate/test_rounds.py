"""Rounds make better drafters of what was served, go on after a kill at any moment, and let no poison through."""

import json
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.recalibrate.conftest import Kept
from volley.errors import CheckpointError, ConfigError
from volley.models.drafters.drafter import Drafter
from volley.recalibrate import rounds
from volley.recalibrate.options import RecalibrateConfig
from volley.recalibrate.reservoir import Entry, ServedRow, erase
from volley.recalibrate.rounds import Recalibration, choose_rows
from volley.recalibrate.state import BASE, Learnt, Standing
from volley.tensors import load_tensors
from volley.train.features import target_ends
from volley.train.loop import Trainer
from volley.train.options import TrainConfig
from volley.train.vocabulary import Vocabulary


def act(kept: Kept) -> None:
    """Play the server's reaction to the last event."""
    event = kept.events[-1]
    learnt = replace(kept.learnt, seen_round=max(kept.learnt.seen_round, event["round"]))
    if event.get("swap"):
        learnt = learnt.swapped(
            Standing(event["folder"], event["kind"], event["trained_until"], event["tau"]), event["round"]
        )
    learnt.save(kept.folder)


@pytest.mark.slow
def test_a_drafter_learns_what_is_served_and_gives_way_where_it_does_worse(kept: Kept) -> None:
    work = kept.recalibration(recalibrate_steps=25)
    assert not work.work(), "there is nothing to learn from"
    kept.serve(60)
    assert work.work()
    (event,) = kept.events
    assert event["swap"]
    assert event["kind"] == "full"
    assert event["gain"] > 2 * event["error"] > 0
    assert event["tau_base"] == event["tau_before"]
    assert set(event["gains"]) == {"rounds/000001/full"}
    Drafter.from_pretrained(kept.folder / event["folder"])
    assert not work.work(), "a verdict is told once, and waited for"
    assert len(kept.events) == 1
    assert not (kept.folder / "rounds/000001/train.jsonl").exists(), "what was learnt from goes with the verdict"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "RETELL_SECONDS", 0.0)
        assert not work.work(), "a server that could not note it hears it again"
    assert kept.events == [event, event]
    act(kept)
    assert kept.learnt.current.folder == event["folder"]
    assert kept.learnt.previous == Standing()
    # A drafter that serves and is worse than the one before it gives way in the next round.
    spoilt = Drafter.from_pretrained(kept.folder / event["folder"])
    spoilt.fc.weight.data.zero_()
    spoilt.save_pretrained(kept.folder / "rounds/000009/full")
    last = kept.learnt
    last.swapped(Standing("rounds/000009/full", "full", 59, 9.0), 1).save(kept.folder)
    kept.serve(60)
    assert kept.recalibration(recalibrate_steps=1).work()
    assert (kept.events[-1]["round"], kept.events[-1]["swap"]) == (2, True)
    assert kept.events[-1]["folder"] == event["folder"]
    act(kept)
    assert kept.learnt.roll_backs == 1


@pytest.mark.slow
def test_prompts_longer_than_a_batch_are_learnt_from(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "BATCH_TOKENS", 2)
    kept.serve(60)
    assert kept.recalibration(recalibrate_steps=2).work()
    assert kept.events[-1]["event"] == "judged"


@pytest.mark.slow
def test_all_weights_learn_anew_from_the_given_drafter(kept: Kept) -> None:
    """Whichever drafter serves, and however bad it is."""
    kept.serve(60)
    work = kept.recalibration(recalibrate_steps=2)
    made = {}
    for name in (BASE, "rounds/000009/full"):
        spoilt = Drafter.from_pretrained(kept.folder / BASE)
        spoilt.fc.weight.data.zero_()
        spoilt.save_pretrained(kept.folder / "rounds/000009/full")
        if name != BASE:
            kept.learnt.swapped(Standing(name, "full", 59, 9.0), 0).save(kept.folder)
        assert work.work()
        made[name] = load_tensors(kept.folder / "rounds/000001/full/model.safetensors")
        shutil.rmtree(kept.folder / "rounds")
    one, other = made.values()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
def test_a_round_that_outlives_its_drafter_swaps_nothing_in(kept: Kept) -> None:
    """Its candidate may have another shape than the drafter that serves now, so that a higher τ says nothing."""
    kept.serve(60)
    work = kept.recalibration(recalibrate_steps=3)
    assert os.WIFSIGNALED(killed_at(work, 3))
    other = replace(kept.learnt, base="another")
    other.save(kept.folder)
    assert work.work()
    assert kept.events[-1]["event"] == "failed"
    assert "another drafter in the meantime" in kept.events[-1]["reason"]
    assert json.loads((kept.folder / "rounds/000001/plan.json").read_text())["base"] != other.base


@pytest.mark.slow
def test_random_tokens_never_swap_a_drafter_in(kept: Kept) -> None:
    """Noise has nothing to learn, however much of it comes."""
    rng = random.Random(0)
    for _ in range(60):
        kept.reservoir.add("flood", [rng.randrange(4, 260) for _ in range(6)], rng.choices(range(4, 260), k=32), 0.0)
    work = kept.recalibration(recalibrate_steps=10)
    assert work.work()
    assert not kept.events[-1]["swap"]


@pytest.mark.slow
def test_one_client_alone_swaps_nothing_in_that_does_not_serve_the_others(kept: Kept) -> None:
    """The flood can be learnt by heart; the others have nothing from that."""
    rng = random.Random(1)
    for index in range(60):
        kept.reservoir.add("flood", [4 + index % 200, index // 200], [7, 8, 9, 10] * 8, 0.0)
        kept.reservoir.add("honest", [rng.randrange(4, 260) for _ in range(6)], rng.choices(range(4, 260), k=16), 0.0)
    work = kept.recalibration(recalibrate_steps=25)
    assert work.work()
    event = kept.events[-1]
    assert event["gain"] > 2 * event["error"] > 0, "the flood was learnt"
    assert not event["swap"]
    assert event["reason"].startswith("without one client")


def test_what_one_client_has_more_of_than_all_others_is_cut() -> None:
    rows = [Entry(n, 0, "flood" if n % 10 else "quiet", 10, False) for n in range(1000)]
    chosen = choose_rows(rows, 600, 0)
    quiet = sum(row.tokens for row in chosen if row.client == "quiet")
    flood = sum(row.tokens for row in chosen if row.client == "flood")
    assert quiet > 0
    assert flood <= 1000
    assert [row.number for row in chosen] == sorted({row.number for row in chosen})
    alone = choose_rows([row for row in rows if row.client == "flood"], 600, 0)
    assert sum(row.tokens for row in alone) == 1200


def killed_at(work: Recalibration, write: int) -> int:
    """The status of a fork of this process that does a piece of work and is killed before that many files are written."""
    pid = os.fork()
    if pid == 0:
        writes, put = 0, os.replace

        def replace_or_die(*names: object, **options: object) -> None:
            nonlocal writes
            writes += 1
            if writes == write:
                os.kill(os.getpid(), signal.SIGKILL)
            put(*names, **options)  # type: ignore[call-overload]

        os.replace = replace_or_die  # type: ignore[assignment]
        try:
            work.work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.slow
def test_a_kill_before_any_write_of_a_round_loses_nothing(kept: Kept) -> None:
    """Whichever file is the first not to be written, the next process makes the very candidate that one would have made."""
    kept.serve(40)
    whole, killed = kept.folder, kept.folder.with_name("killed")
    gains = set()
    for write in range(1, 40):
        shutil.copytree(whole, killed)
        kept.folder = killed
        changes = {"recalibrate_steps": 2}
        status = killed_at(kept.recalibration(**changes), write)
        assert kept.learnt.current.folder == BASE
        assert kept.recalibration(**changes).work() or not os.WIFSIGNALED(status), "what was told is told again"
        (event,) = kept.events
        assert (event["event"], event["round"]) == ("judged", 1)
        Drafter.from_pretrained(killed / event["folder"])
        gains.add(event["gains"]["rounds/000001/full"])
        kept.events.clear()
        shutil.rmtree(killed)
        kept.folder = whole
        if not os.WIFSIGNALED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert 6 < write < 39, "a round writes data, plan, checkpoint, drafter and verdict"
    assert len(gains) == 1


@pytest.mark.slow
def test_an_erased_round_fails_and_the_next_one_begins_anew(kept: Kept) -> None:
    kept.serve(60)
    work = kept.recalibration(recalibrate_steps=3)
    assert os.WIFSIGNALED(killed_at(work, 3))
    erase(kept.folder)
    assert work.work()
    assert kept.events[-1]["event"] == "failed"
    act(kept)
    kept.serve(60, seed=5)
    assert work.work()
    assert kept.events[-1]["event"] == "judged"


def test_what_is_erased_while_a_round_begins_is_not_copied(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.serve(60)
    read = rounds.read

    def read_and_erase(folder: Path, chosen: list[Entry]) -> list[ServedRow]:
        found = list(read(folder, chosen))
        erase(folder)
        return found

    monkeypatch.setattr(rounds, "read", read_and_erase)
    work = kept.recalibration()
    assert work.work()
    assert not list(kept.folder.glob("rounds/*"))
    assert not work.work(), "there is nothing to learn from"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["in training", "behind it"])
def test_what_is_erased_in_a_round_ends_in_no_candidate(
    kept: Kept, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.serve(60)
    name = "step" if moment == "in training" else "run"
    piece = getattr(Trainer, name)

    def erase_behind(self: Trainer, *given: object) -> object:
        found = piece(self, *given)
        erase(kept.folder)
        return found

    monkeypatch.setattr(Trainer, name, erase_behind)
    assert kept.recalibration().work()
    assert "was erased in the meantime" in kept.events[-1]["reason"]
    assert {path.name for path in (kept.folder / "rounds/000001").iterdir()} == {"plan.json", "verdict.json"}


@pytest.mark.slow
def test_a_kill_behind_a_new_plan_hides_no_verdict(kept: Kept) -> None:
    """Numbers go on from the last verdict that was noted, also where nothing is left of its round."""
    kept.serve(60)
    assert kept.recalibration(recalibrate_steps=2).work()
    act(kept)
    kept.serve(40, seed=1)
    work = kept.recalibration(recalibrate_steps=2)
    assert os.WIFSIGNALED(killed_at(work, 2)), "before the plan of the second round"
    assert (kept.folder / "rounds/000001/verdict.json").exists()
    shutil.rmtree(kept.folder / "rounds")
    assert kept.recalibration(recalibrate_steps=2).work()
    assert kept.events[-1]["round"] == 2
    assert kept.events[-1]["round"] > kept.learnt.seen_round


@pytest.mark.slow
def test_long_prompts_do_not_count_as_answers(kept: Kept) -> None:
    for index in range(60):
        kept.reservoir.add("a", [4 + index] * 100, [7, 8, 9, 10], 0.0)
    work = kept.recalibration(recalibrate_tokens=500, recalibrate_steps=2)
    assert not work.work(), "240 tokens of answers"
    assert work.config.reservoir_tokens > 2 * 60 * 104
    assert kept.recalibration(recalibrate_steps=2, reservoir_tokens=9000).work(), "the folder holds no more of them"
    chosen = choose_rows([Entry(n, 0, "a", 1000, False, 10) for n in range(100)], 100, 0)
    assert len(chosen) == 20


@pytest.mark.slow
@pytest.mark.parametrize("reduced", [False, True], ids=["all tokens", "some tokens"])
def test_candidates_have_the_shape_of_the_drafter(kept: Kept, reduced: bool) -> None:
    """The draft window that it was measured to need, and the tokens that it drafts."""
    base = Drafter.from_pretrained(kept.folder / BASE)
    base.config = replace(base.config, draft_window=16)
    if reduced:
        base = Vocabulary(100, torch.arange(260), target_ends(kept.target.model)).reduce(base)
    base.save_pretrained(kept.folder / BASE)
    kept.serve(40)
    assert kept.recalibration(recalibrate_steps=2).work()
    made = Drafter.from_pretrained(kept.folder / "rounds/000001/full")
    assert made.config.target_fingerprint is not None, "what was trained names its target"
    assert replace(made.config, target_fingerprint=None) == base.config
    if reduced:
        assert made.lm_head is not None
        assert base.lm_head is not None
        assert torch.equal(made.lm_head.weight.bfloat16(), base.lm_head.weight.bfloat16())
        assert torch.equal(made.d2t, base.d2t)
    assert kept.events[-1]["event"] == "judged"


@pytest.mark.slow
def test_a_round_goes_on_under_other_options_from_its_beginning(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.serve(60)
    options = {"recalibrate_steps": 6}
    monkeypatch.setattr(rounds, "TrainConfig", lambda **own: TrainConfig(**{**own, "save_steps": 1}))
    assert os.WIFSIGNALED(killed_at(kept.recalibration(**options), 6))
    assert list(kept.folder.glob("rounds/000001/run-full/*.pt"))
    assert kept.recalibration(**{**options, "recalibrate_steps": 4}).work()
    assert kept.events[-1]["event"] == "judged"


def test_a_state_of_another_version_is_named_with_the_remedy(kept: Kept) -> None:
    state = kept.folder / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "more": 1}))
    with pytest.raises(CheckpointError, match=r"another version of volley .*'more'.* volley reservoir erase .* --all"):
        Learnt.load(kept.folder)


def test_a_reservoir_without_room_for_a_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="reservoir_tokens is 400; it must be at least recalibrate_tokens, 500"):
        RecalibrateConfig(reservoir_tokens=400, recalibrate_tokens=500)
