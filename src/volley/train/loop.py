"""Train a drafter for a frozen target: ``train`` does the whole run, ``Trainer.step`` one step (DFlash §4.2, §A.1)."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from volley.cores import shared_cores
from volley.files import make_folder
from volley.memory.device import synchronise
from volley.models.targets.target import Target
from volley.prompts import read_jsonl
from volley.train.begin import soften
from volley.train.cache import FeatureCache
from volley.train.data import TrainingData
from volley.train.evaluate import HeldOut
from volley.train.features import FeatureSource, FrozenTarget, OnlineFeatures, RememberedFeatures
from volley.train.fused import keep_freed_memory
from volley.train.interrupts import Interrupts
from volley.train.learner import Learner
from volley.train.memory import needs
from volley.train.optimizer import make_optimizer
from volley.train.options import RANDOM, TrainConfig, filled
from volley.train.parallel import Ranks
from volley.train.presets import SMALL_BLOCK, with_preset
from volley.train.report import Reporter
from volley.train.schedule import Interval, Schedule, learning_rate_scale
from volley.train.state import SavedRun
from volley.train.step import Slots, StepFunction
from volley.train.vocabulary import loss_tokens

MOST_BLOCKS = 64
"""Maximum blocks of a response in an epoch if their number is not given."""
_CLEARLY_WORSE = 0.97
MAX_NORM = 1.0
"""Norm of the gradient above which it is scaled down."""
PROBED, PROBED_BLOCKS = 8, 4
"""Number of documents on which a new drafter's loss is probed, and of blocks of each."""


def train(config: TrainConfig, kind: "type[Trainer] | None" = None) -> Path:
    """Begin or continue the run in ``config.out``. Return the folder of the drafter.

    ``kind`` is the trainer of another type of drafter than DFlash's.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    make_folder(Path(config.out))  # before anything that takes long
    ranks = Ranks(config.device)
    for file in (*config.data, *([config.eval_data] if config.eval_data else [])):
        next(read_jsonl(Path(file)), None)
    if ranks.device.type == "cpu":
        keep_freed_memory()
    try:
        trainer = (kind or Trainer)(config, ranks)
        trainer.resume()
        return trainer.run()
    finally:
        ranks.close()


class Trainer:
    """One run: its data, learner, optimizer and position."""

    learner_class: type[Learner] = Learner
    step_class: type[StepFunction] = StepFunction
    online_class: Callable[..., FeatureSource] = OnlineFeatures
    remembered_class: Callable[..., FeatureSource] = RememberedFeatures

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        target: FrozenTarget | None = None,
        *,
        serving: Target | None = None,
        speaks: bool = True,
    ) -> None:
        """Prepare a run. ``target`` is the target of ``config``, if it is loaded already; ``serving`` is the same target for
        decoding."""
        self.ranks = ranks
        self.reporter = Reporter(Path(config.out), ranks.first and speaks)
        if target is None:
            target = FrozenTarget(config.target, getattr(torch, config.dtype), ranks.device)
        config = with_preset(config, target.model.config, ranks.device)
        self.data = TrainingData(config, target)
        self.config = config = replace(config, anchors_per_sequence=_blocks(config, self.data, ranks.device))
        self.schedule = Schedule(config, self.data.lengths, ranks)
        self.learner = self.learner_class(config, target, self.data, ranks)
        tokens = loss_tokens(self.data.documents, target)
        self.step_function = self.step_class(config, target, self.learner.shape, self.learner.model, tokens)
        self.optimizer = make_optimizer(config, self.learner.parameters())
        facts = {"target": target.fingerprint, "data": self.data.fingerprint}
        self.saved_run = SavedRun(config, facts, self.learner.model, self.optimizer, ranks)
        self.source: FeatureSource | FeatureCache = self._feature_source()
        self.held_out = HeldOut(config, self.data, self.step_function, self.source, serving or target.served)
        if config.init in (None, RANDOM):
            soften(self.learner.model.drafter.norm, self._probe)
        self.values: dict[str, Any] = {}
        """Results of the last evaluation."""
        self.update_seconds = 0.0
        """Seconds of the optimizer in all steps, which do not depend on the size of batches."""

    def _feature_source(self) -> FeatureSource:
        step_function, taps = self.step_function, self.learner.shape.target_layer_ids
        remembers = _remembers(self.config, step_function.target.device)
        source = self.remembered_class if remembers else self.online_class
        return source(step_function.target, taps, step_function.objective.soft > 0)

    def _probe(self) -> float:
        """Return the loss of some blocks of the first documents."""
        documents = self.data.documents[:PROBED]
        drawn = [self.step_function.draw_anchors(document, index, 0) for index, document in enumerate(documents)]
        features = self.source(documents, range(len(documents)))
        return self.step_function(documents, [row[:PROBED_BLOCKS] for row in drawn], features).loss.item()

    def resume(self) -> None:
        """Continue from the checkpoint in ``out``, if there is one."""
        position = self.saved_run.restore()
        if position is not None:
            self.schedule.go_on(position)
            self.reporter.say(f"going on from step {position.step} in {self.reporter.out}")

    def run(self) -> Path:
        """Train until the first bound is reached; an interrupt saves the checkpoint and ends the run."""
        self._prepare()
        at, config = self.schedule.position, self.config
        first = at.step + 1
        if config.keep_best and config.init not in (None, RANDOM) and not at.step:
            self.evaluate()  # nothing learnt may be better than the drafter in ``init``
        evaluations = Interval(config.eval_steps, config.eval_minutes, self.ranks)
        saves = Interval(config.save_steps, config.save_minutes, self.ranks)
        with Interrupts(self.reporter.say) as interrupts:
            while self.schedule.progress() < 1 and not self.ranks.any(interrupts.seen) and not self._is_over():
                started = time.monotonic()
                slots = self.step(self.schedule.batch, self.schedule.progress())
                self.schedule.advance()
                at.seconds += time.monotonic() - started
                if at.step == first:
                    self.reporter.first_step(at, self.schedule.progress(), time.monotonic() - started)
                if at.step % config.log_steps == 0:
                    self.reporter.progress(at, self.schedule.progress(), slots)
                if evaluations.due(at.step):
                    started = time.monotonic()
                    self.evaluate()
                    at.evaluation = time.monotonic() - started
                    at.seconds += at.evaluation
                    evaluations.restart()
                    if config.keep_best:  # the checkpoint records the τ of the drafter that was kept
                        self.saved_run.save(at)
                        saves.restart()
                if saves.due(at.step):
                    self.saved_run.save(at)
                    saves.restart()
        self.saved_run.save(at)
        if interrupts.seen:
            raise KeyboardInterrupt(f"stopped after step {at.step}; the same command goes on from there")
        self.evaluate()
        return self.product

    @property
    def product(self) -> Path:
        """Return the folder of the drafter."""
        return self.reporter.out / "drafter"

    def _prepare(self) -> None:
        self.reporter.say(self.data.describe())
        self.reporter.say(self.learner.describe())
        self._check_memory()
        if self.config.features == "cache":
            directory = Path(self.config.cache_dir or self.reporter.out / "features")
            facts = {name: self.saved_run.facts[name] for name in ("target", "data")}
            facts["read"] = "as it decodes" if self.step_function.target.served else "dense"
            cache = FeatureCache(directory, self.data.documents, self.held_out.features, facts)
            cache.build(self.ranks, self.reporter.say)
            self.source = cache
        self.reporter.start(self.schedule.position)

    def _check_memory(self) -> None:
        """Print the memory that the run needs, and refuse a run that does not fit."""
        shape, config, device = self.learner.shape, self.config, self.ranks.device
        found = needs(
            self.step_function.target,
            [*self.data.documents, *self.data.held_out],
            parameters=self.learner.size,
            taps=shape.num_taps + (self.step_function.objective.soft > 0),
            rows=self.step_function.rows_per_pass,
            intermediate_size=shape.intermediate_size,
            remembers=_remembers(config, device),
            decodes=bool(self.data.prompts) and self.held_out.serving is None,
        )
        self.reporter.say(found.describe())
        found.check(device)

    @shared_cores()
    def step(self, indices: list[int], progress: float) -> Slots:
        """Draw anchors, run this process's share of the documents in passes, and update the weights.

        Return the results of the slots before the update.
        """
        at, documents = self.schedule.position, self.data.documents
        measure = (at.step + 1) % self.config.log_steps == 0
        anchors = {index: self.step_function.draw_anchors(documents[index], index, at.epoch) for index in indices}
        reveals = {index: self.step_function.draw_reveals(row, index, at.epoch) for index, row in anchors.items()}
        weight = self.step_function.total_weight(
            [documents[index] for index in indices], list(anchors.values()), list(reveals.values())
        )
        loss, slots = 0.0, [Slots.none(self.learner.shape.block_size)]
        for part, counts in self._passes(indices, anchors):
            chosen = [documents[index] for index in part]
            features = self.source(chosen, part)
            rows, given = [anchors[index] for index in part], [own for i in part if (own := reveals[i]) is not None]
            result = self.step_function(chosen, rows, features, float(counts), measure, reveals=given or None)
            torch.autograd.backward(result.loss / weight)
            if counts:
                loss += result.loss.item() / weight
                slots.append(result.slots)
        self._update(progress)
        self.reporter.losses.append(loss)
        if measure:
            self.reporter.losses = [self.ranks.sum(sum(self.reporter.losses)) / len(self.reporter.losses)]
        at.tokens += sum(self.data.lengths[index] for index in indices)
        at.blocks += sum(map(len, anchors.values()))
        return Slots.join(slots)

    def _update(self, progress: float) -> None:
        started = time.monotonic()
        parameters = self.learner.parameters()
        self.ranks.sum_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        scale = learning_rate_scale(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = filled(self.config.learning_rate) * scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronise(self.ranks.device)
        self.update_seconds += time.monotonic() - started

    def _passes(self, indices: list[int], anchors: dict[int, list[int]]) -> Iterator[tuple[list[int], bool]]:
        """Yield this process's documents in passes of at most ``rows_per_pass`` block rows, whose gradients add up.

        A process without documents runs a pass of scale 0, because the exchange of gradients needs all processes.
        """
        passes = self.step_function.split_passes(self.ranks.share(indices), anchors)
        yield from ((part, True) for part in passes)
        if not passes:
            yield indices[:1], False

    def _is_over(self) -> bool:
        """Return True if ``patience`` evaluations in a row were worse than the best. Every process must call this."""
        patience = self.config.patience
        return patience is not None and self.ranks.any(self.schedule.position.worse >= patience)

    def evaluate(self) -> None:
        """Evaluate the drafter on held-out rows, and save it if it is to be kept. Every process must call this."""
        drafter = self.learner.drafter()
        values = self.held_out.teacher_forced() if self.ranks.first else {}
        if drafter is not None:
            window = values.get("draft_window", drafter.config.draft_window)
            trained_on = self.saved_run.facts["target"]
            drafter.config = replace(drafter.config, draft_window=window, target_fingerprint=trained_on)
            values |= self.held_out.decoded(drafter)
            if self._is_best(values) or not self.config.keep_best or not self.product.exists():
                drafter.save_pretrained(self.product)
            facts = {
                "options": self.saved_run.options,
                "fingerprints": self.saved_run.facts,
                "data": {**self.data.summary(), "parameters": self.learner.size},
            }
            self.reporter.evaluation(self.schedule.position, values, facts)
        self.values = values
        self.ranks.wait()

    def _is_best(self, values: dict[str, Any]) -> bool:
        """Return True if no earlier evaluation had a better real τ. Count evaluations that are clearly worse."""
        at, tau = self.schedule.position, float(values.get("decoded", {}).get("tau", 0.0))
        at.worse = at.worse + 1 if tau < _CLEARLY_WORSE * at.best_tau else 0
        is_best, at.best_tau = tau >= at.best_tau, max(tau, at.best_tau)
        return is_best


def _blocks(config: TrainConfig, data: TrainingData, device: torch.device) -> int:
    """Return the most blocks of a response in an epoch.

    One pass of the target serves all blocks of a response, so more blocks are cheap. If features are kept, blocks of other
    responses are as cheap and teach more. So each token of a response is predicted about once.
    """
    if config.anchors_per_sequence is not None:
        return config.anchors_per_sequence
    if not _remembers(config, device) and config.features != "cache":
        return MOST_BLOCKS
    size = config.block_size or SMALL_BLOCK
    return min(MOST_BLOCKS, max(1, round(data.response_tokens / len(data.documents) / size)))


def _remembers(config: TrainConfig, device: torch.device) -> bool:
    return config.features == "memory" or (config.features == "auto" and device.type == "cpu")
