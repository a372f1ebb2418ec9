"""Run the cases of a benchmark in turn, prompt by prompt, in one process, and record what each run did.

Machines drift: a case measured after another sees a hotter or busier one. So all cases run on a prompt before the next
prompt is looked at, and which of them goes first rotates. What is kept is one ``Record`` a run, for ``report.py``.
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
from volley.policies.base import Policy
from volley.policies.make import make_policy
from volley.prompts import Conversation, Message
from volley.types import DiffusionParams, GenerationResult, SamplingParams

WARM_UP_TOKENS = 24
IsTie = Callable[[Sequence[int], Sequence[int], Sequence[int]], bool]
"""Prompt, answer, plain decoding's other answer: do they part where the target cannot tell the two tokens apart?"""


@dataclass
class Record:
    """One run of one case over one group of prompts (a single one unless ``concurrency`` is more)."""

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
    """The part of ``draft_seconds`` that a sequential head takes."""
    verify_seconds: float = 0.0
    accepted_lengths: list[int] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)
    cycles: int = 0
    """Decoding cycles of the group: of its longest request."""
    identical: float | None = None
    """Share of tokens equal to plain decoding's of the same prompt, at temperature 0."""
    differing: int = 0
    """Answers that differ from plain decoding's at temperature 0; those of peers too."""
    ties: int = 0
    """Of those that differ: how many part where the two tokens' logits tie to within rounding."""
    scored: int = 0
    """Answers that were judged."""
    right: int = 0
    """Of those judged."""

    @property
    def decode_tokens(self) -> int:
        return self.output_tokens - self.prompts

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.first_token_seconds


@dataclass
class TimedResults:
    """What a runner hands back for one group: each prompt's result and the group's wall time."""

    results: list[GenerationResult]
    seconds: float

    def first_token(self) -> float:
        return min(result.stats.time_to_first_token for result in self.results)


Runner = Callable[[Sequence[list[int]], SamplingParams], TimedResults]


class BenchEngine(Protocol):
    """The part of ``Engine`` that measuring needs."""

    config: DecodingConfig
    drafter: Any

    def reconfigure(self, config: DecodingConfig) -> None: ...
    def generate(self, prompts: Any, params: Any) -> Iterator[GenerationResult]: ...
    def reset_prefix_cache(self) -> None: ...


def configure(engine: BenchEngine, case: Case, policy: Policy | None) -> None:
    """Let ``engine`` decode as ``case`` says, with ``policy`` where the case names one; K/V stay where they live."""
    own = engine.config
    places = {name: getattr(own, name) for name in ("draft_window", "kv_dtype", "draft_kv_dtype")}
    engine.reconfigure(replace(case.decoding, policy=policy, **places))


def engine_runner(engine: BenchEngine, case: Case, diffusion: DiffusionParams | None = None) -> Runner:
    """Decode with volley as ``case`` says, with nothing left in the prefix cache from another run.

    What a policy has learnt it keeps from run to run, as in an engine that serves. ``diffusion`` is how a diffusion language
    model answers.
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
    """All that was recorded; ``partial`` when it was interrupted."""

    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Peers that could not run, and why."""
    partial: bool = False
    exit_code: int = 0
    """Of the command: 130 after Ctrl-C, 2 after an error."""
    peak_memory_bytes: int = 0


def measure(
    config: BenchConfig,
    workload: dict[str, list[Conversation]],
    encode: Callable[[list[Message]], list[int]],
    runners: dict[Case, Runner],
    is_tie: IsTie,
    progress: Callable[[Record, int, int], None] | None = None,
) -> Measurements:
    """Run everything; Ctrl-C ends it early and keeps what was measured, and so does a prompt that does not fit.

    ``runners`` must hold ``PLAIN``: its answers are what a conversation's further turns follow, for all cases. ``is_tie``
    says whether two differing answers part where the target cannot tell their tokens apart.
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
    """Records of one group of prompts at a time, all cases of it."""
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
    """Share of positions holding the same token; a position that only one of the two has counts as different."""
    same = total = 0
    for result, reference in zip(results, references, strict=True):
        same += sum(a == b for a, b in zip(result.token_ids, reference.token_ids, strict=False))
        total += max(len(result.token_ids), len(reference.token_ids))
    return same / total if total else 1.0


def peak_memory_bytes() -> int:
    """The largest resident size this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
