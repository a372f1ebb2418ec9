"""Make a certified drafter for a model and its traffic in six steps. A killed run continues after its last finished step."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from volley.certify.certificate import certify_pair
from volley.certify.options import CertifyConfig
from volley.engine.capacity import beside_others
from volley.engine.engine import Engine
from volley.errors import ConfigError, VolleyError, WriteError
from volley.files import PUBLISHED_DRAFTERS, absolute, make_folder, published_drafter, read_json, write_atomically
from volley.memory.device import give_back, usable_device
from volley.models.checkpoints.formats import Format
from volley.models.drafters.export import export
from volley.models.layers.fingerprint import target_fingerprint
from volley.models.targets.canvases import check_causal, read_kind
from volley.models.targets.target import Target
from volley.prompts import read_jsonl
from volley.train.data import TrainingData
from volley.train.documents import Document, plan_epoch
from volley.train.features import FrozenTarget, RememberedFeatures
from volley.train.fused import keep_freed_memory
from volley.train.loop import Trainer
from volley.train.options import LONGEST, TrainConfig, filled
from volley.train.parallel import Ranks
from volley.train.presets import preset_for, read_config, training_dtype
from volley.tune.data import ANSWER_TOKENS, digests, held_out_prompts, part, run_collection
from volley.tune.measure import certify_seconds, measure, measure_seconds
from volley.tune.options import TuneConfig
from volley.tune.report import to_markdown
from volley.tune.state import Milestones, alone_in

READ_SHARE = 0.12
"""Most of the minutes, as a share, for reading responses with the target before the training."""
MOST_READ = 0.75
"""Share of cached responses above which all count as read. The others are read in each step that has them."""
READ_WINDOW, READ_TOKENS = 64, 2048
"""Number of responses that are sorted by length together, and tokens of a pass over some of them."""
LEAST_SHARE = 0.25
"""Least share of the minutes for the training itself, however long reading and timing took."""
BATCH, SMALLEST_BATCH, LARGEST_BATCH = 1024, 512, 8192
TIMED_STEPS = 5
ANCHORS = 64
"""Most blocks of a response in a step."""
STEPS = 4000
"""Least number of steps, unless batches would be too small, because short trainings need many steps."""
UPDATE_SHARE, FEWEST_STEPS = 0.25, 500
"""Most of a step's time, as a share, for the optimizer's update, as long as that many steps remain. The update takes as long for
a small batch."""
BLOCK = 8
"""Default of the largest block, anchor included."""
EVALUATIONS, EVALUATION_PROMPTS = 8, 20
MINUTES_BETWEEN = 0.7
"""Least number of minutes between evaluations, if two fit."""
PATIENCE = 3
EXPORTS: dict[Format, str] = {"speculators": "", "sglang": "", "transformers": "", "gguf": "drafter.gguf"}
"""Formats, each with the name of its file, or empty if it is a folder."""


def tune(config: TuneConfig, say: Callable[[str], None] = print) -> Path:
    """Collect, train, measure, certify, export and report. Return ``config.out``, which loads as a drafter.

    Raise ConfigError if the folder holds a model or a run with other options, or if another process tunes in it.
    """
    make_folder(config.out)
    if (config.out / "config.json").exists():
        raise ConfigError(
            f"{config.out} holds a model (config.json), which a tuning would hide behind; give another --out"
        )
    check_causal(config.target, read_kind(config.target)[1])  # raise this error before collecting
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with alone_in(config.out):
        _run(Tuning(config, say), say)
    return config.out


def _run(tuning: "Tuning", say: Callable[[str], None]) -> None:
    steps = (tuning.collect, tuning.train, tuning.measure, tuning.certify, tuning.export, tuning.report)
    for number, step in enumerate(steps, 1):
        name = step.__name__
        if name in tuning.progress:
            say(f"[{number}/{len(steps)}] {name}: done before")
            continue
        tuning.prefix = f"[{number}/{len(steps)}] {name}"
        started = time.monotonic()
        outcome = step()
        tuning.progress[name] = {**outcome, "seconds": round(time.monotonic() - started, 1)}


class Tuning:
    """Steps of a run. Each reads the results of earlier steps from ``progress`` and the folder, and returns its outcome."""

    def __init__(self, config: TuneConfig, say: Callable[[str], None]) -> None:
        self.config, self.out, self._say = config, config.out, say
        self.drafter = config.out / "drafter"
        reporting, files = {"threads", "out"}, {"target", "prompts", "data"}
        given = {key: value for key, value in asdict(config).items() if key not in reporting}
        options = {key: absolute(value) if key in files else value for key, value in given.items()}
        self.progress = Milestones(config.out, {**options, "what the files hold": digests(config)})
        self.prefix = ""

    def say(self, line: str) -> None:
        self._say(f"{self.prefix}: {line}")

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the training."""
        text = read_config(self.config.target).get_text_config()
        return training_dtype(self.config.dtype, text.hidden_size, usable_device(self.config.device))

    @cached_property
    def serving(self) -> Target:
        """Target for decoding: in bf16, as in other commands, unless a data type was given."""
        dtype = torch.bfloat16 if self.config.dtype == "auto" else self.dtype
        target = Target.from_pretrained(self.config.target, dtype=dtype, device=self.config.device)
        self.progress.check_target(target_fingerprint(target.model))
        return target

    def collect(self) -> dict[str, Any]:
        paths, last = self.config.data, 0.0
        if not paths:
            file = self.out / "responses.jsonl"

            def report(line: str) -> None:
                nonlocal last
                self.progress.begin()
                if time.monotonic() - last > 10:
                    last = time.monotonic()
                    self.say(line)

            for refusal in run_collection(self.config, lambda: self.serving, file, report):
                self.say(refusal)
            paths = (str(file),)
            give_back(self.ranks.device)
        found = part(paths, self.out, lambda: self.serving)
        self.say(
            f"{found['rows']} responses to learn from; {found['held_out_prompts']} of {found['prompts']} prompts are held out"
        )
        return found

    @cached_property
    def bundled(self) -> str | None:
        """Name of the bundled drafter from which the training begins: one for a target of this shape, if there is one."""
        text = read_config(self.config.target).get_text_config()
        name = published_drafter(text.hidden_size, text.vocab_size, text.num_hidden_layers)
        if name is None or self.config.block_size is None:
            return name
        size = read_json(PUBLISHED_DRAFTERS[name] / "config.json")["block_size"]
        return name if size == self.config.block_size else None

    @cached_property
    def base(self) -> TrainConfig:
        """Return a training that goes on from the bundled drafter; without one, the preset's, with a Markov head, which other
        programs support too."""
        config, target = self.config, read_config(self.config.target)
        preset, width = preset_for(target), target.get_text_config().hidden_size
        shape: dict[str, Any] = {
            "block_size": config.block_size or BLOCK,
            "num_layers": preset.num_layers,
            "taps": preset.taps,
            "intermediate_size": preset.intermediate_size,
            "head": "markov",
            "head_rank": min(256, max(16, width // 2)),
            "learning_rate": preset.learning_rate,
            "optimizer": preset.optimizer,
        }
        if self.bundled is not None:
            shape = {"init": str(PUBLISHED_DRAFTERS[self.bundled]), "keep_shape": True}
        return TrainConfig(
            **shape,
            target=config.target,
            data=(str(self.out / "train.jsonl"),),
            out=str(self.out / "train"),
            eval_data=str(self.out / "held-out.jsonl"),
            eval_prompts=EVALUATION_PROMPTS,
            eval_max_tokens=ANSWER_TOKENS,
            keep_best=True,
            patience=PATIENCE,
            tokens_per_batch=BATCH,
            anchors_per_sequence=ANCHORS,
            max_length=LONGEST,
            loss_decay="pace",
            device=config.device,
            dtype=str(self.dtype).removeprefix("torch."),
            seed=config.seed,
            log_steps=20,
        )

    @cached_property
    def frozen(self) -> FrozenTarget:
        target = FrozenTarget(self.config.target, self.dtype, self.ranks.device, self.serving)
        self.progress.check_target(target.fingerprint)
        return target

    @cached_property
    def ranks(self) -> Ranks:
        ranks = Ranks(self.config.device)
        if ranks.device.type == "cpu":
            keep_freed_memory()
        return ranks

    def read(self, data: TrainingData) -> int:
        """Read the responses with the target before the training, many in one pass.

        Return the number of blocks of a response. If nearly all features are cached, each token is predicted about once an
        epoch, because blocks of other responses are as cheap and teach more.
        """
        taps, block = preset_for(self.frozen.text_config).taps, self.config.block_size or BLOCK
        if self.bundled is not None:
            begun = read_json(PUBLISHED_DRAFTERS[self.bundled] / "config.json")
            taps, block = tuple(begun["dflash_config"]["target_layer_ids"]), begun["block_size"]
        features = RememberedFeatures(self.frozen, taps, with_final=False)
        order = plan_epoch(data.lengths, filled(self.base.tokens_per_batch), self.base.seed, 0)
        documents = [*data.held_out, *(data.documents[index] for batch in order for index in batch)]
        started, most = time.monotonic(), 60 * READ_SHARE * self.config.max_minutes
        self.say(f"the target reads {len(documents)} responses once, in {most / 60:.1f} minutes at most")
        count = 0
        for together in read_together(documents):
            if time.monotonic() - started > most:
                self.say(f"the target has read {count} of {len(documents)} responses; the rest it reads when they come")
                break
            features.read(together)
            count += len(together)
        anchors = ANCHORS
        known = sum(bool(self.frozen.remembered.of(document)) for document in data.documents)
        if known >= MOST_READ * len(data.documents):
            answered = sum(len(document) - document.response_start for document in data.documents)
            anchors = min(ANCHORS, max(1, round(answered / len(data.documents) / block)))
        return anchors

    def _batch(self, minutes: float) -> int:
        """Time a few steps, and return the tokens of a step with which a training of ``minutes`` has enough steps."""
        timed = replace(self.base, max_steps=TIMED_STEPS, out=str(self.out / "timed"))
        for _ in range(1 if self.ranks.device.type == "cpu" else 2):  # a GPU's first steps load and choose kernels
            trial = Trainer(timed, self.ranks, self.frozen, speaks=False)
            at, started = trial.schedule.position, time.monotonic()
            for _ in range(TIMED_STEPS):
                trial.step(trial.schedule.batch, 0.0)
                trial.schedule.advance()
            at.seconds, updates = time.monotonic() - started, trial.update_seconds
        per_token, update = max(at.seconds - updates, 1e-9) / at.tokens, updates / at.step
        batch = batch_tokens(60 * minutes, per_token, update)
        seconds = batch * per_token + update
        self.say(
            f"{batch / seconds:.0f} tokens a second can be learnt from: {60 * minutes / seconds:.0f} steps of {batch} tokens"
        )
        return batch

    def training(self, plan: dict[str, Any]) -> TrainConfig:
        """Return the training by a plan's ``anchors``, ``batch`` and ``minutes``."""
        minutes: float = plan["minutes"]
        return replace(
            self.base,
            anchors_per_sequence=plan["anchors"],
            tokens_per_batch=plan["batch"],
            eval_minutes=max(minutes / EVALUATIONS, min(MINUTES_BETWEEN, minutes / 2)),
            max_minutes=minutes,
            save_minutes=min(5.0, minutes / 5),
        )

    def train(self) -> dict[str, Any]:
        started, minutes, anchors = time.monotonic(), self.config.max_minutes, ANCHORS

        def left() -> float:
            return max(LEAST_SHARE * minutes, minutes - (time.monotonic() - started) / 60)

        self.say(f"it takes {minutes:g} minutes by the clock, evaluations included")
        # On a GPU the target runs in every step, and one pass serves many blocks.
        if self.ranks.device.type == "cpu":
            anchors = self.read(TrainingData(self.base, self.frozen))
        if "plan" not in self.progress:
            self.base = replace(self.base, anchors_per_sequence=anchors)
            batch = self._batch(left())
            self.progress["plan"] = {"anchors": anchors, "batch": batch, "minutes": left()}
        training = self.training(self.progress["plan"])
        chosen = _named(training) if self.bundled is None else f"begins with the bundled drafter {self.bundled}"
        self.say(f"{chosen}; real τ on held-out prompts every {training.eval_minutes:.1f} minutes")
        make_folder(Path(training.out))
        trainer = Trainer(training, self.ranks, self.frozen, serving=self.serving)
        trainer.resume()
        drafter, at = trainer.run(), trainer.schedule.position
        if not (drafter / "config.json").exists():
            raise ConfigError(f"{drafter} has no drafter; remove {self.out / 'train'} to train again")
        for name in ("config.json", "model.safetensors"):
            write_atomically(self.drafter / name, (drafter / name).read_bytes())
        del self.frozen  # no other step reads it, and its features may fill a quarter of the memory
        is_early = at.worse >= PATIENCE and trainer.schedule.progress() < 1
        stopped = " stopped early: it was getting worse" if is_early else ""
        self.say(f"the best real τ was {at.best_tau:.3f}, after {at.epoch} epochs and {at.step} steps{stopped}")
        config = read_json(self.drafter / "config.json")
        window, drafted = config.get("draft_window"), config.get("draft_vocab_size")
        self.say(f"draft window: {_window(window)}, by what held-out rows lose")
        outcome = {
            "tau": at.best_tau,
            "steps": at.step,
            "epochs": at.epoch,
            "stopped_early": is_early,
            "chosen": chosen,
        }
        if self.bundled is not None:
            rows = (row for _, row in read_jsonl(self.out / "train" / "log.jsonl"))
            outcome["tau_at_first"] = next(row["decoded"]["tau"] for row in rows if row["kind"] == "eval")
        return {**outcome, "draft_window": window, "draft_vocab_size": drafted}

    def measure(self) -> dict[str, Any]:
        engine = self._pair()
        prompts = self._held_out(engine)
        minutes = measure_seconds(engine, prompts, self.config.temperatures) / 60
        self.say(
            "held-out prompts by the pair, by chains of its blocks and by the target alone, in turn; "
            f"at most about {minutes:.1f} minutes"
        )
        found = measure(engine, prompts, self.config.temperatures)
        for row in found["rows"]:
            self.say(f"T = {row['temperature']:g}: τ {row['tau']:.2f}, {row['speedup']:.2f} × plain decoding")
        return found

    def _pair(self) -> Engine:
        device = self.serving.device
        give_back(device)
        return Engine.from_pretrained(self.serving, drafter=self.drafter, device=device, capacity=beside_others(device))

    def certify(self) -> dict[str, Any]:
        engine = self._pair()
        prompts = self._held_out(engine)
        settings = CertifyConfig(bias=self.config.bias, max_tokens=32)
        minutes = certify_seconds(engine, prompts, settings) / 60
        self.say(f"greedy and sampled output against plain decoding, about {minutes:.1f} minutes")
        certificate = certify_pair(engine, prompts, settings, self._say)
        certificate.write(self.out / "certificate.json")
        self.say(f"{certificate.verdict}: {len(certificate.checks)} checks")
        return {"verdict": certificate.verdict, "failed": [check.name for check in certificate.failed]}

    def _held_out(self, engine: Engine) -> list[list[int]]:
        assert self.serving.tokenizer is not None, "a loaded target has a tokenizer"
        return held_out_prompts(self.out, self.serving.tokenizer, engine.snapshot().max_tokens)

    def export(self) -> dict[str, Any]:
        self.say("the drafter for other programs, some seconds")
        written: dict[str, str] = {}
        for form, file in EXPORTS.items():
            folder = self.out / "exports" / form
            try:
                export(self.drafter, folder / file, form, target=self.config.target)
                written[form] = str(folder)
            except WriteError:  # the disk may be full; the step can be repeated
                raise
            except VolleyError as error:  # the format does not support the drafter or its target
                written[form] = str(error)
                continue
            if file:
                write_atomically(folder / "certificate.json", (self.out / "certificate.json").read_bytes())
        made = [form for form in EXPORTS if written[form].startswith(str(self.out))]
        self.say(
            f"written for {', '.join(made) or 'no other program'}; drafter/ is z-lab's format, which volley and vLLM read"
        )
        return written

    def report(self) -> dict[str, Any]:
        path = self.out / "train" / "log.jsonl"
        log = [row for _, row in read_jsonl(path)] if path.exists() else []
        certificate = read_json(self.out / "certificate.json")
        write_atomically(self.out / "report.md", to_markdown(self.progress.done, log, certificate, self.config))
        self.say(
            f"{self.out / 'report.md'}; use it: Engine.from_pretrained({self.config.target!r}, drafter={str(self.out)!r})"
        )
        return {}


def batch_tokens(seconds: float, per_token: float, update: float) -> int:
    """Return the tokens of a step, a power of two, for a training of ``seconds``.

    The training has ``STEPS`` steps, or fewer if batches would be smaller than ``SMALLEST_BATCH``. A step takes ``per_token``
    seconds for each token and ``update`` seconds of the optimizer. If the update would take more than ``UPDATE_SHARE`` of a
    step, batches are larger, as long as ``FEWEST_STEPS`` steps remain.
    """
    for_steps = (seconds / STEPS - update) / per_token
    for_share = update * (1 / UPDATE_SHARE - 1) / per_token
    left = (seconds / FEWEST_STEPS - update) / per_token
    tokens = max(for_steps, min(for_share, left), 1.0)
    return min(LARGEST_BATCH, max(SMALLEST_BATCH, 1 << round(math.log2(tokens))))


def read_together(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Yield ``documents`` in batches of similar lengths, which are sorted within windows, so that passes have little padding."""
    for first in range(0, len(documents), READ_WINDOW):
        together: list[Document] = []
        for document in sorted(documents[first : first + READ_WINDOW], key=len):
            if together and (len(together) + 1) * len(document) > READ_TOKENS:
                yield together
                together = []
            together.append(document)
        yield together


def _window(tokens: int | None) -> str:
    return "the whole context" if tokens is None else f"the last {tokens} tokens"


def _named(config: TrainConfig) -> str:
    """Return the options that differ between trainings."""
    names = ("learning_rate", "optimizer", "num_layers", "block_size", "head", "head_rank", "tokens_per_batch")
    values = {name.replace("_", " "): getattr(config, name) for name in names}
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )
