"""Choose how to train by trying: short trainings that all anneal to zero, judged on the same held-out rows.

A trial's score is the speed it promises: τ on the held-out rows, by the seconds of a cycle of its shape on this machine.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from volley import native
from volley.engine.engine import Engine
from volley.memory.device import give_back
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.tap_layers import spread_taps
from volley.models.targets.taps import decoder_layers
from volley.models.targets.target import Target
from volley.train.features import FrozenTarget
from volley.train.loop import Trainer
from volley.train.options import TrainConfig, filled
from volley.train.parallel import Ranks
from volley.train.presets import muon_factor
from volley.train.shape import drafter_config

BETTER = 1.02
"""How much better a choice must be than the one before: what two trials of the same options differ by."""
SEES = 1.5
"""The τ of the preset's trial from which on trials can tell options apart: below it, what they differ by is noise."""
TRIAL_BLOCK = 8
BLOCK_SIZES = (4, TRIAL_BLOCK, 12, 16)
"""Block sizes to choose from. A long training accepts so much more than its trials that it is not offered the shortest."""
SHORTER = 1.1
"""How much better a block below ``TRIAL_BLOCK`` must be. A policy verifies fewer tokens of a longer one where they do not pay,
none verifies more than a block has, and the training accepts more than the trial does."""
TIMINGS = 5
SHALLOW = 10
NARROW, MIDDLE = 256, 512


@dataclass(frozen=True)
class Trial:
    """Result of a short training with ``options``."""

    name: str
    options: dict[str, Any]
    tau: float
    """Teacher-forced, on held-out rows."""
    accuracy: list[float]
    """How often each draft position was right, ``[B − 1]``."""
    cycle_seconds: float
    steps: int
    loss: float

    @property
    def score(self) -> float:
        """Expected tokens per second of one request."""
        return self.tau / self.cycle_seconds


@dataclass
class Trainings:
    """Makes trials by training; each leaves nothing but its outcome."""

    base: TrainConfig
    """Its ``max_minutes``, or ``max_steps``, are those of one trial."""
    target: FrozenTarget
    serving: Target
    """The target as it serves, whose passes are timed."""
    ranks: Ranks
    _cycles: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def __call__(self, name: str, options: dict[str, Any], before: Sequence[Trial]) -> Trial:
        """The outcome of ``options``; ``before`` are the trials made so far."""
        folder = Path(self.base.out) / f"trial-{len(before)}"
        shutil.rmtree(folder, ignore_errors=True)
        config = replace(self.base, out=str(folder), **options)
        trainer = Trainer(config, self.ranks, self.target, speaks=False)
        trainer.run()
        values, steps = trainer.values, trainer.schedule.position.step
        drafter = trainer.learner.drafter()
        assert drafter is not None
        del trainer
        give_back(self.ranks.device)
        shutil.rmtree(folder, ignore_errors=True)
        seconds = self._cycle_seconds(drafter, before)
        return Trial(name, options, values["tau"], values["accuracy"], seconds, steps, values["loss"])

    def _cycle_seconds(self, drafter: Drafter, before: Sequence[Trial]) -> float:
        """Measured once for each shape: what is compared must not differ by what else the machine does."""
        config = drafter.config
        shape = (config.num_hidden_layers, config.head, config.block_size)
        if shape not in self._cycles:
            same = [t.cycle_seconds for t in before if self._shape(t) == shape]
            self._cycles[shape] = same[0] if same else self._measure(drafter, before)
        return self._cycles[shape]

    def _measure(self, drafter: Drafter, before: Sequence[Trial]) -> float:
        """Beside the first trial's shape, whose seconds stay as they were measured then."""
        reference = Drafter(drafter_config(self.base, self.target.model, drafter.config.mask_token_id))
        mine, first = cycle_seconds(self.serving, [drafter, reference])
        known = before[0].cycle_seconds if before else first
        return mine / first * known

    def _shape(self, trial: Trial) -> tuple[Any, ...]:
        """Layers, sequential head and block size of a trial that an earlier run made."""
        config = replace(self.base, **trial.options)
        head = HeadConfig(type=config.head, rank=config.head_rank) if config.head != "none" else None
        return config.num_layers, head, config.block_size


@dataclass
class Search:
    """Trials in order: each changes one thing of the best so far."""

    base: TrainConfig
    """The preset. Its ``max_minutes`` are those of one trial."""
    make: Callable[[str, dict[str, Any], Sequence[Trial]], Trial]
    """Makes the trial of a name and options; told of the trials before it."""
    taps: Sequence[int]
    """The larger choice of taps."""
    width: int
    """Hidden size of the target."""
    say: Callable[[str], None]
    trials: list[Trial] = field(default_factory=list)
    """All trials; those of an earlier run come first."""
    note: Callable[[Trial], None] = lambda trial: None
    """Told of each new trial."""
    minutes: float = float("inf")
    """For all trials together; questions that no time is left for keep the preset's answer."""
    spent: Callable[[], float] | None = None
    """The minutes that are gone, by the clock; without it those that the trials trained."""
    few_steps: bool = True
    """True if the training will have so few steps that fast learners stay ahead. Higher rates, smaller batches and fewer
    layers win every short trial; where the training is much longer they are not asked about."""

    def run(self) -> Trial:
        """Try the options one after the other, what usually gains most first; returns the best trial.

        If the preset's own trial accepts too little to judge by, rules choose, and no other trial is made.
        """
        best = self.trial("preset", {})
        if best.tau < SEES:
            self.say(
                f"  trials of this length end at τ {best.tau:.2f}, below {SEES}, and cannot judge options: rules choose"
            )
            return replace(best, name=RULES, options=rules(self.width))
        questions = (self._heads, self._rates, self._layers, self._taps, self._batches, self._targets, self._optimizers)
        for question in questions:
            best = question(best)
        return best

    def trial(self, name: str, options: dict[str, Any]) -> Trial:
        """The outcome of a training of ``options``, from an earlier run if it was made there."""
        found = next((trial for trial in self.trials if trial.options == options), None)
        if found is not None:
            return found
        made = self.make(name, options, self.trials)
        self.trials.append(made)
        self.note(made)
        self.say(f"  {name}: τ {made.tau:.3f} after {made.steps} steps, {1000 * made.cycle_seconds:.2f} ms a cycle")
        return made

    def _compare(self, best: Trial, *options: tuple[str, dict[str, Any]]) -> Trial:
        """The best of ``best`` and changes of it, one after the other until one is no better."""
        for name, change in options:
            changed = {**best.options, **change}
            known = any(trial.options == changed for trial in self.trials)
            if not known and self._minutes_spent() >= self.minutes:
                self.say(f"  {name}: no time is left to try")
                break
            tried = self.trial(name, changed)
            if tried.score <= BETTER * best.score:
                break
            best = tried
        return best

    def _minutes_spent(self) -> float:
        return self.spent() if self.spent is not None else len(self.trials) * (self.base.max_minutes or 0.0)

    def _rates(self, best: Trial) -> Trial:
        """Up, and where that is no better, down."""
        rate = filled(self.base.learning_rate)
        for rates in ((2.5 * rate, 6.25 * rate) if self.few_steps else (), (rate / 2.5, rate / 6.25)):
            found = self._compare(best, *((f"learning rate {rate:.1e}", {"learning_rate": rate}) for rate in rates))
            if found is not best:
                return found
        return best

    def _layers(self, best: Trial) -> Trial:
        """More, and where that is no better, half as many and a quarter."""
        layers = self.base.num_layers or 1
        fewer = dict.fromkeys(max(1, layers // part) for part in (2, 4)) if self.few_steps else {}
        for numbers in ((layers + 1, layers + 2), tuple(number for number in fewer if number < layers)):
            found = self._compare(best, *(_layers_named(number) for number in numbers))
            if found is not best:
                return found
        return best

    def _taps(self, best: Trial) -> Trial:
        taps = ",".join(map(str, self.taps))
        return self._compare(best, (f"taps {taps}", {"taps": taps})) if len(self.taps) > 1 else best

    def _batches(self, best: Trial) -> Trial:
        if not self.few_steps:
            return best
        sizes = [filled(self.base.tokens_per_batch) // factor for factor in (4, 16)]
        return self._compare(best, *((f"batches of {size} tokens", {"tokens_per_batch": size}) for size in sizes))

    def _heads(self, best: Trial) -> Trial:
        """A residual head accepts most; a Markov head is cheaper, and llama.cpp and vLLM have it too."""
        for head in ("residual", "markov"):
            found = self._compare(best, (f"a {head} head", {"head": head, "head_rank": head_rank(self.width)}))
            if found is not best:
                return found
        return best

    def _targets(self, best: Trial) -> Trial:
        """Choose the loss's targets. The mixture is tried in any case: soft targets alone show late."""
        soft = self._compare(best, ("soft targets", {"soft_targets": 0.5}))
        return self._compare(soft, ("total variation", {"soft_targets": 0.3, "total_variation": 0.5}))

    def _optimizers(self, best: Trial) -> Trial:
        muon, factor = self.base.optimizer == "muon", muon_factor(self.width)
        rate = best.options.get("learning_rate") or filled(self.base.learning_rate)
        other = {"optimizer": "adamw" if muon else "muon", "learning_rate": rate / factor if muon else rate * factor}
        return self._compare(best, (str(other["optimizer"]), other))


def _layers_named(number: int) -> tuple[str, dict[str, Any]]:
    return f"{number} layer{'s' if number > 1 else ''}", {"num_layers": number}


RULES = "rules"
"""Name of what was chosen without trials that could judge."""


def rules(width: int) -> dict[str, Any]:
    """Options for a target of hidden size ``width`` whose trials cannot judge: a Markov head, which other programs run too."""
    return {"head": "markov", "head_rank": head_rank(width)}


def head_rank(width: int) -> int:
    """Return the rank of a sequential head for a target of hidden size ``width``."""
    return min(256, max(16, width // 2))


def more_taps(target: FrozenTarget) -> Sequence[int]:
    """All layers of a shallow target but its last, eight of a deep one."""
    depth = len(decoder_layers(target.model))
    return range(depth - 1) if depth <= SHALLOW else spread_taps(8, depth)


def cycle_seconds(target: Target, drafters: Sequence[Drafter]) -> list[float]:
    """Seconds of one cycle of one request with each drafter, measured here and in turn."""
    engines = []
    for drafter in drafters:
        copy = Drafter(drafter.config)
        copy.load_state_dict(drafter.state_dict())
        copy.to(device=target.device, dtype=target.dtype).eval()
        engines.append((Engine(target, copy, num_pages=64, policy="fixed"), drafter.config.block_size))
    rounds = [[engine.cycle_seconds(size, 1) for engine, size in engines] for _ in range(TIMINGS)]
    return [min(column) for column in zip(*rounds, strict=True)]


def choose_block_size(trial: Trial, seconds: Mapping[int, float]) -> tuple[int, str]:
    """The block that promises most tokens a second, and why: the trial's acceptance, drawn on, by what passes cost here.

    ``seconds`` has those of a target's pass for the sizes to choose from; the trial's own is among them.
    """
    block = len(trial.accuracy) + 1
    chance = steady_acceptance(trial.tau, block)

    def promised(size: int) -> float:
        return sum(chance**k for k in range(size)) / (trial.cycle_seconds + seconds[size] - seconds[block])

    best = block
    for size in sorted(size for size in seconds if size > block):
        best = size if promised(size) > BETTER * promised(best) else best
    shorter = max((size for size in seconds if size < block), key=promised, default=best)
    best = shorter if promised(shorter) > SHORTER * promised(best) else best
    tried = ", ".join(f"{size} {promised(size) / promised(block):.2f} ×" for size in sorted(seconds))
    return best, f"blocks of {best}; expected speed against blocks of {block}: {tried}"


def pass_seconds(target: Target, sizes: Sequence[int]) -> dict[int, float]:
    """Seconds of a pass of ``target`` over so many tokens of one request, fewest first, measured here and in turn.

    One over more tokens takes no less; where that was measured, something else made the shorter one wait.
    """
    plain = Engine(target, num_pages=64)
    rounds = [[plain.cycle_seconds(size, 1) for size in sizes] for _ in range(TIMINGS)]
    least = [min(column) for column in zip(*rounds, strict=True)]
    return dict(zip(sizes, accumulate(least, max), strict=True))


def steady_acceptance(tau: float, block_size: int) -> float:
    """The chance of each draft position, the same for all, that gives this τ: 1 + a + a² … = τ."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(block_size)) < tau else (low, middle)
    return low


def to_json(trial: Trial) -> dict[str, Any]:
    return {**asdict(trial), "score": trial.score}


def from_json(raw: dict[str, Any]) -> Trial:
    return Trial(**{key: value for key, value in raw.items() if key != "score"})


def training_dtype(choice: str, width: int, device: torch.device) -> torch.dtype:
    """Return the dtype to train a drafter of hidden size ``width`` in: bf16, but on a CPU fp32 if that is faster.

    At a width of 256 bf16 learns from 1.65 times as many tokens a second, on a CPU that multiplies them. Narrower matrices are
    converted for longer than they are multiplied, and other CPUs multiply bf16 slowly.
    """
    if choice == "auto":
        narrow = width < NARROW or (width <= MIDDLE and not native.has_dot_products)
        choice = "float32" if narrow and device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, choice)
    return dtype
