from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from volley.bench.measure import BenchEngine, Outcome, engine_runner, identical_share, measure
from volley.bench.tasks import PLAIN, BenchConfig, Case
from volley.errors import ConfigError
from volley.prompts import Conversation
from volley.types import GenerationResult, GenerationStats, SamplingParams


def result(token_ids: Sequence[int], **stats: Any) -> GenerationResult:
    numbers = {"output_tokens": len(token_ids), "time_to_first_token": 0.1, "total_seconds": 1.1, **stats}
    return GenerationResult("".join(map(str, token_ids)), list(token_ids), "length", GenerationStats(**numbers))


def conversation(name: str, *turns: str) -> Conversation:
    return Conversation(name, ({"role": "user", "content": turns[0]},), turns[1:])


class Runs:
    """Runners that note who ran on what, in order."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.log: list[tuple[str, tuple[int, ...], int]] = []
        self.stop_at = stop_at

    def of(self, case: Case, token_ids: list[int]) -> Any:
        def run(prompts: Sequence[list[int]], params: SamplingParams) -> Outcome:
            if len(self.log) == self.stop_at:
                raise KeyboardInterrupt
            self.log.append((case.label, tuple(map(len, prompts)), params.max_tokens))
            return Outcome([result(token_ids) for _ in prompts], 1.1)

        return run


def encode(messages: list[dict[str, str]]) -> list[int]:
    return [0] * sum(len(message["content"]) for message in messages)


def never(token_ids: list[int]) -> bool:
    return False


DRAFTED = Case("volley", 4)


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
        lambda token_ids: token_ids == [0, 1, 2],
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


def test_identical_share_counts_missing_tokens() -> None:
    assert identical_share([result([1, 2, 3])], [result([1, 9, 3, 4])]) == 0.5
    assert identical_share([result([])], [result([])]) == 1.0


def test_the_engine_runner_sets_the_case_and_forgets_prefixes() -> None:
    class Engine:
        block_size, denoising_steps, tree_nodes, resets = 0, 0, None, 0

        def reset_prefix_cache(self) -> None:
            self.resets += 1

        def encode(self, prompt: Any) -> list[int]:
            return list(prompt)

        def generate(self, prompts: Any, params: Any) -> Iterator[GenerationResult]:
            yield result([self.block_size, self.denoising_steps, self.tree_nodes or 0])

    engine = Engine()
    typed: BenchEngine = engine
    (tree,) = engine_runner(typed, Case("volley", 8, 1, 12))([[1]], SamplingParams()).results
    assert tree.token_ids == [8, 1, 12]
    outcome = engine_runner(typed, Case("volley", 8, 2))([[1]], SamplingParams())
    assert outcome.results[0].token_ids == [8, 2, 0]
    assert engine.resets == 2
    assert outcome.first_token() == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats is 0"),
        ({"datasets": ()}, "datasets is empty"),
        ({"block_sizes": (1,)}, "a block needs 2 or more"),
        ({"denoising_steps": (0,)}, "each must be at least 1"),
        ({"tree_nodes": (0, 1)}, "at least 2, anchor included"),
        ({"tree_nodes": (8,), "denoising_steps": (2,)}, "a tree grows from one denoising step"),
        ({"temperatures": (-1.0,)}, "each must be 0 or more"),
        ({"against": ("transformer",)}, r"unknown peer 'transformer'; did you mean 'transformers'\?"),
        ({"against": ("transformers",), "concurrency": 2}, "one prompt at a time"),
    ],
)
def test_unusable_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchConfig(**options)


def test_repeats_have_seeds_of_their_own_or_none() -> None:
    assert [BenchConfig(seed=5).params(1.0, repeat).seed for repeat in (0, 1)] == [5, 6]
    assert BenchConfig(unseeded=True).params(1.0, 0).seed is None


def test_cases_are_plain_and_every_block_size_with_every_step_count_or_tree() -> None:
    config = BenchConfig(block_sizes=(4, 8), denoising_steps=(1, 2))
    assert [case.label for case in config.cases(16)] == ["plain", "B=4", "B=4 S=2", "B=8", "B=8 S=2"]
    trees = BenchConfig(block_sizes=(8,), tree_nodes=(0, 16)).cases(16)
    assert [case.label for case in trees] == ["plain", "B=8", "B=8 N=16"]
    assert BenchConfig().cases(16) == [PLAIN, Case("volley", 16)]
    assert BenchConfig().cases(None) == [PLAIN]
    with pytest.raises(ConfigError, match="there is no drafter"):
        config.cases(None)
