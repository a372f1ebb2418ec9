"""Benchmark run: load the workload, set up the engine's cases and the peers, measure, report."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from volley.bench.measure import Record, Runner, engine_runner, measure
from volley.bench.report import Report, machine, to_markdown
from volley.bench.tasks import PLAIN, SELF, BenchConfig, Case, name_of
from volley.bench.ties import is_tie
from volley.config import CapacityConfig, DecodingConfig
from volley.engine.capacity import fit_engine
from volley.engine.engine import Engine
from volley.errors import ConfigError
from volley.files import write_atomically
from volley.models.diagnosis import holds_target
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.drafter import Drafter
from volley.models.targets.target import Target
from volley.params import DiffusionParams
from volley.policies.make import DEFAULT_POLICY
from volley.prompts import Message
from volley.proposers.autoregressive import AutoregressiveProposer
from volley.proposers.base import Proposer


def without_drafter(engine: Engine) -> Engine:
    """Return an engine on the same weights that decodes plainly; a diffusion language model then writes one token at a time.

    ``engine`` itself with block size 1 would still update the drafter's K/V, which makes the baseline too slow.
    """
    can_draft = engine.core.proposer is not None or engine.core.pacing.policy.uses_lookup
    if not can_draft and engine.target.diffusion is None:
        return engine
    plain = _beside(engine, policy="plain")
    plain.procedures.default_mode = "autoregressive"
    return plain


def draft_model_runner(engine: Engine, path: str, tokens: int) -> tuple[Case, Runner]:
    """Return a runner on the same target with another drafter, which drafts ``tokens`` tokens or its own block."""
    target, size = engine.target, 1 + tokens
    if holds_target(path):
        model = Target.from_pretrained(path, target.dtype, target.device)
        beside = _beside(engine, AutoregressiveProposer(model, target.vocab_size, size))
    else:
        weights = engine.drafter_source[1] if engine.drafter_source else "auto"
        drafter = load_drafter(path, target, weights, compiled=engine.config.compile)
        size = size if drafter.config.eagle else drafter.config.block_size
        beside = _beside(engine, drafter=drafter)
    case = Case(name_of(path), replace(PLAIN.decoding, block_size=size))
    return case, engine_runner(beside, case)


def _beside(
    engine: Engine, proposer: Proposer | None = None, drafter: Drafter | None = None, policy: str | None = None
) -> Engine:
    """Return a second engine with as many pages as ``engine``, or as many as the GPU's memory still allows."""
    capacity, config = engine.capacity, DecodingConfig(policy=policy, kv_dtype=engine.config.kv_dtype)
    if engine.target.device.type != "cpu":
        free = CapacityConfig(**{**asdict(capacity), "num_pages": None})
        fitting = fit_engine(free, config, engine.target, drafter)
        capacity = replace(fitting, num_pages=min(fitting.num_pages, capacity.num_pages))
    return Engine(engine.target, drafter, config=config, capacity=capacity, proposer=proposer)


def run_bench(
    engine: Engine,
    config: BenchConfig,
    models: dict[str, str],
    progress: Callable[[Record, int, int], None] | None = None,
) -> Report:
    """Measure ``engine`` as ``config`` says. ``models`` names what it runs; peers load the same ``models["path"]``.

    The engine's drafting settings are restored afterwards.
    """
    family = engine.target.diffusion
    is_diffusion = family is not None
    if config.against and family is not None and not (family.writes_causally and engine.target.can_be_tapped):
        raise ConfigError("peers decode causal LMs, and this target's folder has none; leave --against out")
    before, drafter = engine.config, engine.drafter
    if not (is_diffusion or config.policies or config.block_sizes):
        config = replace(config, policies=(DEFAULT_POLICY,))  # what users run
    workload = config.load()
    cases = config.cases(drafter.config.block_size if drafter is not None else None, before)
    plain = without_drafter(engine)
    causal = DiffusionParams(mode="autoregressive") if is_diffusion else None
    runners: dict[Case, Runner] = {
        case: engine_runner(plain if case == PLAIN else engine, case, causal) for case in cases
    }
    if is_diffusion:  # canvases alone write another text; benchmarks/diffusion_curve.py measures them
        runners[SELF] = engine_runner(engine, SELF, DiffusionParams(mode="self"))
    runners |= dict(draft_model_runner(engine, path, config.draft_tokens) for path in config.draft_models)
    notes: list[str] = []
    target = engine.target
    if config.against:
        from volley.bench.peers import transformers_runners

        peers, notes = transformers_runners(
            models["path"], drafter, engine.tokenizer, sorted(target.stop_token_ids), target.dtype, target.device
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
    """Write ``report.json`` and ``report.md``."""
    write_atomically(folder / "report.json", json.dumps(report.to_json(), indent=1, default=str) + "\n")
    write_atomically(folder / "report.md", to_markdown(report.summaries))
