"""A target divided over two processes answers as one process does (fp32), and no error of one leaves the other waiting.

Policies weigh modelled costs here, but for one pass that is timed.
"""

import gc
import io
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

from tests.conftest import TinyPair, byte_tokenizer
from tests.costs import settle
from tests.models.processes import run_ranks
from tests.models.targets.test_target import COMMON
from tests.tiny import (
    Answers,
    Taught,
    answers_and_drafts,
    block_proposer,
    eager_model,
    random_drafter,
    random_prompts,
)
from volley import Engine, SamplingParams, cli
from volley.cli.models import ModelOptions, load_engine
from volley.decode.work import Works
from volley.errors import ConfigError, ParallelError, UnsupportedModelError, VolleyError
from volley.memory.attention import paged_attention
from volley.memory.kv_store import KVStore
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.drafters import divided as divided_drafter
from volley.models.drafters.divided import DividedModel, divides, part_for
from volley.models.drafters.drafter import Drafter
from volley.models.targets.diffusion import load_target
from volley.models.targets.sharded import Allocate, Command, Forward, Move, ShardedTarget
from volley.models.targets.target import Target

COUNT = 10
PROMPTS = random_prompts(3, longest=30, seed=3, vocab=260)


@dataclass(frozen=True)
class Case:
    """Options of an engine, and how it is asked."""

    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    is_drafting: bool = True
    rounds: int = 1


SAMPLED = {"temperature": 1.0, "seed": 5}
CASES = {
    "plain": Case(is_drafting=False),
    "chains": Case({"policy": "fixed"}),
    "goodput": Case({"policy": "goodput"}),
    "trees": Case({"policy": "fixed", "tree_nodes": 10}),
    "preemption": Case({"policy": "fixed", "page_size": 4, "num_pages": 16, "max_batch_tokens": 20}),
    "prefix hits": Case({"policy": "fixed", "page_size": 4}, rounds=2),
    "a seed": Case({"policy": "fixed"}, SAMPLED),
    "speculative sampling": Case({"policy": "fixed", "verification": "rejection"}, SAMPLED),
    "8-bit K/V": Case({"policy": "fixed", "kv_dtype": "int8"}),
}


class Teased(Taught):
    """Puts a wrong token before every second one, so that a tree's right path is not its first."""

    def position_logits(self, works: Works, blocks: Any) -> tuple[Tensor, Tensor]:
        logits, hidden = super().position_logits(works, blocks)
        rows = torch.arange(0, len(logits), 2)
        best, token = logits[rows].max(dim=-1)
        logits[rows, (token + 1) % logits.shape[1]] = best + 0.5
        return logits, hidden


class Answered(list[list[int]]):
    """Tokens of every answer, and what else they have shown."""

    preemptions = cached = drafted = 0


def answer(target: Target, drafter: Drafter, case: Case, answers: Answers) -> Answered:
    with pytest.MonkeyPatch.context() as patch:
        settle(patch)
        return _answer(target, drafter, case, answers)


def _answer(target: Target, drafter: Drafter, case: Case, answers: Answers) -> Answered:
    engine = Engine(target, drafter if case.is_drafting else None, **case.options)
    if case.is_drafting:
        engine.core.proposer = (Teased if "tree_nodes" in case.options else Taught)(block_proposer(engine), answers)
    found = Answered()
    for _ in range(case.rounds):
        for result in engine.generate(PROMPTS, SamplingParams(max_tokens=COUNT, **case.sampling)):
            found.append(result.token_ids)
            found.preemptions += result.stats.preemptions
            found.cached += result.stats.cached_tokens
            found.drafted += sum(length - 1 for length in result.stats.accepted_lengths)
    engine.check_integrity()
    del engine
    gc.collect()  # its pages are given up on all ranks
    return found


def answer_all(path: Path, drafter: Path, answers: Answers) -> dict[str, Answered]:
    target = load_target(path, torch.float32, "auto", tensor_parallel=True)
    assert [heads for heads, _ in target.kv_shapes] == [1] * 4, "each of two ranks keeps one of two heads"
    own = Drafter.from_pretrained(drafter, torch.float32)
    return {name: answer(target, own, case, answers) for name, case in CASES.items()}


def plain_answers(path: Path) -> dict[tuple[int, ...], list[int]]:
    engine = Engine.from_pretrained(path, dtype=torch.float32)
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=COUNT))
    return {tuple(prompt): result.token_ids for prompt, result in zip(PROMPTS, results, strict=True)}


@pytest.fixture(scope="module")
def answers(tiny_pair: TinyPair) -> Answers:
    return plain_answers(tiny_pair.target)


@pytest.fixture(scope="module")
def divided(tiny_pair: TinyPair, answers: Answers) -> dict[str, Answered]:
    ended = run_ranks(answer_all, tiny_pair.target, tiny_pair.drafter, answers)
    assert ended.exit_codes == [0, 0], ended.result
    return ended.result


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_answer_as_one(
    divided: dict[str, Answered], tiny_pair: TinyPair, answers: Answers, name: str
) -> None:
    target = Target.from_pretrained(tiny_pair.target, torch.float32)
    expected = answer(target, Drafter.from_pretrained(tiny_pair.drafter, torch.float32), CASES[name], answers)
    assert divided[name] == expected


@pytest.mark.slow
def test_the_cases_are_what_they_are_called(divided: dict[str, Answered]) -> None:
    assert divided["preemption"].preemptions > 0
    assert divided["prefix hits"].cached > 0
    assert min(divided[name].drafted for name in ("chains", "goodput", "trees")) > COUNT


DRAFTED: dict[str, dict[str, Any]] = {
    "chains": {},
    "a window": {"draft_window": 9, "page_size": 4},
    "trees": {"tree_nodes": 10},
    "8-bit K/V": {"draft_kv_dtype": "int8"},
    "denoising": {"denoising_steps": 2},
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a head": {"head": HeadConfig(type="residual", rank=4, candidates=16)},
    "biases": {"attention_bias": True},
}


def draft_all(path: Path, *, is_divided: bool) -> dict[str, list[list[list[int]]]]:
    """All drafts of whole drafters or of divided ones, by their shapes and the engines' options."""
    target, found = load_target(path, torch.float32, "auto", tensor_parallel=is_divided), {}
    for shape, changes in SHAPES.items():
        drafter = random_drafter(vocab_size=260, num_hidden_layers=2, **changes)
        for name, options in DRAFTED.items():
            engine = Engine(target, drafter, **{"policy": "fixed", **options})
            model = engine.core.draft_model
            assert model is not None
            assert isinstance(model, DividedModel) == is_divided
            assert model.drafter.kv_shapes == [(1 if is_divided else 2, drafter.config.head_dim)] * 2
            drafts = answers_and_drafts(engine, PROMPTS, SamplingParams(max_tokens=COUNT, ignore_eos=True))[1]
            found[f"{shape}, {name}"] = drafts
            if block_proposer(engine).seconds(8, 2) <= 0:
                raise AssertionError("a draft on made-up text takes time")
            del engine, model
            gc.collect()
    return found


def draft_divided(path: Path) -> dict[str, list[list[list[int]]]]:
    return draft_all(path, is_divided=True)


def draft_faultily(path: Path) -> dict[str, list[list[list[int]]]]:
    """Planted: no rank adds what the other has."""
    divided_drafter.sum_over_ranks = lambda _, __, output: output
    return draft_all(path, is_divided=True)


@pytest.mark.slow
def test_a_divided_drafter_drafts_as_the_whole_one(tiny_pair: TinyPair) -> None:
    expected = draft_all(tiny_pair.target, is_divided=False)
    ended = run_ranks(draft_divided, tiny_pair.target)
    assert ended.exit_codes == [0, 0], ended.result
    assert ended.result == expected
    assert len({str(drafts) for drafts in expected.values()}) > len(SHAPES)
    faulty = run_ranks(draft_faultily, tiny_pair.target)
    assert all(faulty.result[name] != drafts for name, drafts in expected.items())


def test_who_is_not_divided_stays_whole(tiny_pair: TinyPair) -> None:
    drafter = Drafter.from_pretrained(tiny_pair.drafter, torch.float32)
    assert divides(drafter.config, 2)
    assert not divides(drafter.config, 3)
    assert not divides(replace(drafter.config, num_key_value_heads=1), 2)
    assert part_for(drafter, Target.from_pretrained(tiny_pair.target, torch.float32)) is drafter


SHAPE: dict[str, Any] = {**COMMON, "vocab_size": 260, "num_hidden_layers": 2}


@pytest.mark.slow
def test_biases_and_a_head_of_its_own(tmp_path: Path) -> None:
    model = eager_model(LlamaConfig(**SHAPE, attention_bias=True, tie_word_embeddings=False))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert run_ranks(plain_of_ranks, tmp_path) == (plain_answers(tmp_path), [0, 0])


def plain_of_ranks(path: Path) -> dict[tuple[int, ...], list[int]]:
    whole = dict.fromkeys([f"model.layers.*.self_attn.{name}_proj" for name in "kv"], "colwise_gather_output")
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_size=2, tp_plan=whole))
    with pytest.raises(UnsupportedModelError, match="leaves K/V heads undivided"):
        ShardedTarget(model)
    engine = Engine.from_pretrained(path, dtype=torch.float32, tensor_parallel=True)
    with pytest.raises(ConfigError, match="hold one target"):
        Engine.from_pretrained(path, dtype=torch.float32, tensor_parallel=True)
    with pytest.raises(ConfigError, match="rank 0 alone"):
        engine.target.model(torch.zeros(1, 2, dtype=torch.long))
    assert engine.cycle_seconds(1, 2) > 0
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=COUNT))
    return {tuple(prompt): result.token_ids for prompt, result in zip(PROMPTS, results, strict=True)}


# -- faults ------------------------------------------------------------------------------------------------------------
class Faulty(ShardedTarget):
    """Rank 1 does right by the first engine, moves nothing for the second, has a wrong part for the third, then raises."""

    engines = 0

    def obey(self, command: Command, stores: dict[int, KVStore]) -> None:
        if isinstance(command, Allocate):
            self.engines += 1
            if self.engines == 3:
                self.model.get_decoder().layers[1].self_attn.o_proj.weight.data *= 1.1
        if self.engines == 2 and isinstance(command, Move):
            return
        if self.engines == 4 and isinstance(command, Forward):
            raise MemoryError("planted")
        super().obey(command, stores)


def answer_faultily(path: Path, drafter: Path, answers: Answers) -> tuple[list[Answered], list[str]]:
    target, own = Faulty.from_pretrained(path, torch.float32), Drafter.from_pretrained(drafter, torch.float32)
    found = [answer(target, own, CASES["trees"], answers) for _ in range(3)]
    engine, raised = Engine(target), []
    engine.add_request(PROMPTS[0])
    for _ in range(2):
        with pytest.raises(ParallelError) as error:
            engine.step()
        raised.append(str(error.value))
    return found, raised


@pytest.mark.slow
def test_faults_are_seen(tiny_pair: TinyPair, answers: Answers) -> None:
    ended = run_ranks(answer_faultily, tiny_pair.target, tiny_pair.drafter, answers)
    (right, unmoved, wrong), raised = ended.result
    assert right == list(answers.values())
    assert unmoved != right
    assert wrong != right
    assert "rank 0 of 2 cannot go on" in raised[0]
    assert "start them again" in raised[1]
    assert ended.exit_codes == [0, 1]


def fail_on_first_rank(path: Path) -> None:
    engine = Engine.from_pretrained(path, dtype=torch.float32, tensor_parallel=True)
    calls = iter(range(100))

    def failing(*args: Any, **options: Any) -> Tensor:
        if next(calls) == 5:
            raise MemoryError("planted")
        return paged_attention(*args, **options)

    engine.target.attention = failing
    list(engine.generate(PROMPTS))


def test_an_error_on_the_first_rank_ends_the_others(tiny_pair: TinyPair) -> None:
    ended = run_ranks(fail_on_first_rank, tiny_pair.target)
    assert isinstance(ended.result, ParallelError)
    assert "planted" in str(ended.result)
    assert ended.exit_codes == [1, 1]


# -- the command line --------------------------------------------------------------------------------------------------
def command(*words: str) -> str:
    sys.argv, sys.stdout = ["volley", *words], io.StringIO()
    cli.app(standalone_mode=False)
    return sys.stdout.getvalue()


@pytest.mark.slow
def test_the_command_line(tiny_pair: TinyPair) -> None:
    words = ["generate", "abc", "--target", tiny_pair.target, "--drafter", tiny_pair.drafter]
    words += ["--dtype", "float32", "--max-tokens", "4", "--policy", "fixed", "--raw", "--tensor-parallel"]
    plain = Engine.from_pretrained(tiny_pair.target, dtype=torch.float32, policy="plain")
    (expected,) = plain.generate(["abc"], SamplingParams(max_tokens=4))
    ended = run_ranks(command, *map(str, words))
    assert ended.exit_codes == [0, 0], ended.result
    assert ended.result == expected.text + "\n"


# -- refusals ----------------------------------------------------------------------------------------------------------
def changed(path: Path, folder: Path, **values: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


REFUSED: dict[str, tuple[dict[str, Any], type[VolleyError], str]] = {
    "heads": ({"num_key_value_heads": 1}, ConfigError, "num_key_value_heads is 1; start a number of processes that"),
    "block diffusion": ({"block_diffusion": {}}, UnsupportedModelError, "denoises canvases; use vLLM"),
    "quantised": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
        UnsupportedModelError,
        "quantised; use vLLM",
    ),
    "recurrent layers": (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        UnsupportedModelError,
        "has layers of type linear_attention; use vLLM",
    ),
    "no plan": ({"model_type": "gpt2"}, UnsupportedModelError, "has no plan for it; use vLLM"),
    "experts": (
        Qwen3MoeConfig(**SHAPE).to_dict() | {"num_hidden_layers": 4},
        UnsupportedModelError,
        "parts of type .*; use vLLM",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused(
    name: str, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, error, message = REFUSED[name]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(error, match=message):
        ShardedTarget.from_pretrained(changed(tiny_pair.target, tmp_path, **values))


def test_three_processes_cannot_divide_two_heads(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"3 processes cannot divide .* start a number of processes that divides 2"):
        ShardedTarget.from_pretrained(tiny_pair.target)


def test_one_process_divides_nothing(tiny_pair: TinyPair) -> None:
    with pytest.raises(ConfigError, match="start with `torchrun"):
        Engine.from_pretrained(tiny_pair.target, tensor_parallel=True)


def test_codes_and_other_devices_are_refused(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="weights='int8' is for a target in one process"):
        ShardedTarget.from_pretrained(tiny_pair.target, weights="int8")
    with pytest.raises(ConfigError, match="is a GGUF file"):
        ShardedTarget.from_pretrained("model.gguf")
    with pytest.raises(ConfigError, match="device is meta; leave device out"):
        ShardedTarget.from_pretrained(tiny_pair.target, device="meta")
    with pytest.raises(ConfigError, match="long_context is for a target in one process"):
        load_engine(ModelOptions(long_context=True, tensor_parallel=True))


def test_old_packages_are_refused(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("transformers.__version__", "5.18.1")
    with pytest.raises(ConfigError, match="needs transformers 5"):
        ShardedTarget.from_pretrained(tiny_pair.target)
    monkeypatch.undo()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ConfigError, match="pip install accelerate"):
        ShardedTarget.from_pretrained(tiny_pair.target)
