"""Train a drafter for a frozen target: ``train`` is the whole run, ``Trainer.step`` the recipe (DFlash §4.2, §A.1)."""

import math
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from volley.errors import ConfigError, InputError
from volley.models.adapter import AdapterConfig, attach, drafter_fingerprint, merge, save_adapter
from volley.models.checkpoint import make_folder
from volley.models.drafter import Drafter
from volley.train.anchors import draw_anchors
from volley.train.cache import FeatureCache
from volley.train.data import Document, Row, encode_rows, fingerprint, plan_epoch, prompt_ids, read_rows, split_batches
from volley.train.evaluate import evaluate_tau
from volley.train.features import FeatureSource, FrozenTarget, OnlineFeatures
from volley.train.fused import fuse, keep_freed_memory
from volley.train.losses import accepted_prefix
from volley.train.optimizer import MuonWithAdamW
from volley.train.options import TrainConfig
from volley.train.parallel import Ranks
from volley.train.report import Reporter
from volley.train.server import ServerFeatures
from volley.train.shape import choose_mask_token, drafter_config, drafter_to_adapt, start_from
from volley.train.state import (
    NAME,
    Position,
    check_same_run,
    describe,
    load_state,
    restore_training_state,
    save_state,
    training_state,
    whole_weights,
)
from volley.train.step import BlockForward, StepFunction

EVAL_DOCUMENTS = 128
CPU_ROWS = 4096  # rows at a time on a CPU: tensors of more come fresh from the kernel each time, slower than arithmetic


def train(config: TrainConfig) -> Path:
    """Train, or go on with, the run in ``config.out``; returns the folder of the drafter or adapter."""
    if config.threads:
        torch.set_num_threads(config.threads)
    make_folder(Path(config.out))  # before anything that takes long
    ranks = Ranks(config.device, config.fsdp)
    if ranks.device.type == "cpu":
        keep_freed_memory()
    try:
        trainer = Trainer(config, ranks)
        trainer.resume()
        return trainer.run()
    finally:
        ranks.close()


def learning_rate_scale(progress: float, warmup: float) -> float:
    """Linear rise over ``warmup`` (from a hundredth), cosine to zero over the rest; ``progress`` in [0, 1]."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


class Data:
    """What is trained on (``documents``) and what is held out (``held_out``, and ``prompts`` for the engine)."""

    def __init__(self, config: TrainConfig, target: FrozenTarget) -> None:
        self.target = target
        longest = config.max_length or config.tokens_per_batch
        context = getattr(target.text_config, "max_position_embeddings", longest)
        self.max_length = min(longest, context)
        rows, held_rows = self._split(config)
        self.documents = self._encode(rows)
        if not self.documents:
            raise InputError(
                f"no row of {', '.join(config.data)} has two response tokens within {self.max_length} tokens; "
                "collect longer responses, or raise --max-length"
            )
        self.dropped = len(rows) - len(self.documents)
        self.held_out = self._encode(held_rows)[:EVAL_DOCUMENTS]
        prompts = [prompt_ids(target.tokenizer, row) for row in held_rows[: config.eval_prompts]]
        self.prompts = [prompt for prompt in prompts if 0 < len(prompt) <= context - config.eval_max_tokens]
        self.lengths = [len(document) for document in self.documents]
        self.response_tokens = sum(len(document) - document.response_start for document in self.documents)
        self.fingerprint = fingerprint(self.documents)

    @staticmethod
    def _split(config: TrainConfig) -> tuple[list[Row], list[Row]]:
        rows = read_rows(config.data)
        if config.eval_data is not None:
            return rows, read_rows([config.eval_data])
        held = set(random.Random(config.seed).sample(range(len(rows)), int(len(rows) * config.eval_share)))
        return [row for index, row in enumerate(rows) if index not in held], [rows[index] for index in sorted(held)]

    def _encode(self, rows: list[Row]) -> list[Document]:
        encoded = encode_rows(self.target.tokenizer, rows, self.max_length, self.target.stop_token_ids)
        encoded = [document for document in encoded if len(document) - document.response_start >= 2]
        for document in encoded:
            if not 0 <= int(document.token_ids.min()) <= int(document.token_ids.max()) < self.target.vocab_size:
                raise InputError(
                    f"a row has a token id outside the target's vocabulary of {self.target.vocab_size}; "
                    "its token ids come from another target: collect it again"
                )
        return encoded


class Trainer:
    """One run: data, target, drafter, optimizer and where it stands."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        self.out = Path(config.out)
        self.reporter = Reporter(self.out, ranks.first)
        self.target = FrozenTarget(
            config.target, getattr(torch, config.dtype), ranks.device, with_layers=config.feature_server is None
        )
        self.data = Data(config, self.target)
        self.facts = {"target": self.target.fingerprint, "data": self.data.fingerprint}
        self.adapter: AdapterConfig | None = None
        torch.manual_seed(config.seed)
        drafter = self._new_drafter() if config.lora_rank is None else self._adapted_drafter(config.lora_rank)
        self.shape = drafter.config
        if not config.compile:
            fuse(drafter)
        self.model = BlockForward(drafter, self._attention())
        ranks.shard(self.model)
        if config.compile:
            self.model.compile(dynamic=True)
        self.step_function = StepFunction(config, self.target, self.shape, self.model)
        self.optimizer = self._optimizer()
        self.position = Position()
        self.online = self._feature_source()
        self.source: FeatureSource | FeatureCache = self.online
        self.losses: list[float] = []
        self.interrupted = False

    def _new_drafter(self) -> Drafter:
        config, texts = self.config, [*self.data.documents, *self.data.held_out]
        mask = choose_mask_token(self.target.tokenizer, self.target.vocab_size, texts, config.mask_token_id)
        drafter = Drafter(drafter_config(config, self.target.model, mask)).to(self.ranks.device)
        if config.init is not None:
            start_from(drafter, config.init)
        return drafter

    def _adapted_drafter(self, rank: int) -> Drafter:
        assert self.config.init is not None, "TrainConfig has checked it"
        drafter = drafter_to_adapt(self.config.init, self.target.model).to(self.ranks.device)
        self.facts["drafter"] = drafter_fingerprint(drafter)
        self.adapter = AdapterConfig(r=rank, lora_alpha=2.0 * rank, drafter=self.facts["drafter"])
        attach(drafter, self.adapter)
        return drafter

    def _feature_source(self) -> FeatureSource:
        config, taps, with_final = self.config, self.shape.target_layer_ids, self.step_function.objective.needs_target
        if config.feature_server is None or config.feature_dir is None:
            return OnlineFeatures(self.target, taps, with_final)
        longest = max(len(document) for document in [*self.data.documents, *self.data.held_out])
        return ServerFeatures(self.target, taps, with_final, config.feature_server, Path(config.feature_dir), longest)

    def _attention(self) -> str:
        if self.config.attention != "auto":
            return self.config.attention
        return "flex" if self.ranks.device.type == "cuda" else "grouped"

    def _parameters(self) -> list[nn.Parameter]:
        """What learns."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _optimizer(self) -> torch.optim.Optimizer:
        parameters, config = self._parameters(), self.config
        matrices, vectors = ([p for p in parameters if (p.ndim > 1) == wanted] for wanted in (True, False))
        if config.optimizer == "muon":
            return MuonWithAdamW(matrices, vectors, config.learning_rate, config.weight_decay)
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=config.learning_rate, fused=not self.ranks.sharded)

    # State

    def resume(self) -> None:
        """Go on from the checkpoint in ``out``, if there is one."""
        state = load_state(self.out / NAME)
        if not self.ranks.all_see(-1 if state is None else state["position"]["step"]):
            raise ConfigError(
                f"not every process sees the same {self.out / NAME}; put --out on a file system that all nodes share"
            )
        if state is None:
            return
        check_same_run(self.out / NAME, state, describe(self.config), self.facts)
        restore_training_state(self.model, self.optimizer, state["training"], self.ranks.sharded)
        self.position = Position(**state["position"])
        self.reporter.say(f"going on from step {self.position.step} in {self.out}")

    def save(self) -> None:
        training = training_state(self.model, self.optimizer, self.ranks.sharded)
        if self.ranks.first:
            state = {"options": describe(self.config), "facts": self.facts, "position": asdict(self.position)}
            save_state(self.out / NAME, {**state, "training": training})
        self.saved_at = time.monotonic()

    def drafter(self) -> Drafter | None:
        """A copy of the drafter as it stands, on the first process; every process of a sharded run must ask."""
        weights = whole_weights(self.model, self.ranks.sharded)
        if not self.ranks.first:
            return None
        copy = Drafter(self.shape)
        if self.adapter is not None:
            attach(copy, self.adapter)
        copy.load_state_dict({name.removeprefix("drafter."): tensor for name, tensor in weights.items()})
        merge(copy)
        return copy

    # Training

    def run(self) -> Path:
        """Train until the first bound is reached; an interrupt saves the checkpoint and ends the run."""
        self._prepare()
        at, config = self.position, self.config
        with self._interrupts():
            while self.progress() < 1 and not self._agree(self.interrupted):
                started = time.monotonic()
                correct, valid = self.step(self.batches[at.batch], self.progress())
                self._advance()
                at.seconds += time.monotonic() - started
                if at.step % config.log_steps == 0:
                    self._log(correct, valid)
                if self._due(config.eval_steps, config.eval_minutes, self.evaluated_at):
                    started = time.monotonic()
                    self.evaluate()
                    at.seconds += time.monotonic() - started
                if self._due(config.save_steps, config.save_minutes, self.saved_at):
                    self.save()
        self.save()
        if self.interrupted:
            raise KeyboardInterrupt(f"stopped after step {at.step}; the same command goes on from there")
        self.evaluate()
        return self.product

    @property
    def product(self) -> Path:
        """The folder of what the run makes."""
        return self.out / ("drafter" if self.adapter is None else "adapter")

    def _prepare(self) -> None:
        self._describe()
        if self.config.features == "cache":
            directory = Path(self.config.cache_dir or self.out / "features")
            facts = {name: self.facts[name] for name in ("target", "data")}
            self.source = FeatureCache(directory, self.data.documents, self.online, facts)
            self.source.build(self.ranks, self.reporter.say)
        self._plan()
        self.reporter.start(self.position)
        self.saved_at = self.evaluated_at = time.monotonic()

    def _plan(self) -> None:
        config = self.config
        self.batches = plan_epoch(self.data.lengths, config.tokens_per_batch, config.seed, self.position.epoch)

    def _advance(self) -> None:
        at = self.position
        at.step, at.batch = at.step + 1, at.batch + 1
        if at.batch == len(self.batches):
            at.epoch, at.batch = at.epoch + 1, 0
            self._plan()

    def progress(self) -> float:
        """How far the run has come, by whichever bound is nearest: 1 is the end."""
        config, at = self.config, self.position
        fractions = [(at.epoch + at.batch / len(self.batches)) / config.epochs]
        if config.max_steps is not None:
            fractions.append(at.step / config.max_steps)
        if config.max_minutes is not None:
            fractions.append(self.ranks.from_first(at.seconds) / (60 * config.max_minutes))
        return min(1.0, max(fractions))

    def _anchors(self, document: Document, index: int, epoch: int) -> list[int]:
        config = self.config
        seed = f"{config.seed}/{epoch}/{index}"
        return draw_anchors(
            document.response_start,
            len(document),
            config.anchors_per_sequence,
            self.shape.block_size,
            config.anchors,
            seed,
        )

    def step(self, indices: list[int], progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw anchors, run this process's share of the documents in passes, and update the weights.

        Returns which slots of the last pass were right and which were valid, ``[N, B − 1]``.
        """
        measure = (self.position.step + 1) % self.config.log_steps == 0
        documents = self.data.documents
        anchors = {index: self._anchors(documents[index], index, self.position.epoch) for index in indices}
        weight = self.step_function.total_weight([documents[index] for index in indices], list(anchors.values()))
        loss = 0.0
        rights, valids = ([torch.empty(0, self.shape.block_size - 1, dtype=torch.bool)] for _ in range(2))
        for part, counts in self._passes(indices, anchors):
            chosen = [documents[index] for index in part]
            features = self.source(chosen, part)
            result = self.step_function(chosen, [anchors[index] for index in part], features, float(counts), measure)
            torch.autograd.backward(result.loss / weight)
            if counts:
                loss += result.loss.item() / weight
                rights.append(result.correct.cpu())
                valids.append(result.valid.cpu())
        self._update(progress)
        self.losses.append(self.ranks.sum(loss) if measure else loss)
        self.position.tokens += sum(self.data.lengths[index] for index in indices)
        self.position.blocks += sum(map(len, anchors.values()))
        return torch.cat(rights), torch.cat(valids)

    def _update(self, progress: float) -> None:
        parameters = self._parameters()
        self.ranks.sum_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, self.config.clip)
        scale = learning_rate_scale(progress, self.config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * scale
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _passes(self, indices: list[int], anchors: dict[int, list[int]]) -> Iterator[tuple[list[int], bool]]:
        """This process's documents, cut where their blocks would exceed ``rows_per_pass`` rows; gradients add up.

        A process without documents, or of a sharded run with fewer passes than another, runs one that does not count: the
        exchange of weights and gradients needs all.
        """
        passes = self._cut(self.ranks.share(indices), anchors)
        most = max(1, len(passes))
        if self.ranks.sharded:
            most = max(len(self._cut(self.ranks.share(indices, rank), anchors)) for rank in range(self.ranks.world))
        for number in range(most):
            yield (passes[number], True) if number < len(passes) else (indices[:1], False)

    def _cut(self, indices: list[int], anchors: dict[int, list[int]]) -> list[list[int]]:
        limit = self.config.rows_per_pass or (CPU_ROWS if self.ranks.device.type == "cpu" else math.inf)
        passes: list[list[int]] = []
        for index in indices:
            most = max(len(anchors[i]) for i in [*(passes[-1] if passes else ()), index])
            if not passes or most * (len(passes[-1]) + 1) * self.shape.block_size > limit:
                passes.append([])
            passes[-1].append(index)
        return passes

    def _due(self, steps: int | None, minutes: float | None, last: float) -> bool:
        by_clock = minutes is not None and time.monotonic() - last > 60 * minutes
        return (steps is not None and self.position.step % steps == 0) or (
            minutes is not None and self._agree(by_clock)
        )

    def _agree(self, wanted: bool) -> bool:
        """Whether any process wants it."""
        return self.ranks.sum(float(wanted)) > 0

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Let a first Ctrl-C or SIGTERM end the step at hand; a second one ends the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, _: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            self.reporter.say(f"{signal.Signals(number).name}: saving after this step")

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # Reports

    def _describe(self) -> None:
        data, shape = self.data, self.shape
        count = sum(parameter.numel() for parameter in self._parameters())
        self.summary = {
            "rows": len(data.documents),
            "rows_without_two_response_tokens": data.dropped,
            "tokens": sum(data.lengths),
            "response_tokens": data.response_tokens,
            "held_out_rows": len(data.held_out),
            "parameters": count,
        }
        self.reporter.say(
            f"data: {len(data.documents)} rows, {sum(data.lengths)} tokens, {data.response_tokens} of them in responses; "
            f"{data.dropped} rows too short, {len(data.held_out)} held out for the loss and {len(data.prompts)} for τ"
        )
        self.reporter.say(
            f"{self.product.name}: {shape.num_hidden_layers} layers, {count / 1e6:.2f} M parameters to learn, "
            f"block size {shape.block_size}, taps {list(shape.target_layer_ids)} of {shape.num_target_layers}, "
            f"mask token {shape.mask_token_id}"
        )

    def _log(self, correct: torch.Tensor, valid: torch.Tensor) -> None:
        tau, accuracy = accepted_prefix(correct, valid)
        loss = sum(self.losses) / len(self.losses)
        self.reporter.progress(self.position, self.progress(), loss, float(tau), accuracy.tolist())
        self.losses = []

    def evaluate(self) -> None:
        """Save the drafter and measure it on held-out rows: teacher-forced, and for real."""
        drafter = self.drafter()
        values = self._held_out_metrics() if self.data.held_out and (self.ranks.first or self.ranks.sharded) else {}
        if drafter is not None:
            if self.adapter is None:
                drafter.save_pretrained(self.product)
            else:
                save_adapter(self.product, self.model.drafter, self.adapter)
            if self.data.prompts:
                values["decoded"] = evaluate_tau(
                    drafter,
                    self.config.target,
                    self.data.prompts,
                    max_tokens=self.config.eval_max_tokens,
                    dtype=self.target.dtype,
                    device=str(self.ranks.device),
                )
            facts = {"options": describe(self.config), "fingerprints": self.facts, "data": self.summary}
            self.reporter.evaluation(self.position, values, facts)
        self.ranks.wait()
        self.evaluated_at = time.monotonic()

    @torch.no_grad()
    def _held_out_metrics(self) -> dict[str, Any]:
        held = self.data.held_out
        anchors = {index: self._anchors(document, index, -1) for index, document in enumerate(held)}
        order = sorted(anchors, key=lambda index: len(held[index]))
        loss = weight = 0.0
        rights, valids = [], []
        for batch in split_batches(order, [len(document) for document in held], self.config.tokens_per_batch):
            for part in self._cut(batch, anchors):
                chosen, rows = [held[index] for index in part], [anchors[index] for index in part]
                result = self.step_function(chosen, rows, self.online(chosen, part))
                loss += result.loss.item()
                weight += self.step_function.total_weight(chosen, rows)
                rights.append(result.correct.cpu())
                valids.append(result.valid.cpu())
        tau, accuracy = accepted_prefix(torch.cat(rights), torch.cat(valids))
        return {"loss": loss / weight, "tau": float(tau), "accuracy": [round(x, 4) for x in accuracy.tolist()]}
