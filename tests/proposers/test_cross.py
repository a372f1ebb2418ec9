"""A drafter that reads the target's K/V from its pages: answers are the target's, drafts those that training computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TinyPair
from tests.tiny import answers_and_drafts, drafter_config, greedy, make_pair, random_prompts
from tests.train.runs import make_rows, tiny_run, write_rows
from volley import Engine, SamplingParams, Target
from volley.errors import CheckpointError, ConfigError, MismatchError
from volley.files import REFERENCE
from volley.memory.kv_store import KVDtype
from volley.models.drafters.cross import MASK, CrossDrafter
from volley.models.drafters.drafter import Drafter
from volley.proposers.cross import CrossProposer
from volley.results import GenerationResult
from volley.train.anchors import build_blocks
from volley.train.cross import CrossForward, CrossStep, TargetKV, train_cross
from volley.train.documents import Document, pad
from volley.train.features import FrozenTarget
from volley.train.options import TrainConfig

PROMPTS = random_prompts(3, longest=30, seed=5)
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
KV: list[KVDtype] = ["auto", "int4"]


def random_cross(**changes: Any) -> CrossDrafter:
    torch.manual_seed(1)
    drafter = CrossDrafter(drafter_config(**{"target_layer_ids": (1, 3), **changes})).eval()
    for name, weight in drafter.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return drafter.requires_grad_(False)


def plain(target: Target, prompts: list[list[int]], params: SamplingParams, **options: Any) -> list[list[int]]:
    return [one.token_ids for one in Engine(target, block_size=1, **options).generate(prompts, params)]


@pytest.mark.parametrize("kv_dtype", KV)
@pytest.mark.parametrize(
    "options", [{"policy": "fixed"}, {"policy": "fixed", "denoising_steps": 3}, {"policy": "goodput:drafts"}]
)
def test_a_random_drafter_leaves_greedy_answers_as_they_are(kv_dtype: KVDtype, options: dict[str, Any]) -> None:
    pair = make_pair()
    pages: dict[str, Any] = {"page_size": 4, "num_pages": 60, "kv_dtype": kv_dtype}
    proposer = CrossProposer(random_cross(), pair.target)
    engine = Engine(pair.target, proposer=proposer, **options, **pages)
    results, drafts = answers_and_drafts(engine, PROMPTS, PARAMS)
    assert [one.token_ids for one in results] == plain(pair.target, PROMPTS, PARAMS, **pages)
    if kv_dtype == "auto":
        assert [one.token_ids for one in results] == [greedy(pair.hf, prompt, 16) for prompt in PROMPTS]
    assert any(draft for own in drafts for draft in own)
    engine.check_integrity()
    assert engine.core.pool.num_used == 0
    assert 0 < proposer.seconds(6, 2) < 10


def test_a_seed_gives_the_tokens_of_plain_decoding() -> None:
    pair, hot = make_pair(), SamplingParams(max_tokens=16, temperature=1.0, seed=3, ignore_eos=True)
    engine = Engine(pair.target, proposer=CrossProposer(random_cross(), pair.target), policy="fixed")
    assert [one.token_ids for one in engine.generate(PROMPTS, hot)] == plain(pair.target, PROMPTS, hot)


@pytest.mark.parametrize("window", [None, 8])
def test_drafts_are_those_of_the_forward_pass_in_training(
    tiny_pair: TinyPair, tmp_path: Path, window: int | None
) -> None:
    """Training reads K/V that transformers' cache has of the whole text; drafting reads the pages."""
    frozen = FrozenTarget(str(tiny_pair.target), torch.float32, torch.device("cpu"))
    target = Target.from_pretrained(tiny_pair.target, torch.float32, "cpu")
    drafter = random_cross(vocab_size=260)
    engine = Engine(target, proposer=CrossProposer(drafter, target), policy="fixed", draft_window=window, page_size=4)
    prompt = [*range(20, 40)]
    (result,), (drafts,) = answers_and_drafts(engine, [prompt], PARAMS)
    text, anchors = prompt + result.token_ids, [len(prompt)]
    for length in result.stats.accepted_lengths:
        anchors.append(anchors[-1] + length)
    config = TrainConfig(**tiny_run(tiny_pair.target, tmp_path))
    step = CrossStep(config, frozen, drafter.config, CrossForward(drafter, "sdpa"))
    document = Document(torch.tensor(text, dtype=torch.int32), len(prompt))
    features = TargetKV(frozen, drafter.config.target_layer_ids, with_final=False)([document], [0])
    assert drafts[0] == [], "the first pass reads the prompt"
    for anchor, draft in [pair for pair in zip(anchors, drafts[1:], strict=False) if pair[1]]:
        blocks = build_blocks(pad([document]), [len(text)], [[anchor]], len(draft) + 1, step.mask_token_id)
        states = step.states(blocks, features, window)
        assert (states[1:] @ frozen.head.T).argmax(-1).tolist() == draft
    assert len(drafts) > 3


def states_of(drafter: CrossDrafter, embeddings: torch.Tensor, masked: list[bool]) -> torch.Tensor:
    positions = torch.arange(len(masked))[None]
    with torch.inference_mode():
        return drafter.denoise(embeddings, torch.tensor([masked]), positions, lambda _, queries: queries)


def test_masks_have_a_row_of_their_own_and_the_timestep_an_embedding() -> None:
    drafter, rows = random_cross(), torch.randn(1, 4, 32)
    others = torch.cat([rows[:, :2], torch.randn(1, 2, 32)], dim=1)
    masked = [False, False, True, True]
    before = states_of(drafter, rows, masked)
    assert torch.equal(before, states_of(drafter, others, masked)), "the target has no embedding of a mask"
    assert not torch.equal(before, states_of(drafter, others, [False] * 4))
    assert MASK < 0
    drafter.timestep.weight[4] += 1.0  # two of three slots are masked: level 4 of 5
    assert not torch.equal(before, states_of(drafter, rows, masked))
    again = states_of(drafter, rows, [False, True, True, True])
    drafter.timestep.weight[4] -= 1.0
    assert torch.equal(again, states_of(drafter, rows, [False, True, True, True])), "another level reads another row"


def test_a_block_sees_itself_in_both_directions() -> None:
    drafter, rows = random_cross(), torch.randn(1, 4, 32)
    changed = rows.clone()
    changed[:, 3] += 1.0
    before, after = (states_of(drafter, own, [False] * 4) for own in (rows, changed))
    assert not torch.equal(before[:, 1], after[:, 1])


def test_a_target_with_other_kv_is_refused() -> None:
    with pytest.raises(MismatchError, match="reads K/V of 2 heads of 8"):
        CrossProposer(random_cross(), make_pair(num_key_value_heads=4).target)


def test_a_training_writes_a_drafter_of_its_own_kind(tiny_pair: TinyPair, tmp_path: Path) -> None:
    options = tiny_run(tiny_pair.target, tmp_path, num_layers=2, reveal=0.5, max_steps=6, epochs=99, save_steps=3)
    whole = CrossDrafter.from_pretrained(train_cross(TrainConfig(**options)))
    assert whole.config.target_layer_ids == (0, 2)
    assert json.loads((tmp_path / "run" / "training_report.json").read_text())["data"]["parameters"] > 1000
    with pytest.raises(ConfigError, match="no init, head or feature cache"):
        train_cross(TrainConfig(**{**options, "head": "residual"}))
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        Drafter.from_pretrained(tmp_path / "run")


@pytest.mark.slow
def test_it_learns_and_drafts_for_the_bundled_target(tmp_path: Path) -> None:
    """The loss falls, drafts are accepted, and answers stay those of plain decoding, with 4-bit K/V too."""
    target = Target.from_pretrained(REFERENCE / "target", torch.float32, "cpu")
    chats = [row["messages"][:1] for row in make_rows(4)]
    params = SamplingParams(max_tokens=24)
    answers: list[GenerationResult] = list(Engine(target).generate(chats, params))
    rows = [
        {"messages": [*chat, {"role": "assistant", "content": answer.text}]}
        for chat, answer in zip(chats, answers, strict=True)
    ]
    options: dict[str, Any] = {"target": str(REFERENCE / "target"), "data": str(write_rows(tmp_path / "rows", rows))}
    options |= {
        "out": str(tmp_path / "run"),
        "max_steps": 40,
        "epochs": 99,
        "anchors_per_sequence": 12,
        "eval_share": 0.0,
        "log_steps": 1,
    }
    folder = train_cross(TrainConfig(**options))
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    losses = [float(line.split('"loss": ')[1].split(",")[0]) for line in log if '"train"' in line]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    for kv_dtype in KV:
        expected = [one.token_ids for one in Engine(target, block_size=1, kv_dtype=kv_dtype).generate(chats, params)]
        for steps in (1, 3)[: 1 + (kv_dtype == "auto")]:
            engine = Engine(
                target, proposer=CrossProposer(folder, target), policy="fixed", kv_dtype=kv_dtype, denoising_steps=steps
            )
            results = list(engine.generate(chats, params))
            assert [one.token_ids for one in results] == expected
            lengths = [length for one in results for length in one.stats.accepted_lengths]
            assert sum(lengths) > 1.5 * len(lengths)
