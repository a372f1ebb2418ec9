"""Rounds of training and judging, in the folder ``rounds/NUMBER``; a restarted process resumes its round.

A round copies the answers it learns from, trains a candidate, judges it and the former drafters on the same answers, and
writes ``verdict.json``. The best of them replaces the drafter that serves.
"""

import json
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from volley.errors import ConfigError
from volley.files import make_folder, read_json, write_atomically
from volley.models.drafters.drafter import Drafter
from volley.recalibrate.gate import LEAST_ROWS, NEWEST_ROWS, choose_recent, judge_former, judge_shift
from volley.recalibrate.options import RecalibrateConfig
from volley.recalibrate.replay import Replayed, replay
from volley.recalibrate.reservoir import Entry, ServedRow, entries, erased_at, read
from volley.recalibrate.state import BASE, Learnt, Standing
from volley.train.features import FrozenTarget
from volley.train.loop import Trainer
from volley.train.options import LONGEST, TrainConfig
from volley.train.parallel import Ranks
from volley.train.presets import preset_for
from volley.train.step import Slots

Event = dict[str, Any]
RECENT = 2
"""Multiple of ``recalibrate_tokens``: a candidate learns from that many tokens of the newest answers, and as many of older
ones."""
BATCH_TOKENS, BLOCKS = 512, 64
"""Maximum tokens of a training step, and blocks of an answer in it."""
EPOCHS = 10
"""Maximum epochs of a round, because few answers are soon memorised."""
RETELL_SECONDS = 60.0
"""Seconds after which a verdict that the server has not recorded is sent again."""
TRAINED_ON = "train.jsonl"


@dataclass(frozen=True)
class RoundPlan:
    """Contents of a round's ``plan.json``."""

    number: int
    base: str
    """Fingerprint of the drafter that the server was given."""
    until: int
    """Number of the last answer that it may learn from."""
    erased_at: int | None = None
    """Time of the last erasure when the round began. If it changes, the answers it learns from are gone."""


class RoundTrainer(Trainer):
    """Trainer that calls ``check`` before each step."""

    def __init__(self, config: TrainConfig, ranks: Ranks, target: FrozenTarget, check: Callable[[], None]) -> None:
        super().__init__(config, ranks, target, speaks=False)
        self.check = check

    def step(self, indices: list[int], progress: float) -> Slots:
        self.check()
        return super().step(indices, progress)


class Recalibration:
    """Work of the training process in small pieces; :meth:`work` is called repeatedly."""

    def __init__(
        self, folder: Path, target: FrozenTarget, path: str, config: RecalibrateConfig, send: Callable[[Event], None]
    ) -> None:
        """Create the work. ``path`` is the path of ``target``. ``send`` sends events to the server."""
        self.folder, self.target, self.path, self.config, self._send = folder.resolve(), target, path, config, send
        self.rounds = self.folder / "rounds"
        self.ranks = Ranks(str(target.device))
        self._told, self._told_at = 0, 0.0

    @property
    def learnt(self) -> Learnt:
        found = Learnt.load(self.folder)
        assert found is not None, "the server writes it first"
        return found

    def work(self) -> bool:
        """Do the next piece of work; return False if there is none."""
        number = self._last_number()
        if number and not self._verdict(number).exists():
            self._finish(number)
            return True
        if number > self.learnt.seen_round:
            if self._told < number or time.monotonic() > self._told_at + RETELL_SECONDS:
                self._send_verdict(number)  # the server was down when it came, or could not record it
            return False
        if not self._is_due(number):
            return False
        following = max(number, self.learnt.seen_round) + 1
        if self._begin(following):
            self._finish(following)
        return True

    # -- rounds ----------------------------------------------------------------------------------------------------
    def _last_number(self) -> int:
        names = [path.parent.name for path in self.rounds.glob("*/plan.json")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def _round(self, number: int) -> Path:
        return self.rounds / f"{number:06d}"

    def _verdict(self, number: int) -> Path:
        return self._round(number) / "verdict.json"

    def _plan(self, number: int) -> RoundPlan:
        return RoundPlan(**read_json(self._round(number) / "plan.json"))

    def _is_due(self, last: int) -> bool:
        until = self._plan(last).until if last else -1
        found = entries(self.folder)
        new = [entry for entry in found if entry.number > until]
        is_half_full = sum(entry.tokens for entry in new) >= self.config.reservoir_tokens / 2  # long prompts
        if sum(entry.answer_tokens for entry in new) < self.config.recalibrate_tokens and not is_half_full:
            return False
        judging = choose_recent(found, [found[-1].number])  # as if a candidate had seen all others
        return len(judging) >= LEAST_ROWS

    def _begin(self, number: int) -> bool:
        """Copy the answers that the round learns from, then write the plan, which starts the round. Return False if they were
        erased meanwhile."""
        self.target.remembered.clear()
        erased = erased_at(self.folder)  # read first, so that a later erasure is noticed
        found = entries(self.folder)
        chosen = choose_rows(found, RECENT * self.config.recalibrate_tokens, number)
        learnt, folder = self.learnt, self._round(number)
        make_folder(folder)
        rows = [
            {"prompt_token_ids": row.prompt, "response_token_ids": row.response, "temperature": row.temperature}
            for row in read(self.folder, chosen)
        ]
        write_atomically(folder / TRAINED_ON, "".join(json.dumps(row) + "\n" for row in rows))
        if erased_at(self.folder) != erased:
            shutil.rmtree(folder)
            return False
        plan = RoundPlan(number, learnt.base, max(entry.number for entry in found), erased)
        write_atomically(folder / "plan.json", json.dumps(asdict(plan)) + "\n")
        self._clean(learnt.in_use, folder)
        return True

    def _clean(self, kept: set[str], begun: Path) -> None:
        """Remove drafters that neither serve nor served, with their training data, except those of the round ``begun``."""
        for folder in self.rounds.iterdir():
            if folder == begun:
                continue
            if not any(name.startswith(f"rounds/{folder.name}/") for name in kept):
                shutil.rmtree(folder, ignore_errors=True)
            else:
                for rest in (*folder.glob("*.jsonl*"), *folder.glob("run-*")):
                    shutil.rmtree(rest) if rest.is_dir() else rest.unlink()

    def _finish(self, number: int) -> None:
        """Train and judge what is left; a round that fails writes the reason into its verdict."""
        plan, folder = self._plan(number), self._round(number)
        try:
            self._check_base(plan)
            self._check_kept(plan)
            verdict = self._judge(plan, self._train(plan))
            self._check_kept(plan)
        except Exception as error:  # any error would recur in the next attempt
            verdict = {"event": "failed", "round": number, "reason": f"{type(error).__name__}: {error}"}
            for rest in [path for path in folder.iterdir() if path.is_dir()]:
                shutil.rmtree(rest)
        write_atomically(folder / "verdict.json", json.dumps(verdict) + "\n")
        (folder / TRAINED_ON).unlink(missing_ok=True)
        self._send_verdict(number)

    def _send_verdict(self, number: int) -> None:
        self._told, self._told_at = number, time.monotonic()
        self._send(read_json(self._verdict(number)))

    def _train(self, plan: RoundPlan) -> Standing:
        """Train a candidate in ``rounds/NUMBER/full``, with the run in ``run-full`` beside it.

        Training begins from the drafter that the server was given. A drafter that learnt the same answers before would learn less
        from them and do worse on others.
        """
        folder, kind = self._round(plan.number), "full"
        made = Standing(f"rounds/{folder.name}/{kind}", kind, plan.until)
        if (folder / kind / "model.safetensors").exists():
            return made
        config, target = self.config, self.target
        preset = preset_for(target.text_config)
        options = TrainConfig(
            target=self.path,
            data=(str(folder / TRAINED_ON),),
            out=str(folder / f"run-{kind}"),
            eval_share=0.0,
            eval_prompts=0,
            init=str(self.folder / BASE),
            keep_shape=True,
            optimizer=preset.optimizer,
            learning_rate=config.recalibrate_learning_rate or preset.learning_rate / 2,
            soft_targets=0.5,
            loss_decay="pace",
            tokens_per_batch=BATCH_TOKENS,
            anchors_per_sequence=BLOCKS,
            max_length=LONGEST,
            epochs=EPOCHS,
            max_steps=config.recalibrate_steps,
            seed=plan.number,
            device=str(target.device),
            dtype=str(target.dtype).removeprefix("torch."),
            log_steps=10**9,
            save_minutes=1.0,
        )
        check = partial(self._check_kept, plan)
        trainer = RoundTrainer(options, self.ranks, target, check)
        try:
            trainer.resume()
        except ConfigError:  # the server was restarted with other options
            shutil.rmtree(options.out)
            trainer = RoundTrainer(options, self.ranks, target, check)
        Drafter.from_pretrained(trainer.run(), torch.float32).save_pretrained(folder / kind)
        return made

    # -- judging ---------------------------------------------------------------------------------------------------
    def _judge(self, plan: RoundPlan, made: Standing) -> Event:
        """Compare the best of the candidate and former drafters with the one that serves."""
        self._check_base(plan)
        learnt = self.learnt
        standings = [learnt.current, *{one.folder: one for one in [made, *self._former(learnt)]}.values()]
        until, found = [one.trained_until for one in standings], entries(self.folder)
        chosen = choose_recent(found, until)
        newest = {entry.number for entry in choose_recent(found, until, NEWEST_ROWS)}
        drafters = [self._load(one) for one in standings]
        rows: list[ServedRow] = list(read(self.folder, chosen))
        replayed = replay(drafters, self.target, rows)
        about = {"event": "judged", "round": plan.number}
        if not replayed:
            return {**about, "swap": False, "reason": "there is no answer to judge on"}
        now = standings[0]
        rules = [judge_former if one.trained_until < now.trained_until else judge_shift for one in standings[1:]]
        judged = [rule(replayed, newest, place, 0) for place, rule in enumerate(rules, 1)]
        place = max(range(len(judged)), key=lambda place: (judged[place].is_better, judged[place].gain))
        best, verdict = standings[1 + place], judged[place]
        base = next((i for i, one in enumerate(standings) if one.folder == BASE), None)
        return {
            **about,
            **verdict.to_json(),
            **asdict(best),
            "base": learnt.base,
            "before": learnt.current.folder,
            "tau": verdict.tau,
            "swap": verdict.is_better,
            "tau_base": None if base is None else verdict.tau_before * _over(replayed, base),
            "gains": {one.folder: round(own.gain, 4) for one, own in zip(standings[1:], judged, strict=True)},
        }

    def _check_base(self, plan: RoundPlan) -> None:
        """Refuse a round that began with another drafter: with another shape, a candidate may have a higher τ and be slower."""
        if plan.base != self.learnt.base:
            raise ConfigError(
                "the server was given another drafter in the meantime; the next round begins from that one"
            )

    def _check_kept(self, plan: RoundPlan) -> None:
        """Refuse a round whose answers were erased since it began."""
        if erased_at(self.folder) != plan.erased_at:
            raise ConfigError("its training data was erased in the meantime; the next round learns from new answers")

    def _former(self, learnt: Learnt) -> list[Standing]:
        former = [] if learnt.previous is None else [learnt.previous]
        return [one for one in [*former, Standing()] if one.folder != learnt.current.folder][: 1 + len(former)]

    def _load(self, standing: Standing) -> Drafter:
        return Drafter.from_pretrained(self.folder / standing.folder, self.target.dtype).to(self.target.device)


def _over(replayed: Sequence[Replayed], drafter: int) -> float:
    """Return the ratio of a drafter's τ to that of the serving one."""
    return sum(row.cycles[0] for row in replayed) / sum(row.cycles[drafter] for row in replayed)


def choose_rows(found: Sequence[Entry], tokens: int, seed: int) -> list[Entry]:
    """Return the answers that a round learns from: the newest of ``tokens`` in all, and as many of the older ones, drawn at
    random.

    Prompts do not count. A client with more than all others together contributes at most as much as these, or half of ``tokens``.
    """
    rows = [entry for entry in found if not entry.held_out]
    held: dict[str, int] = defaultdict(int)
    for entry in rows:
        held[entry.client] += entry.answer_tokens
    most = {client: max(tokens // 2, sum(held.values()) - own) for client, own in held.items()}
    newest = _take(reversed(rows), tokens, most)
    taken = {entry.number for entry in newest}
    older = [entry for entry in rows if entry.number not in taken]
    random.Random(seed).shuffle(older)
    return sorted([*newest, *_take(older, tokens, most)], key=lambda entry: entry.number)


def _take(rows: Any, tokens: int, most: dict[str, int]) -> list[Entry]:
    """Return the first of ``rows`` with answers of ``tokens`` in all, within each client's budget in ``most``, which is
    counted down."""
    taken: list[Entry] = []
    for entry in rows:
        if tokens <= 0:
            break
        if most[entry.client] > 0 or len(most) == 1:
            most[entry.client] -= entry.answer_tokens
            tokens -= entry.answer_tokens
            taken.append(entry)
    return taken
