"""Train a pilot: answer prompts with every block size it may choose, and learn which is fastest for which (BlockPilot).

A request's rate with blocks of b is ``τ(b) / (T_draft(b) + T_verify(b))``. τ is from its own answer. The times are measured
separately, so that labels do not depend on the machine's load. Labelling takes longest; its results can be kept in a file.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from volley.engine.engine import Engine
from volley.engine.reload import replace_drafter
from volley.errors import ConfigError, InputError
from volley.files import make_folder
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.pilot import PilotConfig, PilotInput, features, net_for, save_pilot
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.params import SamplingParams
from volley.policies.fixed import Fixed
from volley.prompts import load_prompts
from volley.tensors import load_tensors, save_tensors
from volley.train.options import PilotOptions

_BATCH = 64  # labelled requests in one step of the optimizer
_REHEARSALS = 30  # repetitions of a timed cycle; the shortest counts, because other work on the machine only adds time
_NEAR = 0.05  # softness of the labels: a size that is slower by this share has a weight lower by a factor of e


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Measurements of N requests, each decoded with S block sizes."""

    prompt: Tensor
    """Number ``[N]`` of the prompt, which is the same at every temperature."""
    temperature: Tensor
    """Temperatures ``[N]``."""
    logits: Tensor
    """Target's logits ``[N, V]`` after the prompt's last token."""
    hidden: Tensor
    """Tapped states ``[N, taps · H]`` of the prompt's last token."""
    tokens: Tensor
    """Number of tokens ``[N, S]`` decoded after the first."""
    cycles: Tensor
    """Number of cycles ``[N, S]`` of these tokens."""

    def __len__(self) -> int:
        return len(self.temperature)

    def __getitem__(self, rows: Tensor) -> "Labelled":
        return Labelled(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(**{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)})

    def rates(self, seconds: Tensor) -> Tensor:
        """Return tokens per second ``[N, S]`` if a cycle with each size takes ``seconds [S]``."""
        return self.tokens / self.cycles / seconds


class InputRecorder(Fixed):
    """Policy with a fixed block size that records the inputs of a pilot."""

    uses_prefill = True

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def prefilled(self, request_id: int, temperature: float, logits: Tensor, hidden: Tensor) -> None:
        self.seen[request_id] = (logits.float().cpu(), hidden.float().cpu())


def label(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], block_sizes: Sequence[int]
) -> Labelled:
    """Answer all prompts at once, with each block size in turn."""
    tokens, cycles = [], []
    for size in block_sizes:
        engine.policy = recorder = InputRecorder(size)
        lengths = [result.stats.accepted_lengths for result in engine.generate(list(prompts), params)]
        tokens.append([sum(own) for own in lengths])
        cycles.append([len(own) for own in lengths])
    seen = [recorder.seen[request_id] for request_id in sorted(recorder.seen)]
    return Labelled(
        prompt=torch.arange(len(prompts)),
        temperature=torch.tensor([own.temperature for own in params]),
        logits=torch.stack([logits for logits, _ in seen]),
        hidden=torch.stack([hidden for _, hidden in seen]),
        tokens=torch.tensor(tokens).T,
        cycles=torch.tensor(cycles).T,
    )


def label_all(
    engine: Engine,
    options: PilotOptions,
    block_sizes: Sequence[int],
    report: Callable[[int, int], None],
) -> Labelled:
    """Label every prompt at every temperature, ``batch`` prompts at a time; ``options.labels`` is written after each."""
    engine.procedures.write_causally()
    # Sampled requests without a seed, as most are, are verified by this rule.
    engine.reconfigure(replace(engine.config, verification="rejection"))
    conversations = [c for source in options.prompts for c in load_prompts(source, options.data_dir, options.limit)]
    random.Random(options.seed).shuffle(conversations)
    prompts = [engine.encode(list(conversation.messages), thinking=options.thinking) for conversation in conversations]
    room = engine.target.context_length - options.max_tokens
    prompts = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts)) if len(prompt) <= room]
    facts: list[Any] = [drafter_fingerprint(_drafter(engine)), list(block_sizes), options.temperatures]
    facts += [options.max_tokens, engine.config.verification]
    key = hashlib.sha256(json.dumps([*facts, options.seed, options.batch, prompts]).encode()).digest()
    if not prompts:
        raise InputError(
            f"no prompt leaves room for {options.max_tokens} tokens in the target's context of {engine.target.context_length}; "
            "give shorter prompts, or fewer tokens as --max-tokens"
        )
    parts, done = _read_labels(options.labels, key)
    report(done, len(prompts))
    while done < len(prompts):
        batch = prompts[done : done + options.batch]
        for temperature in options.temperatures:
            params = [
                SamplingParams(temperature=temperature, max_tokens=options.max_tokens, seed=options.seed + done + place)
                for place in range(len(batch))
            ]
            found = label(engine, batch, params, block_sizes)
            parts.append(replace(found, prompt=found.prompt + done))
        done += len(batch)
        if options.labels is not None:
            whole = Labelled.joined(parts)
            tensors = {field.name: getattr(whole, field.name) for field in fields(whole)}
            extra = {"done": torch.tensor(done), "key": torch.frombuffer(bytearray(key), dtype=torch.uint8)}
            save_tensors(options.labels, {**tensors, **extra})
        report(done, len(prompts))
    found = Labelled.joined(parts)
    found = found[found.cycles.amin(dim=1) > 0]  # requests that end with their first token have no cycle
    if len(set(found.prompt.tolist())) < 2:
        raise InputError("hardly a prompt was answered with more than one token; give more prompts, or others")
    return found


def draft_up_to(engine: Engine, block_size: int) -> None:
    """Let an idle engine draft blocks of up to ``block_size``, which may exceed the trained size."""
    assert engine.core.proposer is not None, "a drafter proposes"
    if block_size > engine.core.proposer.block_size:
        engine.config = engine.procedure.config = replace(engine.config, policy=None, block_size=block_size)
        replace_drafter(engine, _drafter(engine))


def _drafter(engine: Engine) -> Drafter:
    if engine.drafter is None:
        raise ConfigError("a pilot decides how much a drafter drafts, and there is none; name a drafter")
    return engine.drafter


def _read_labels(path: Path | None, key: bytes) -> tuple[list[Labelled], int]:
    if path is None or not path.exists():
        return [], 0
    tensors = load_tensors(path)
    names = {field.name for field in fields(Labelled)}
    if set(tensors) != names | {"done", "key"} or bytes(tensors["key"].tolist()) != key:
        raise ConfigError(
            f"{path} was labelled for another drafter, or with other prompts or options; name another file, or delete it"
        )
    return [Labelled(**{name: tensors[name] for name in names})], int(tensors["done"])


def cycle_seconds(engine: Engine, block_sizes: Sequence[int], concurrency: int) -> Tensor:
    """Measure the seconds ``[S]`` of a cycle of ``concurrency`` requests with each of ascending block sizes; 1 is plain
    decoding.
    """
    rounds = [[engine.cycle_seconds(size, concurrency) for size in block_sizes] for _ in range(_REHEARSALS)]
    shortest = torch.tensor(rounds).amin(dim=0)
    return shortest.flip(0).cummin(dim=0).values.flip(0)  # a smaller block is never slower


def fit(
    config: PilotConfig, drafter: Drafter, examples: Labelled, rates: Tensor, options: PilotOptions
) -> nn.Sequential:
    """Train a network to choose by ``rates [N, S]``.

    The loss is cross-entropy against all sizes, weighted by how close each comes to the best one. The paper uses the best size
    alone, but the best two often differ by less than the noise.
    """
    torch.manual_seed(options.seed)
    net = net_for(config, drafter)
    inputs = inputs_of(config, examples)
    wanted = (rates / rates.amax(dim=1, keepdim=True) / _NEAR).softmax(dim=1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    for _ in range(options.epochs):
        for rows in torch.split(torch.randperm(len(examples)), _BATCH):
            loss = nn.functional.cross_entropy(net(inputs[rows]), wanted[rows])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        schedule.step()
    return net.requires_grad_(False).eval()


def inputs_of(config: PilotConfig, examples: Labelled) -> Tensor:
    """Return the network's input ``[N, D]`` for each example."""
    return features(config.input, examples.temperature, examples.logits, examples.hidden)


@dataclass(frozen=True)
class PilotOutcome:
    """Tokens per second on held-out prompts, by measured cycle times; each token counts once."""

    fixed: dict[int, float]
    """Rate with one block size for all requests, by size."""
    pilot: float
    oracle: float
    """Rate with the best size of each request."""
    agreement: float
    """Share of requests for which the pilot chooses the best size."""

    @classmethod
    def of(cls, choice: Tensor, examples: Labelled, seconds: Tensor, block_sizes: Sequence[int]) -> Self:
        """Compute the outcome of a pilot's ``choice [N]``, indices in ``block_sizes``."""
        best = examples.rates(seconds).argmax(dim=1)

        def rate(chosen: Tensor) -> float:
            rows = torch.arange(len(examples))
            spent = examples.cycles[rows, chosen] * seconds[chosen]
            return float(examples.tokens[rows, chosen].sum() / spent.sum())

        fixed = {size: rate(torch.full_like(best, place)) for place, size in enumerate(block_sizes)}
        return cls(fixed, rate(choice), rate(best), float((choice == best).float().mean()))


def split(examples: Labelled, options: PilotOptions) -> tuple[Labelled, Labelled]:
    """Split off a held-out share of the prompts, with all their temperatures. Return the held-out examples and the others."""
    prompts = torch.tensor(sorted(set(examples.prompt.tolist())))
    order = prompts[torch.randperm(len(prompts), generator=torch.Generator().manual_seed(options.seed))]
    held = torch.isin(examples.prompt, order[: max(1, int(len(prompts) * options.eval_share))])
    return examples[held], examples[~held]


def train_pilot(engine: Engine, options: PilotOptions, report: Callable[[int, int], None]) -> tuple[Path, PilotOutcome]:
    """Label, train and save. Return the folder of the pilot and its outcome on held-out prompts."""
    drafter = _drafter(engine)
    folder = options.out or drafter.folder
    if folder is None:
        raise ConfigError("this drafter was not loaded from a folder that its pilot could be kept in; give one as out")
    make_folder(folder)
    sizes = options.block_sizes(drafter.config.block_size)
    config = PilotConfig(
        drafter=drafter_fingerprint(drafter),
        input=cast(PilotInput, options.input),
        block_sizes=sizes,
        width=options.width,
        layers=options.layers,
    )
    draft_up_to(engine, sizes[-1])
    examples = label_all(engine, options, sizes, report)
    seconds = cycle_seconds(engine, sizes, options.concurrency)
    held, kept = split(examples, options)
    net = fit(config, drafter, kept, kept.rates(seconds), options)
    choice = net(inputs_of(config, held)).argmax(dim=1)
    save_pilot(folder, config, net)
    return folder, PilotOutcome.of(choice, held, seconds, sizes)
