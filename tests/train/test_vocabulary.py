"""The vocabulary that a drafter drafts: chosen where that promises speed, copied from the target, and no answer changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from volley import Engine, SamplingParams
from volley.errors import ConfigError
from volley.models.checkpoints.formats import read_checkpoint
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import export
from volley.tensors import load_tensors, save_tensors
from volley.train.documents import Document, response_counts
from volley.train.features import FrozenTarget
from volley.train.loop import train
from volley.train.losses import Objective, block_loss
from volley.train.options import TrainConfig
from volley.train.vocabulary import (
    DRAWN,
    LOOKED_AT,
    LossTokens,
    choose_vocabulary,
    coverage,
    loss_tokens,
)

from .. import tiny
from ..conftest import TinyPair, byte_tokenizer
from .runs import make_rows, tiny_run

WIDTH = 64
LARGE = 65_536


def documents(vocabulary: int, rows: int = 40, length: int = 500) -> list[Document]:
    """Random responses of so many tokens, after prompts of another one that never comes in them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (rows, length), generator=generator, dtype=torch.int32)
    return [Document(torch.cat([torch.full((3,), LARGE - 1, dtype=torch.int32), row]), 3) for row in tokens]


def test_only_responses_are_counted() -> None:
    counts = response_counts(documents(5), LARGE)
    assert int(counts.sum()) == 40 * 500
    assert int(counts[5:].sum()) == 0
    assert coverage(counts, counts, 5) == 1
    assert coverage(counts, counts.roll(1), 5) == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(
    ("vocabulary", "weights", "expected"),
    [
        (4000, 2 * LARGE * WIDTH, 8192),  # a third of a cycle is the draft's head
        (4000, 40 * LARGE * WIDTH, None),  # a fortieth is
        (12_000, 2 * LARGE * WIDTH, 16_384),
        (60_000, 2 * LARGE * WIDTH, None),  # the halves hardly tell anything about each other
    ],
)
def test_the_choice_weighs_bytes_against_what_is_lost(vocabulary: int, weights: int, expected: int | None) -> None:
    found = choose_vocabulary(documents(vocabulary, length=5000), LARGE, WIDTH, weights)
    assert found == expected


def test_a_small_vocabulary_is_left_alone() -> None:
    assert choose_vocabulary(documents(5), 8192, WIDTH, 1) is None


def large_target(folder: Path) -> Path:
    """A tiny target most of whose weights are its head's."""
    config = tiny.target_config(vocab_size=20_000, max_position_embeddings=256, eos_token_id=2)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_training_chooses_by_itself_and_answers_stay(tmp_path: Path) -> None:
    target = large_target(tmp_path / "target")
    options = tiny_run(target, tmp_path, eval_prompts=2, eval_max_tokens=6)
    folder = train(TrainConfig(**options))
    drafter = Drafter.from_pretrained(folder, torch.float32)
    assert (drafter.config.draft_vocab_size, drafter.config.vocab_size) == (8192, 20_000)
    drafted = drafter.drafted
    assert drafted is not None
    assert drafter.lm_head is not None
    letters = {token for row in make_rows(24) for token in byte_tokenizer()(row["messages"][1]["content"])["input_ids"]}
    assert letters <= set(drafted.tolist())
    head = Qwen3ForCausalLM.from_pretrained(target).lm_head.weight
    assert torch.equal(drafter.lm_head.weight, head[drafted].bfloat16().float())
    engine = Engine.from_pretrained(target, drafter=folder, dtype=torch.float32, policy="fixed")
    plain = Engine(engine.target, block_size=1)
    for params in (SamplingParams(max_tokens=12), SamplingParams(temperature=1, seed=3, max_tokens=12)):
        (mine,), (expected,) = (each.generate(["the cat"], params) for each in (engine, plain))
        assert mine.token_ids == expected.token_ids
    whole = train(TrainConfig(**{**options, "out": str(tmp_path / "whole"), "draft_vocab_size": 0}))
    assert Drafter.from_pretrained(whole).config.draft_vocab_size is None


def reduced_run(tiny_pair: TinyPair, folder: Path, **changes: Any) -> dict[str, Any]:
    return tiny_run(tiny_pair.target, folder, draft_vocab_size=40, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["residual", "markov"])
def test_a_reduced_drafter_is_trained_on_and_exported(tiny_pair: TinyPair, tmp_path: Path, head: str) -> None:
    options = reduced_run(tiny_pair, tmp_path, head=head, head_rank=4)
    first = train(TrainConfig(**options))
    again = {"init": str(first), "max_steps": 1, "learning_rate": 1e-9}
    second = train(TrainConfig(**{**options, **again, "out": str(tmp_path / "second")}))
    one, two = (Drafter.from_pretrained(folder).state_dict() for folder in (first, second))
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    third = train(
        TrainConfig(
            **tiny_run(tiny_pair.target, tmp_path, **again, head=head, head_rank=4, out=str(tmp_path / "third"))
        )
    )
    assert read_checkpoint(third).config.draft_vocab_size is None
    written = export(first, tmp_path / "sglang", "sglang", target=str(tiny_pair.target), drop_head=True)
    assert written.config.draft_vocab_size is None


def test_another_head_cannot_be_trained_on(tiny_pair: TinyPair, tmp_path: Path) -> None:
    options = reduced_run(tiny_pair, tmp_path)
    first = train(TrainConfig(**options))
    tensors = load_tensors(first / "model.safetensors")
    save_tensors(first / "model.safetensors", {**tensors, "lm_head.weight": tensors["lm_head.weight"] * 2})
    with pytest.raises(ConfigError, match="a head of its own, and training uses the target's"):
        train(TrainConfig(**{**options, "init": str(first), "out": str(tmp_path / "second")}))
    with pytest.raises(ConfigError, match="draft_vocab_size is -1; it must be 0 or more"):
        TrainConfig(**reduced_run(tiny_pair, tmp_path) | {"draft_vocab_size": -1})
    with pytest.raises(ConfigError, match="draft_vocab_size is 260; it must be between 1 and 259"):
        train(TrainConfig(**{**options, "draft_vocab_size": 260, "out": str(tmp_path / "third")}))


def test_a_loss_on_some_tokens_is_on_average_the_loss_on_all() -> None:
    """Also with a bias in the head. Every other token is drawn equally often, the labels are always there."""
    torch.manual_seed(0)
    vocabulary, width = LOOKED_AT + 4 * DRAWN, 8
    counts = torch.zeros(vocabulary)
    counts[torch.randperm(vocabulary)[:LOOKED_AT]] = 1
    tokens, states = LossTokens(counts), torch.randn(3, width)
    for head in (torch.randn(vocabulary, width) / 2, torch.randn(vocabulary, width + 1) / 2):
        sums = []
        for number in range(64):
            labels = torch.tensor([number, 31 * number, 5])
            rows, places = tokens(head, labels, width)
            assert len(rows) <= LOOKED_AT + DRAWN + 3
            torch.testing.assert_close(rows[places, :width], head[labels, :width])
            losses = block_loss(states, rows, places, torch.ones(3), Objective(), measure=False)[1]
            logits = block_loss(states, head, labels, torch.ones(3), Objective(), measure=False)[1] - losses
            sums.append(logits.exp())  # how much of the sum under the softmax these rows stand for
        torch.testing.assert_close(torch.stack(sums).reciprocal().mean(0), torch.ones(3), atol=0.02, rtol=0)


def test_the_loss_looks_at_all_of_few_tokens_and_where_logits_are_capped(tiny_pair: TinyPair) -> None:
    target = FrozenTarget(str(tiny_pair.target), torch.float32, torch.device("cpu"))
    assert loss_tokens(documents(5), target) is None
    target.vocab_size = LARGE
    assert loss_tokens(documents(5), target) is not None
    target.softcap = 30.0
    assert loss_tokens(documents(5), target) is None
