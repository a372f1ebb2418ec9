"""Train a drafter for a frozen target: ``train`` is the whole run, ``Trainer.step`` is the recipe (DFlash §4.2, §A.1)."""

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from volley.errors import ConfigError, InputError
from volley.models.checkpoint import write_atomically
from volley.models.drafter import Drafter
from volley.train.anchors import draw_anchors
from volley.train.data import Document, Row, encode_rows, fingerprint, plan_epoch, prompt_ids, read_rows, split_batches
from volley.train.evaluate import evaluate_tau
from volley.train.features import FrozenTarget, OnlineFeatures
from volley.train.losses import accepted_prefix
from volley.train.options import TrainConfig
from volley.train.parallel import Ranks
from volley.train.shape import choose_mask_token, drafter_config
from volley.train.state import NAME, Position, check_same_run, describe, load_state, save_state
from volley.train.step import BlockForward, StepFunction, StepResult

EVAL_DOCUMENTS = 128
CPU_ROWS = 4096  # larger tensors than these rows make come fresh from the kernel each time, which costs more than the arithmetic


def train(config: TrainConfig) -> Path:
    """Train, or go on with, the run in ``config.out``; returns the folder of the drafter (z-lab's format)."""
    if config.threads:
        torch.set_num_threads(config.threads)
    ranks = Ranks(config.device)
    try:
        trainer = Trainer(config, ranks)
        trainer.resume()
        return trainer.run()
    finally:
        ranks.close()


def learning_rate_scale(progress: float, warmup: float) -> float:
    """Linear rise over ``warmup``, cosine to zero over the rest; ``progress`` in [0, 1]."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


class Trainer:
    """One run: data, target, drafter, optimizer and where it stands."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        self.out = Path(config.out)
        self.dtype = getattr(torch, config.dtype)
        self.target = FrozenTarget(config.target, self.dtype, ranks.device)
        self._load_data()
        mask = choose_mask_token(
            self.target.tokenizer,
            self.target.model.get_input_embeddings().weight.shape[0],
            [*self.documents, *self.held_out],
            config.mask_token_id,
        )
        torch.manual_seed(config.seed)
        self.drafter = Drafter(drafter_config(config, self.target.model, mask)).to(ranks.device)
        attention = config.attention
        if attention == "auto":
            attention = "flex" if ranks.device.type == "cuda" else "grouped"
        self.model: nn.Module = BlockForward(self.drafter, attention)
        if config.compile:
            self.model.compile(dynamic=True)
        self.step_function = StepFunction(config, self.target, self.drafter, self.model)
        self.source = OnlineFeatures(self.target, self.drafter.config.target_layer_ids, config.soft_targets > 0)
        self.optimizer = self._optimizer()
        self.position = Position()
        self.facts = {"target": self.target.fingerprint(), "data": fingerprint(self.documents)}
        self.losses: list[float] = []
        self.report: dict[str, Any] = {}

    # Data

    def _load_data(self) -> None:
        """Documents to train on, documents and prompts to evaluate on."""
        config = self.config
        rows = read_rows(config.data)
        if config.eval_data is not None:
            held_rows = read_rows([config.eval_data])
        else:
            order = random.Random(config.seed).sample(range(len(rows)), len(rows))
            held = set(order[: int(len(rows) * config.eval_share)])
            held_rows = [rows[index] for index in sorted(held)]
            rows = [row for index, row in enumerate(rows) if index not in held]
        self.documents = self._encode(rows)
        if not self.documents:
            raise InputError(
                f"no row of {', '.join(config.data)} has two response tokens within {self.max_length} tokens; "
                "collect longer responses, or raise --max-length"
            )
        self.held_out = self._encode(held_rows)[:EVAL_DOCUMENTS]
        self.prompts = [prompt_ids(self.target.tokenizer, row) for row in held_rows[: config.eval_prompts]]
        self.lengths = [len(document) for document in self.documents]

    @property
    def max_length(self) -> int:
        return min(self.config.max_length, self.target.text_config.max_position_embeddings)

    def _encode(self, rows: list[Row]) -> list[Document]:
        encoded = encode_rows(self.target.tokenizer, rows, self.max_length, self.target.stop_token_ids)
        vocabulary = self.target.model.get_input_embeddings().weight.shape[0]
        for document in encoded:
            if len(document) and not 0 <= int(document.token_ids.min()) <= int(document.token_ids.max()) < vocabulary:
                raise InputError(f"a row has a token id outside the target's vocabulary of {vocabulary}; collect it again")
        return [document for document in encoded if len(document) - document.response_start >= 2]

    def _anchors(self, document: Document, index: int, epoch: int) -> list[int]:
        config = self.config
        seed = f"{config.seed}/{epoch}/{index}"
        return draw_anchors(
            document.response_start, len(document), config.anchors_per_sequence, config.block_size, config.anchors, seed
        )

    # State

    def _optimizer(self) -> torch.optim.AdamW:
        matrices = [parameter for parameter in self.drafter.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.drafter.parameters() if parameter.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.config.learning_rate, fused=True)

    def resume(self) -> None:
        state = load_state(self.out / NAME)
        if state is None:
            return
        check_same_run(self.out / NAME, state, describe(self.config), self.facts)
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.position = Position(**state["position"])
        self._say(f"going on from step {self.position.step} in {self.out}")

    def save(self) -> None:
        if self.ranks.first:
            state = {
                "options": describe(self.config),
                "facts": self.facts,
                "position": asdict(self.position),
                "drafter": self.drafter.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            save_state(self.out / NAME, state)
        self.saved_at = time.monotonic()

    # Training

    def progress(self) -> float:
        """How far the run has come, by whichever bound is nearest: 1 is the end."""
        config, at = self.config, self.position
        fractions = [(at.epoch + at.batch / max(1, len(self.batches))) / config.epochs]
        if config.max_steps is not None:
            fractions.append(at.step / config.max_steps)
        if config.max_minutes is not None:
            fractions.append(self.ranks.from_first(at.seconds) / (60 * config.max_minutes))
        return min(1.0, max(fractions))

    def step(self, indices: list[int], progress: float) -> StepResult:
        """Draw anchors, run the drafter on this process's share of the documents, and update the weights."""
        measure = (self.position.step + 1) % self.config.log_steps == 0
        anchors = {index: self._anchors(self.documents[index], index, self.position.epoch) for index in indices}
        weight = self.step_function.total_weight([self.documents[i] for i in indices], list(anchors.values()))
        mine = self.ranks.share(indices)
        loss = 0.0
        for part in self._passes(mine or indices[:1], anchors):
            documents = [self.documents[index] for index in part]
            features = self.source(documents, part)
            result = self.step_function(documents, [anchors[i] for i in part], features, 1.0 if mine else 0.0, measure)
            (result.loss / weight).backward()
            loss += result.loss.item() / weight
        parameters = list(self.drafter.parameters())
        self.ranks.sum_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, self.config.clip)
        scale = learning_rate_scale(progress, self.config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss)
        self.position.tokens += sum(self.lengths[index] for index in indices)
        self.position.blocks += sum(map(len, anchors.values()))
        return result

    def _passes(self, indices: list[int], anchors: dict[int, list[int]]) -> Iterator[list[int]]:
        """Cut a step where its blocks would exceed ``rows_per_pass`` rows: their gradients add up."""
        limit = self.config.rows_per_pass or (CPU_ROWS if self.ranks.device.type == "cpu" else math.inf)
        part: list[int] = []
        for index in indices:
            most = max(len(anchors[i]) for i in [*part, index])
            if part and most * (len(part) + 1) * self.config.block_size > limit:
                yield part
                part = []
            part.append(index)
        yield part

    def run(self) -> Path:
        config, at = self.config, self.position
        self.batches = plan_epoch(self.lengths, config.tokens_per_batch, config.seed, at.epoch)
        self._describe()
        self.saved_at = self.evaluated_at = self.logged_at = time.monotonic()
        self.logged = asdict(at)
        while self.progress() < 1:
            started = time.monotonic()
            result = self.step(self.batches[at.batch], self.progress())
            at.step += 1
            at.batch += 1
            if at.batch == len(self.batches):
                at.epoch, at.batch = at.epoch + 1, 0
                self.batches = plan_epoch(self.lengths, config.tokens_per_batch, config.seed, at.epoch)
            at.seconds += time.monotonic() - started
            if at.step % config.log_steps == 0:
                self._log(result)
            if self._due(config.eval_steps, config.eval_minutes, self.evaluated_at):
                started = time.monotonic()
                self.evaluate()
                at.seconds += time.monotonic() - started
            if self._due(config.save_steps, config.save_minutes, self.saved_at):
                self.save()
        self.save()
        self.evaluate()
        return self.out / "drafter"

    def _due(self, steps: int | None, minutes: float | None, last: float) -> bool:
        due = minutes is not None and time.monotonic() - last > 60 * minutes
        due = bool(self.ranks.from_first(float(due)))
        return due or (steps is not None and self.position.step % steps == 0)

    # Reports

    def _say(self, line: str) -> None:
        if self.ranks.first:
            print(line, flush=True)

    def _describe(self) -> None:
        shape = self.drafter.config
        count = sum(parameter.numel() for parameter in self.drafter.parameters())
        responses = sum(len(document) - document.response_start for document in self.documents)
        self.data_summary = {
            "rows": len(self.documents),
            "tokens": sum(self.lengths),
            "response_tokens": responses,
            "held_out_rows": len(self.held_out),
        }
        self._say(
            f"{len(self.documents)} rows, {sum(self.lengths)} tokens ({responses} of them responses), "
            f"{len(self.held_out)} rows held out; about {len(self.batches)} steps an epoch"
        )
        self._say(
            f"drafter: {shape.num_hidden_layers} layers, {count / 1e6:.2f} M parameters, block size {shape.block_size}, "
            f"taps {list(shape.target_layer_ids)} of {shape.num_target_layers}, mask token {shape.mask_token_id}"
        )

    def _record(self, kind: str, values: dict[str, Any]) -> None:
        if self.ranks.first:
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "step": self.position.step, **values}) + "\n")

    def _log(self, result: StepResult) -> None:
        at, now = self.position, time.monotonic()
        tau, accuracy = accepted_prefix(result.correct, result.valid)
        loss = sum(self.losses) / len(self.losses)
        elapsed = now - self.logged_at
        tokens, blocks = ((getattr(at, name) - self.logged[name]) / elapsed for name in ("tokens", "blocks"))
        progress = self.progress()
        remaining = at.seconds * (1 - progress) / max(progress, 1e-9)
        self._say(
            f"step {at.step} epoch {at.epoch} {progress:6.1%} loss {loss:.4f} τ {tau:.3f} accuracy "
            + " ".join(f"{value:.2f}" for value in accuracy.tolist())
            + f" | {tokens:.0f} tok/s {blocks:.0f} blocks/s, {remaining / 60:.1f} min left"
        )
        self._record("train", {"loss": loss, "tau": float(tau), "accuracy": accuracy.tolist(), "seconds": at.seconds})
        self.losses, self.logged_at, self.logged = [], now, asdict(at)

    def evaluate(self) -> None:
        """Save the drafter and measure it on held-out rows: teacher-forced, and for real."""
        if self.ranks.first:
            self.drafter.save_pretrained(self.out / "drafter")
            values: dict[str, Any] = self._held_out_metrics()
            if self.prompts:
                measured = evaluate_tau(
                    self.drafter,
                    self.config.target,
                    self.prompts,
                    max_tokens=self.config.eval_max_tokens,
                    dtype=self.dtype,
                    device=str(self.ranks.device),
                )
                values |= {"real": measured} if measured else {}
            real = f", real τ {values['real']['tau']:.3f}" if "real" in values else ""
            if "tau" in values:
                self._say(f"step {self.position.step} held out: loss {values['loss']:.4f} τ {values['tau']:.3f}{real}")
            self._record("eval", values)
            report = {
                "options": describe(self.config),
                "facts": self.facts,
                "data": self.data_summary,
                "position": asdict(self.position),
                "held_out": values,
            }
            write_atomically(self.out / "training_report.json", json.dumps(report, indent=2) + "\n")
        self.ranks.wait()
        self.evaluated_at = time.monotonic()

    @torch.no_grad()
    def _held_out_metrics(self) -> dict[str, Any]:
        if not self.held_out:
            return {}
        lengths = [len(document) for document in self.held_out]
        order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        totals: list[tuple[float, float, Tensor, Tensor]] = []
        for indices in split_batches(order, lengths, self.config.tokens_per_batch):
            documents = [self.held_out[index] for index in indices]
            anchors = [self._anchors(document, index, -1) for document, index in zip(documents, indices, strict=True)]
            result = self.step_function(documents, anchors, self.source(documents, indices))
            weight = self.step_function.total_weight(documents, anchors)
            totals.append((result.loss.item(), weight, result.correct, result.valid))
        correct, valid = torch.cat([row[2] for row in totals]), torch.cat([row[3] for row in totals])
        tau, accuracy = accepted_prefix(correct, valid)
        loss = sum(row[0] for row in totals) / sum(row[1] for row in totals)
        return {"loss": loss, "tau": float(tau), "accuracy": [round(value, 4) for value in accuracy.tolist()]}
