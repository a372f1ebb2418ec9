"""Run the cases of a benchmark in turn, prompt by prompt, in one process, and record each run.

The speed of a machine drifts. So all cases run on a prompt before the next prompt, and the first case rotates. Each run yields
one ``Record`` for ``report.py``.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from volley.bench.score import judge
from volley.bench.tasks import PLAIN, BenchConfig, Case
from volley.config import DecodingConfig
from volley.errors import CapacityError, InputError
from volley.params import DiffusionParams, SamplingParams
from volley.policies.base import Policy
from volley.policies.make import make_policy
from volley.prompts import Conversation, Message
from volley.results import GenerationResult

WARM_UP_TOKENS = 24
IsTie = Callable[[Sequence[int], Sequence[int], Sequence[int]], bool]
"""Function of prompt, answer and plain decoding's answer: return whether they part at a tie of the target's logits."""


@dataclass
class Record:
    """One run of one case on one group of prompts (a single prompt unless ``concurrency`` is larger)."""

    dataset: str
    prompt: str
    repeat: int
    temperature: float
    case: Case
    prompts: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    """Wall time from the request to the last token."""
    first_token_seconds: float
    """Wall time to the first token of any prompt in the group."""
    draft_seconds: float = 0.0
    walk_seconds: float = 0.0
    """Part of ``draft_seconds`` that a sequential head takes."""
    verify_seconds: float = 0.0
    accepted_lengths: list[int] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)
    cycles: int = 0
    """Number of decoding cycles of the group's longest request."""
    identical: float | None = None
    """Share of tokens equal to plain decoding's of the same prompt, at temperature 0."""
    differing: int = 0
    """Number of answers, also from peers, that differ from plain decoding's at temperature 0."""
    ties: int = 0
    """Number of differing answers that part at two logits equal to within rounding."""
    scored: int = 0
    """Number of judged answers."""
    right: int = 0
    """Number of judged answers that are right."""

    @property
    def decode_tokens(self) -> int:
        return self.output_tokens - self.prompts

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.first_token_seconds


@dataclass
class TimedResults:
    """Result of a runner for one group: each prompt's result and the group's wall time."""

    results: list[GenerationResult]
    seconds: float

    def first_token(self) -> float:
        return min(result.stats.time_to_first_token for result in self.results)


Runner = Callable[[Sequence[list[int]], SamplingParams], TimedResults]


class BenchEngine(Protocol):
    """Part of ``Engine`` that measuring needs."""

    config: DecodingConfig

    @property
    def drafter(self) -> Any: ...
    def reconfigure(self, config: DecodingConfig) -> None: ...
    def generate(self, prompts: Any, params: Any) -> Iterator[GenerationResult]: ...
    def reset_prefix_cache(self) -> None: ...


def configure(engine: BenchEngine, case: Case, policy: Policy | None) -> None:
    """Configure ``engine`` to decode as ``case`` says, with ``policy`` if the case names one. K/V memory is kept."""
    own = engine.config
    places = {name: getattr(own, name) for name in ("draft_window", "kv_dtype", "draft_kv_dtype")}
    engine.reconfigure(replace(case.decoding, policy=policy, **places))


def engine_runner(engine: BenchEngine, case: Case, diffusion: DiffusionParams | None = None) -> Runner:
    """Return a runner that decodes with volley as ``case`` says, with an empty prefix cache.

    A policy keeps what it has learnt between runs, as in a serving engine. ``diffusion`` are the parameters of a diffusion
    language model.
    """
    name = case.decoding.policy
    policy = make_policy(name, engine.drafter) if name else None

    def run(prompts: Sequence[list[int]], params: SamplingParams) -> TimedResults:
        configure(engine, case, policy)
        engine.reset_prefix_cache()
        asked = replace(params, diffusion=diffusion)
        started = time.perf_counter()
        results = list(engine.generate(list(prompts), asked))
        return TimedResults(results, time.perf_counter() - started)

    return run


@dataclass
class Measurements:
    """All records; ``partial`` if the run was interrupted."""

    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Peers that could not run, with the reasons."""
    partial: bool = False
    exit_code: int = 0
    """Exit code of the command: 130 after Ctrl-C, 2 after an error."""
    peak_memory_bytes: int = 0


def measure(
    config: BenchConfig,
    workload: dict[str, list[Conversation]],
    encode: Callable[[list[Message]], list[int]],
    runners: dict[Case, Runner],
    is_tie: IsTie,
    progress: Callable[[Record, int, int], None] | None = None,
) -> Measurements:
    """Run everything. Ctrl-C, or a prompt that does not fit, ends the run and keeps the results so far.

    ``runners`` must hold ``PLAIN``, whose answers continue the conversations for all cases. ``is_tie`` returns whether two
    differing answers part at a tie of the target's logits.
    """
    assert PLAIN in runners, "plain decoding is what every case is compared with"
    measured = Measurements()
    groups = sum(_num_groups(config, conversations) for conversations in workload.values())
    total = len(runners) * config.repeats * len(config.temperatures) * groups
    try:
        _warm_up(config, workload, encode, runners)
        for repeat in range(config.repeats):
            for dataset, conversations in workload.items():
                for temperature in config.temperatures:
                    for records in _dataset_runs(
                        config, dataset, conversations, temperature, repeat, encode, runners, is_tie
                    ):
                        measured.records += records
                        if progress is not None:
                            progress(records[-1], len(measured.records), total)
    except KeyboardInterrupt:
        measured.partial, measured.exit_code = True, 130
    except (InputError, CapacityError) as error:
        if not measured.records:
            raise
        measured.partial, measured.exit_code = True, 2
        measured.notes.append(f"stopped: {error}")
    measured.peak_memory_bytes = peak_memory_bytes()
    return measured


def _num_groups(config: BenchConfig, conversations: list[Conversation]) -> int:
    groups = [conversations[i : i + config.concurrency] for i in range(0, len(conversations), config.concurrency)]
    return sum(max(c.num_answers for c in group) for group in groups)


def _warm_up(
    config: BenchConfig,
    workload: dict[str, list[Conversation]],
    encode: Callable[[list[Message]], list[int]],
    runners: dict[Case, Runner],
) -> None:
    conversations = next(iter(workload.values()))[: config.concurrency]
    prompts = [encode(list(c.messages)) for c in conversations]
    for run in runners.values():
        run(prompts, SamplingParams(max_tokens=min(WARM_UP_TOKENS, config.max_tokens)))


def _dataset_runs(
    config: BenchConfig,
    dataset: str,
    conversations: list[Conversation],
    temperature: float,
    repeat: int,
    encode: Callable[[list[Message]], list[int]],
    runners: dict[Case, Runner],
    is_tie: IsTie,
) -> Iterator[list[Record]]:
    """Yield the records of one group of prompts at a time, for all cases."""
    cases = list(runners)
    params = config.params(temperature, repeat)
    for start in range(0, len(conversations), config.concurrency):
        group = conversations[start : start + config.concurrency]
        chats = [list(c.messages) for c in group]
        for turn in range(max(c.num_answers for c in group)):
            prompts = [encode(chat) for chat in chats]
            shift = (start // config.concurrency + turn + repeat) % len(cases)
            outcomes = {case: runners[case](prompts, params) for case in cases[shift:] + cases[:shift]}
            plain = outcomes[PLAIN].results
            name = group[0].id + (f"+{turn}" if turn else "")
            records = [
                _record(dataset, name, repeat, temperature, case, prompts, outcomes[case], plain) for case in cases
            ]
            if config.score and turn == 0:
                for record in records:
                    verdicts = [
                        judge(dataset, c.row, r.text) for c, r in zip(group, outcomes[record.case].results, strict=True)
                    ]
                    record.scored = sum(verdict is not None for verdict in verdicts)
                    record.right = sum(verdict is True for verdict in verdicts)
            if temperature == 0:
                for record in records:
                    if record.identical != 1:
                        _count_differences(record, prompts, outcomes[record.case].results, plain, is_tie)
            yield records
            open_chats = [i for i, c in enumerate(group) if turn < len(c.turns)]
            for i in open_chats:
                chats[i].append({"role": "assistant", "content": plain[i].text})
                chats[i].append({"role": "user", "content": group[i].turns[turn]})
            group, chats = [group[i] for i in open_chats], [chats[i] for i in open_chats]


def _record(
    dataset: str,
    prompt: str,
    repeat: int,
    temperature: float,
    case: Case,
    prompts: Sequence[list[int]],
    outcome: TimedResults,
    plain: list[GenerationResult],
) -> Record:
    stats = [result.stats for result in outcome.results]
    return Record(
        dataset=dataset,
        prompt=prompt,
        repeat=repeat,
        temperature=temperature,
        case=case,
        prompts=len(prompts),
        prompt_tokens=sum(map(len, prompts)),
        output_tokens=sum(len(result.token_ids) for result in outcome.results),
        seconds=outcome.seconds,
        first_token_seconds=outcome.first_token(),
        draft_seconds=max(s.draft_seconds for s in stats),
        walk_seconds=max(s.walk_seconds for s in stats),
        verify_seconds=max(s.verify_seconds for s in stats),
        accepted_lengths=[n for s in stats for n in s.accepted_lengths],
        block_sizes=[n for s in stats for n in s.block_sizes],
        cycles=max(len(s.accepted_lengths) for s in stats),
        identical=identical_share(outcome.results, plain) if temperature == 0 else None,
    )


def _count_differences(
    record: Record,
    prompts: Sequence[list[int]],
    results: Sequence[GenerationResult],
    references: Sequence[GenerationResult],
    is_tie: IsTie,
) -> None:
    for prompt, result, reference in zip(prompts, results, references, strict=True):
        if result.token_ids != reference.token_ids:
            record.differing += 1
            record.ties += is_tie(prompt, result.token_ids, reference.token_ids)


def identical_share(results: Sequence[GenerationResult], references: Sequence[GenerationResult]) -> float:
    """Return the share of positions with the same token; positions that only one result has count as different."""
    same = total = 0
    for result, reference in zip(results, references, strict=True):
        same += sum(a == b for a, b in zip(result.token_ids, reference.token_ids, strict=False))
        total += max(len(result.token_ids), len(reference.token_ids))
    return same / total if total else 1.0


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
