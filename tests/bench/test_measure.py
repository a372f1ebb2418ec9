from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from volley.bench.measure import BenchEngine, Runner, TimedResults, engine_runner, identical_share, measure
from volley.bench.report import summarise, to_markdown
from volley.bench.tasks import PLAIN, BenchConfig, Case
from volley.config import DecodingConfig
from volley.errors import ConfigError, InputError
from volley.params import SamplingParams
from volley.policies.goodput import Goodput
from volley.prompts import Conversation
from volley.results import GenerationResult, GenerationStats


def result(token_ids: Sequence[int], **stats: Any) -> GenerationResult:
    numbers = {"output_tokens": len(token_ids), "time_to_first_token": 0.1, "total_seconds": 1.1, **stats}
    return GenerationResult("".join(map(str, token_ids)), list(token_ids), "length", GenerationStats(**numbers))


def conversation(name: str, *turns: str) -> Conversation:
    return Conversation(name, ({"role": "user", "content": turns[0]},), turns[1:])


class Runs:
    """Runners that note who ran on what, in order."""

    def __init__(self, stop_at: int | None = None, stop: BaseException | None = None) -> None:
        self.log: list[tuple[str, tuple[int, ...], int]] = []
        self.stop_at, self.stop = stop_at, stop or KeyboardInterrupt()

    def of(self, case: Case, token_ids: list[int]) -> Any:
        def run(prompts: Sequence[list[int]], params: SamplingParams) -> TimedResults:
            if len(self.log) == self.stop_at:
                raise self.stop
            self.log.append((case.label, tuple(map(len, prompts)), params.max_tokens))
            return TimedResults([result(token_ids) for _ in prompts], 1.1)

        return run


def encode(messages: list[dict[str, str]]) -> list[int]:
    return [0] * sum(len(message["content"]) for message in messages)


def never(prompt: Sequence[int], mine: Sequence[int], theirs: Sequence[int]) -> bool:
    return False


def fixed(block_size: int, **options: Any) -> Case:
    return Case("volley", DecodingConfig(block_size=block_size, **options))


DRAFTED = fixed(4)


def test_cases_take_turns_on_every_prompt_and_the_first_rotates() -> None:
    runs = Runs()
    runners = {PLAIN: runs.of(PLAIN, [1, 2, 3]), DRAFTED: runs.of(DRAFTED, [1, 2, 4, 5])}
    config = BenchConfig(datasets=("d",), repeats=2, max_tokens=9, temperatures=(0, 1))
    seen: list[tuple[int, int]] = []
    measured = measure(
        config,
        {"d": [conversation("a", "x"), conversation("b", "yy")]},
        encode,
        runners,
        lambda prompt, mine, theirs: (len(prompt), mine, theirs) == (1, [1, 2, 4, 5], [1, 2, 3]),
        lambda record, done, total: seen.append((done, total)),
    )
    assert runs.log[:2] == [("plain", (1,), 9), ("B=4", (1,), 9)]  # warm-up
    assert [(label, sizes) for label, sizes, _ in runs.log[2:6]] == [
        ("plain", (1,)), ("B=4", (1,)), ("B=4", (2,)), ("plain", (2,)),
    ]  # fmt: skip
    assert len(measured.records) == 2 * 2 * 2 * 2
    assert seen[-1] == (16, 16)
    assert Counter(record.identical for record in measured.records) == {None: 8, 1.0: 4, 0.5: 4}
    parted = [(record.prompt, record.differing, record.ties) for record in measured.records if record.differing]
    assert parted == [("a", 1, 1), ("b", 1, 0)] * 2, "only the first prompt's answers part at a tie"
    assert not measured.partial
    assert measured.peak_memory_bytes > 2**20


def test_differences_of_peers_are_looked_at_as_closely_as_volleys_own() -> None:
    runs = Runs()
    cases = {
        PLAIN: [1, 2, 3],
        DRAFTED: [1, 9, 3],
        Case("transformers"): [1, 2, 9],
        Case("transformers-lookup"): [1, 2, 3],
    }
    measured = measure(
        BenchConfig(datasets=("d",), repeats=1),
        {"d": [conversation("a", "x")]},
        encode,
        {case: runs.of(case, tokens) for case, tokens in cases.items()},
        lambda prompt, mine, theirs: list(mine) == [1, 2, 9],
    )
    found = {record.case.label: (record.differing, record.ties) for record in measured.records}
    assert found == {"plain": (0, 0), "B=4": (1, 0), "transformers": (1, 1), "transformers-lookup": (0, 0)}


def test_further_turns_follow_plain_answers() -> None:
    runs = Runs()
    runners = {PLAIN: runs.of(PLAIN, [1, 2, 3]), DRAFTED: runs.of(DRAFTED, [1] * 50)}
    config = BenchConfig(datasets=("d",), repeats=1, concurrency=2)
    chats = {"d": [conversation("a", "x", "four"), conversation("b", "yy"), conversation("c", "z")]}
    measured = measure(config, chats, encode, runners, never)
    assert [record.prompt for record in measured.records if record.case == PLAIN] == ["a", "a+1", "c"]
    assert {sizes for _, sizes, _ in runs.log} == {(1, 2), (1 + 3 + 4,), (1,)}
    assert [record.prompts for record in measured.records if record.case == PLAIN] == [2, 1, 1]


def test_ctrl_c_keeps_what_was_measured() -> None:
    runs = Runs(stop_at=5)
    runners = {PLAIN: runs.of(PLAIN, [1]), DRAFTED: runs.of(DRAFTED, [1])}
    config = BenchConfig(datasets=("d",), repeats=1)
    measured = measure(config, {"d": [conversation(n, "x") for n in "abc"]}, encode, runners, never)
    assert measured.partial
    assert [record.prompt for record in measured.records] == ["a", "a"]


def test_a_prompt_that_does_not_fit_keeps_what_was_measured() -> None:
    config, workload = BenchConfig(datasets=("d",), repeats=1), {"d": [conversation(n, "x") for n in "abc"]}
    for stop_at in (5, 1):
        runs = Runs(stop_at, InputError("the prompt has 9 tokens"))
        runners = {PLAIN: runs.of(PLAIN, [1]), DRAFTED: runs.of(DRAFTED, [1])}
        if stop_at == 1:  # nothing is there to be kept
            with pytest.raises(InputError, match="9 tokens"):
                measure(config, workload, encode, runners, never)
            continue
        measured = measure(config, workload, encode, runners, never)
        assert measured.partial
        assert measured.notes == ["stopped: the prompt has 9 tokens"]
        assert [record.prompt for record in measured.records] == ["a", "a"]


def test_identical_share_counts_missing_tokens() -> None:
    assert identical_share([result([1, 2, 3])], [result([1, 9, 3, 4])]) == 0.5
    assert identical_share([result([])], [result([])]) == 1.0


class Reconfigured:
    """An engine that notes by which settings it was asked to decode."""

    def __init__(self, config: DecodingConfig) -> None:
        self.config = config
        self.drafter = None
        self.used: list[DecodingConfig] = []
        self.resets = 0

    def reconfigure(self, config: DecodingConfig) -> None:
        self.config = config

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def generate(self, prompts: Any, params: Any) -> Iterator[GenerationResult]:
        self.used.append(self.config)
        yield result([1])


def test_the_engine_runner_sets_the_case_keeps_where_kv_live_and_forgets_prefixes() -> None:
    places: dict[str, Any] = {"draft_window": 64, "kv_dtype": "int8", "draft_kv_dtype": "int4"}
    engine = Reconfigured(DecodingConfig(policy="feedback", **places))
    typed: BenchEngine = engine
    for case in (fixed(8, tree_nodes=12), fixed(8, denoising_steps=2), PLAIN):
        outcome = engine_runner(typed, case)([[1]], SamplingParams())
        assert engine.used[-1] == replace(case.decoding, **places)
    assert engine.resets == 3
    assert outcome.first_token() == 0.1


def test_a_policy_keeps_what_it_learnt_from_run_to_run() -> None:
    engine = Reconfigured(DecodingConfig())
    runners = [
        engine_runner(engine, Case("volley", DecodingConfig(policy="goodput"), 8)),
        engine_runner(engine, DRAFTED),
    ]
    for run in runners * 2:
        run([[1]], SamplingParams())
    first, between, again, _ = [config.policy for config in engine.used]
    assert isinstance(first, Goodput)
    assert first is again
    assert between is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats is 0"),
        ({"skip_prompts": -1}, "skip_prompts is -1; it must be 0 or more"),
        ({"datasets": ()}, "datasets is empty"),
        ({"block_sizes": (1,)}, "a block needs 2 or more"),
        ({"denoising_steps": (0,)}, "each must be at least 1"),
        ({"tree_nodes": (0, 1)}, "at least 2, anchor included"),
        ({"tree_nodes": (8,), "denoising_steps": (2,)}, "a tree grows from one denoising step"),
        ({"temperatures": (-1.0,)}, "each must be a finite number, 0 or more"),
        ({"temperatures": (0.0, float("nan"))}, "each must be a finite number, 0 or more"),
        ({"against": ("transformer",)}, r"unknown peer 'transformer'; did you mean 'transformers'\?"),
        ({"against": ("transformers",), "concurrency": 2}, "one prompt at a time"),
        ({"score": True, "ignore_eos": True}, "behind the end of an answer cannot be judged"),
    ],
)
def test_unusable_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchConfig(**options)


def test_the_first_prompts_of_each_dataset_can_be_left_out(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_text("".join(f'{{"prompt": "{path.stem}{n}"}}\n' for n in range(5)))
    datasets = tuple(map(str, paths))

    def asked(**options: int) -> dict[str, list[str]]:
        workload = BenchConfig(datasets=datasets, **options).load()  # type: ignore[arg-type]
        return {name: [c.raw for c in conversations] for name, conversations in workload.items()}

    assert asked(num_prompts=2) == {"a": ["a0", "a1"], "b": ["b0", "b1"]}
    assert asked(num_prompts=2, skip_prompts=2) == {"a": ["a2", "a3"], "b": ["b2", "b3"]}
    assert asked(num_prompts=9, skip_prompts=4) == {"a": ["a4"], "b": ["b4"]}
    with pytest.raises(InputError, match="has 5 prompts and skip_prompts is 5; skip fewer"):
        asked(skip_prompts=5)
    other = tmp_path / "other" / "a.jsonl"
    other.parent.mkdir()
    other.write_text('{"prompt": "other"}\n')
    assert list(BenchConfig(datasets=(str(paths[0]), str(other))).load()) == ["a", str(other)]


def test_repeats_have_seeds_of_their_own_or_none() -> None:
    assert [BenchConfig(seed=5).params(1.0, repeat).seed for repeat in (0, 1)] == [5, 6]
    assert BenchConfig(unseeded=True).params(1.0, 0).seed is None
    assert [BenchConfig(ignore_eos=one).params(1.0, 0).ignore_eos for one in (False, True)] == [False, True]


def test_cases_are_plain_and_every_block_size_with_every_step_count_or_tree() -> None:
    config = BenchConfig(block_sizes=(4, 8), denoising_steps=(1, 2))
    assert [case.label for case in config.cases(16)] == ["plain", "B=4", "B=4 S=2", "B=8", "B=8 S=2"]
    trees = BenchConfig(block_sizes=(8,), tree_nodes=(0, 16)).cases(16)
    assert [case.label for case in trees] == ["plain", "B=8", "B=8 N=16"]
    assert BenchConfig().cases(16) == [PLAIN, fixed(16)]
    assert BenchConfig().cases(None) == [PLAIN]
    for varied in (config, BenchConfig(denoising_steps=(1, 2))):
        with pytest.raises(ConfigError, match="there is no drafter"):
            varied.cases(None)


def test_cases_leave_everything_else_as_the_engine_has_it() -> None:
    own = DecodingConfig(policy="feedback", verification="coupled", kv_dtype="int8")
    config = BenchConfig(block_sizes=(4,), policies=("goodput",), denoising_steps=(1, 2))
    plain, decided, *drafted = [case.decoding for case in config.cases(16, own)]
    assert plain == PLAIN.decoding
    assert decided == replace(own, policy="goodput")
    assert drafted == [replace(own, policy=None, block_size=4, denoising_steps=steps) for steps in (1, 2)]
    with pytest.raises(ConfigError, match="multi-step denoising"):
        config.cases(16, replace(own, verification="rejection"))


def test_cases_in_reports() -> None:
    def facts(case: Case) -> list[Any]:
        assert list(case.to_json()) == ["name", "block_size", "denoising_steps", "tree_nodes", "policy"]
        return list(case.to_json().values())

    config = BenchConfig(block_sizes=(4,), policies=("goodput",), tree_nodes=(0, 8))
    assert [facts(case) for case in config.cases(16)] == [
        ["plain", 1, 1, 0, ""],
        ["volley", 16, 1, 0, "goodput"],
        ["volley", 4, 1, 0, ""],
        ["volley", 4, 1, 8, ""],
    ]
    assert [case.label for case in config.cases(16)] == ["plain", "goodput", "B=4", "B=4 N=8"]


def test_answers_are_judged_alike_for_all_cases() -> None:
    right = replace(result([1, 2]), text="It is 7.")
    wrong = replace(result([1, 2]), text="It is 8.")

    def says(answer: GenerationResult) -> Runner:
        return lambda prompts, params: TimedResults([answer], 2.0)

    runners = {PLAIN: says(right), fixed(4): says(wrong)}
    asked = replace(conversation("a", "x"), row={"answer": "#### 7"})
    config = BenchConfig(score=True, repeats=1)
    records = measure(config, {"gsm8k": [asked]}, encode, runners, never).records
    assert [(record.scored, record.right) for record in records] == [(1, 1), (1, 0)]
    assert [summary.accuracy for summary in summarise(records)] == [1.0, 0.0]
    assert "| 100.0 % |" in to_markdown(summarise(records))
    unscored = measure(replace(config, score=False), {"gsm8k": [asked]}, encode, runners, never).records
    assert "accuracy" not in to_markdown(summarise(unscored))
