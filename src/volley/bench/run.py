"""A whole benchmark: load the workload, set up the cases on an engine and the peers beside it, measure, report."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from volley.bench.html import to_html
from volley.bench.measure import Record, Runner, engine_runner, measure
from volley.bench.report import Report, machine, to_markdown
from volley.bench.tasks import PLAIN, BenchConfig, Case
from volley.bench.ties import is_tie
from volley.config import CapacityConfig, DecodingConfig
from volley.engine.engine import Engine
from volley.files import write_atomically
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.eagle import is_eagle_checkpoint
from volley.models.targets.target import Target
from volley.prompts import Message
from volley.proposers.autoregressive import AutoregressiveProposer
from volley.proposers.base import Proposer


def without_drafter(engine: Engine) -> Engine:
    """An engine on the same weights that only decodes plainly.

    ``engine`` itself with block size 1 would still keep the drafter's cache up to date: too slow a baseline.
    """
    return engine if engine.drafter is None else _beside(engine)


def with_draft_model(engine: Engine, path: str, tokens: int) -> Engine:
    """An engine on the same weights for which a plain draft model, or an EAGLE-3 drafter, drafts so many tokens."""
    target = engine.target
    if is_eagle_checkpoint(path):
        return _beside(engine, drafter=load_drafter(path, target, "bf16"))
    model = Target.from_pretrained(path, target.dtype, target.device)
    return _beside(engine, AutoregressiveProposer(model, target.vocab_size, 1 + tokens))


def _beside(engine: Engine, proposer: Proposer | None = None, drafter: Drafter | None = None) -> Engine:
    capacity: CapacityConfig = engine.capacity
    if engine.target.device.type != "cpu":  # where the first pool left a tenth of the memory
        capacity = CapacityConfig(**{**asdict(capacity), "num_pages": None})
    config = DecodingConfig(kv_dtype=engine.config.kv_dtype)
    return Engine(engine.target, drafter, config=config, capacity=capacity, proposer=proposer)


def run_bench(
    engine: Engine,
    config: BenchConfig,
    models: dict[str, str],
    progress: Callable[[Record, int, int], None] | None = None,
) -> Report:
    """Measure ``engine`` as ``config`` says. ``models`` names what it runs; peers load the same ``models["path"]``.

    How the engine drafts is put back afterwards.
    """
    workload = config.load()
    before = engine.config
    drafter = engine.drafter
    cases = config.cases(drafter.config.block_size if drafter is not None else None, before)
    plain = without_drafter(engine)
    runners: dict[Case, Runner] = {case: engine_runner(plain if case == PLAIN else engine, case) for case in cases}
    if config.draft_model is not None:
        name = "eagle-3" if is_eagle_checkpoint(config.draft_model) else "draft-model"
        case = Case(name, replace(PLAIN.decoding, block_size=1 + config.draft_tokens))
        runners[case] = engine_runner(with_draft_model(engine, config.draft_model, config.draft_tokens), case)
    notes: list[str] = []
    target = engine.target
    if config.against:
        from volley.bench.peers import transformers_runners

        peers, notes = transformers_runners(
            models["path"], drafter, sorted(target.stop_token_ids), target.dtype, target.device
        )
        runners |= peers

    def encode(messages: list[Message]) -> list[int]:
        return engine.encode(messages[-1]["content"] if config.raw else messages, thinking=config.thinking)

    def at_a_tie(prompt: Sequence[int], mine: Sequence[int], theirs: Sequence[int]) -> bool:
        return is_tie(plain, prompt, mine, theirs, target.dtype)

    try:
        measured = measure(config, workload, encode, runners, at_a_tie, progress)
    finally:
        engine.reconfigure(before)
    measured.notes += notes
    facts = {name: value for name, value in models.items() if name != "path"}
    facts |= {"dtype": str(target.dtype).removeprefix("torch."), "device": str(target.device)}
    return Report(config, measured, machine(torch.get_num_threads()), facts)


def save(report: Report, folder: Path) -> None:
    """Write ``report.json``, ``report.md`` and ``report.html``."""
    write_atomically(folder / "report.json", json.dumps(report.to_json(), indent=1, default=str) + "\n")
    write_atomically(folder / "report.md", to_markdown(report.summaries))
    write_atomically(folder / "report.html", to_html(report))
