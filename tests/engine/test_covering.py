"""Speculation changes no answer: a covering array of families, drafters, policies, pools, batches and kinds of requests (fp32).

Every two values of different dimensions meet in a row. Each row answers all prompts twice, the second time with cached
prefixes. The reference is transformers' ``generate`` for greedy answers on a pool of the model's type. For the others it
is plain decoding on a pool of the same type, one request at a time and without a prefix cache.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.test_policies import Climbing, Copying, random_pilot
from tests.engine.test_recurrent import keep_everything
from tests.engine.test_trees import tempt
from tests.hybrid import CONFIGS, PROMPTS
from tests.models.targets.test_target import ARCHITECTURES
from tests.pairwise import Row, pairwise
from tests.tiny import VOCAB, eager_model, greedy, random_drafter, teach
from volley import Engine, SamplingParams
from volley.decode.rules import Penalties
from volley.engine.recurrent import RecurrentStates
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.drafters.drafter import Drafter
from volley.models.targets.target import Target

COUNT = 20
GREEDY = SamplingParams(max_tokens=COUNT)
SEEDED = replace(GREEDY, temperature=1.0, seed=11)
REQUESTS: dict[str, list[SamplingParams]] = {
    "greedy": [GREEDY],
    "seeded": [SEEDED, replace(SEEDED, top_k=20, temperature=0.6), replace(SEEDED, top_p=0.8, draft_temperature=0.5)],
    "penalised": [
        replace(GREEDY, frequency_penalty=1.5),
        replace(GREEDY, presence_penalty=1.0, repetition_penalty=1.2, logit_bias=((3, 2.0), (11, -100.0))),
        replace(SEEDED, min_p=0.1, repetition_penalty=1.6),
    ],
}
HEADS: dict[str, dict[str, Any]] = {
    "none": {},
    "residual": {"head": HeadConfig(type="residual", rank=4, candidates=8)},
    "dspark": {"head": HeadConfig(type="dspark", rank=4, candidates=VOCAB)},
}
DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {"block_size": 1},
    "blocks of 3": {"block_size": 3},
    "blocks of 6": {"policy": "fixed"},
    "trees of 25": {"tree_nodes": 25},
    "two passes": {"denoising_steps": 2},
    "by confidence": {"denoising_steps": 4, "denoising_threshold": 0.1},
    "goodput": {"policy": "goodput"},
    "feedback": {"policy": "feedback"},
    "climbing": {"policy": Climbing},
    "copying": {"policy": Copying},
    "pilot": {"policy": random_pilot},
}
POOLS: dict[str, dict[str, int]] = {
    "pages of 1": {"page_size": 1, "num_pages": 500},
    "pages of 4": {"page_size": 4, "num_pages": 160},
    "few of 1": {"page_size": 1, "num_pages": 62},
    "few of 4": {"page_size": 4, "num_pages": 16},
}
DIMENSIONS: dict[str, list[Any]] = {
    "target": [
        *(("qwen3", kind) for kind in ("auto", "int8", "int4")),
        *((name, "auto") for name in ("gemma2", "gpt_oss", "deepseek_v2", "qwen3_5_text", "kimi_linear", "nemotron_h")),
    ],
    "drafts": list(DRAFTS),
    "requests": list(REQUESTS),
    "head": list(HEADS),
    "pool": list(POOLS),
    "draft_window": [None, 6],
    "draft_kv_dtype": ["auto", "int8", "int4"],
    "max_batch_tokens": [5, 11, 512],
    "max_running": [1, 3, 64],
    "prefix_caching": [True, False],
}
ROWS = pairwise(DIMENSIONS)


@functools.cache
def target(name: str) -> Target:
    return Target(eager_model({**ARCHITECTURES, **CONFIGS}[name]()))


@functools.cache
def drafter(head: str, num_layers: int) -> Drafter:
    return random_drafter(num_target_layers=num_layers, **HEADS[head])


def params_of(kind: str) -> list[SamplingParams]:
    return [REQUESTS[kind][index % len(REQUESTS[kind])] for index in range(len(PROMPTS))]


@functools.cache
def expected(name: str, kv_dtype: Any, kind: str) -> list[list[int]]:
    engine = Engine(target(name), page_size=4, kv_dtype=kv_dtype, block_size=1, prefix_caching=False)
    plain = [
        next(engine.generate([prompt], own)).token_ids for prompt, own in zip(PROMPTS, params_of(kind), strict=True)
    ]
    if kind == "greedy" and kv_dtype == "auto":
        model = eager_model({**ARCHITECTURES, **CONFIGS}[name]())
        assert plain == [greedy(model, prompt, COUNT) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in plain}) > 3, "answers that are all alike would prove little"
    return plain


def taught(row: Row) -> Engine:
    """An engine whose drafter is right four times of five, with another token before the best of every third position."""
    name, kv_dtype = row["target"]
    own = drafter(row["head"], target(name).num_layers)
    options = {
        key: row[key] for key in ("draft_window", "draft_kv_dtype", "max_batch_tokens", "max_running", "prefix_caching")
    }
    options |= POOLS[row["pool"]] | DRAFTS[row["drafts"]]
    if callable(options.get("policy")):
        options["policy"] = options["policy"](own) if row["drafts"] == "pilot" else options["policy"]()
    engine = Engine(target(name), own, kv_dtype=kv_dtype, **options)
    answers = expected(name, kv_dtype, row["requests"])
    teach(engine, {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)})
    if row["drafts"].startswith(("trees", "climbing")):
        tempt(engine)
    return engine


def answers_of(row: Row) -> tuple[list[list[int]], int, int]:
    """The answers of both rounds, the longest accepted length, and how often a request was preempted."""
    engine, params = taught(row), params_of(row["requests"])
    results = [result for _ in range(2) for result in engine.generate(PROMPTS, params)]
    engine.check_integrity()
    assert engine.snapshot().pages_used == 0
    longest = max(length for result in results for length in result.stats.accepted_lengths)
    return [result.token_ids for result in results], longest, sum(result.stats.preemptions for result in results)


def wanted(row: Row) -> list[list[int]]:
    return expected(*row["target"], row["requests"]) * 2


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if number % 8 == 0 else pytest.mark.slow) for number, row in enumerate(ROWS)],
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_answers_are_those_of_plain_decoding(row: Row) -> None:
    answers, longest, preemptions = answers_of(row)
    assert answers == wanted(row)
    if row["drafts"] in ("blocks of 6", "two passes", "trees of 25") and row["head"] == "none":
        assert longest > 3
    if row["pool"].startswith("few") and row["max_batch_tokens"] > 5 and row["max_running"] > 3:
        assert preemptions > 0


@pytest.mark.parametrize("name", ["qwen3", "nemotron_h"])
def test_settings_may_change_between_steps(name: str) -> None:
    row = {**ROWS[0], "target": (name, "auto"), "drafts": "trees of 25", "requests": "greedy", "head": "none"}
    engine = taught({**row, "pool": "pages of 4", "max_batch_tokens": 13})
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    step = 0
    while engine.core.scheduler.has_work:
        nodes = (None, 2, 9, 30)[step % 4]
        steps = 1 if nodes else 1 + step % 3
        changes = {"block_size": 1 + step % 6, "tree_nodes": nodes, "denoising_steps": steps}
        engine.reconfigure(replace(engine.config, policy=None, **changes))
        engine.step()
        step += 1
    assert [request.result().token_ids for request in requests] == expected(name, "auto", "greedy")


def forget_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Penalties.apply
    monkeypatch.setattr(Penalties, "apply", lambda self, logits, paths: honest(self, logits, [()] * len(paths)))


def keep_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentStates, "keep", keep_everything)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [forget_the_draft, keep_every_state])
def test_a_planted_fault_is_seen(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted_before = [wanted(row) for row in ROWS]
    plant(monkeypatch)
    found = (answers_of(row)[0] for row in ROWS)
    assert any(answers != own for answers, own in zip(found, wanted_before, strict=True))
