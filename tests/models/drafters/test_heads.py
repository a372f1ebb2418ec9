"""Sequential heads: what they say against a slow reference, the distribution they are trained for, and their checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import VOCAB, drafter_config, random_drafter
from volley.errors import CheckpointError, ConfigError
from volley.files import load_tensors, save_tensors
from volley.models.checkpoints.checkpoint import DrafterConfig, HeadConfig
from volley.models.drafters.domino import BoundRecurrent, DominoHead
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.heads import BoundHead, ResidualHead

H = 32


def make(candidates: int = VOCAB) -> tuple[ResidualHead, torch.Tensor, torch.Tensor, BoundHead]:
    drafter = random_drafter(head=HeadConfig(type="residual", rank=5, candidates=candidates))
    assert drafter.head is not None
    embedding, output = torch.randn(VOCAB, H), torch.randn(VOCAB, H)
    return (
        drafter.head,
        embedding,
        output,
        BoundHead(drafter.head, candidates, lambda ids: embedding[ids], lambda x: x @ output.T, VOCAB),
    )


def trained_logits(
    head: ResidualHead, hidden: torch.Tensor, before: int, embedding: torch.Tensor, output: torch.Tensor
) -> Any:
    """Logits ``[V]`` as the training loss takes them, for one slot."""
    return (head(hidden[None], embedding[before][None]) @ output.t())[0]


def test_the_walks_scores_are_the_logits_of_training() -> None:
    head, embedding, output, bound = make()
    hidden = torch.randn(5, H)
    sizes, anchors = [3, 2], [7, 11]
    logits = hidden @ output.t()
    lattices = bound.lattices(hidden, logits, anchors, sizes)
    row = 0
    for lattice, anchor in zip(lattices, anchors, strict=True):
        after = bound.transitions(hidden[row:], logits[row:], sizes)
        for slot, tokens in enumerate(lattice.tokens):
            assert sorted(tokens) == list(range(VOCAB))
            before = np.full(VOCAB, anchor) if slot == 0 else lattice.tokens[slot - 1]
            for candidate in (0, 1, VOCAB - 1):
                expected = trained_logits(head, hidden[row + slot], int(before[candidate]), embedding, output)[tokens]
                torch.testing.assert_close(torch.from_numpy(lattice.scores[slot, candidate]), expected)
                torch.testing.assert_close(after([slot], [int(before[candidate])])[0, tokens], expected)
                few = torch.from_numpy(tokens[:3])
                torch.testing.assert_close(after([slot], [int(before[candidate])], few)[0], expected[:3])
        row += len(lattice.tokens)


def test_few_candidates_are_the_best_of_the_base() -> None:
    head, embedding, output, bound = make(candidates=4)
    hidden = torch.randn(3, H)
    logits = hidden @ output.t()
    (lattice,) = bound.lattices(hidden, logits, [7], [3])
    assert lattice.scores.shape == (3, 4, 4)
    assert torch.equal(torch.from_numpy(lattice.tokens), logits.topk(4).indices)
    expected = trained_logits(head, hidden[2], int(lattice.tokens[1, 3]), embedding, output)[lattice.tokens[2]]
    torch.testing.assert_close(torch.from_numpy(lattice.scores[2, 3]), expected)


def test_a_head_with_a_state_gives_the_same_of_a_few_tokens() -> None:
    torch.manual_seed(0)
    head, embedding = DominoHead(H, 6, 5, VOCAB, 1).requires_grad_(False), torch.randn(VOCAB, H)
    bound = BoundRecurrent(head, lambda ids: embedding[ids], None)
    hidden, logits, few = torch.randn(3, H), torch.randn(3, VOCAB), torch.tensor([9, 0, 4])
    whole, some = (bound.transitions(hidden, logits, [3]) for _ in range(2))
    for slot, token in enumerate((7, 1, 2)):
        expected = whole([slot], [token])
        assert torch.equal(some([slot], [token], few), expected[:, few])
        assert torch.equal(expected[0], logits[slot]) == (slot == 0)


def test_an_untrained_head_changes_nothing() -> None:
    torch.manual_seed(0)
    drafter = Drafter(drafter_config(head=HeadConfig(type="residual", rank=5))).requires_grad_(False)
    assert drafter.head is not None
    output, hidden = torch.randn(VOCAB, H), torch.randn(4, H)
    embedding = torch.randn(VOCAB, H)
    bound = BoundHead(drafter.head, 8, lambda ids: embedding[ids], lambda x: x @ output.T, VOCAB)
    (lattice,) = bound.lattices(hidden, hidden @ output.t(), [3], [4])
    base = torch.from_numpy(lattice.scores)
    torch.testing.assert_close(base, (hidden @ output.t()).topk(8).values[:, None].expand_as(base))


def test_a_head_is_saved_and_loaded_with_its_drafter(tmp_path: Path) -> None:
    drafter = random_drafter(head=HeadConfig(type="residual", rank=5, candidates=7))
    drafter.save_pretrained(tmp_path)
    names = [name for name in load_tensors(tmp_path / "model.safetensors") if name.startswith("head.")]
    assert len(names) == len(list(drafter.head.parameters()))  # type: ignore[union-attr]
    loaded = Drafter.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config == drafter.config
    for name, weight in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.bfloat16().float()), name


def test_a_plain_drafter_knows_nothing_of_heads(tmp_path: Path) -> None:
    random_drafter().save_pretrained(tmp_path)
    assert "head" not in json.loads((tmp_path / "config.json").read_text())
    assert DrafterConfig.from_json({**drafter_config().to_json(), "head": None}).head is None


def test_a_checkpoint_whose_head_does_not_fit_is_refused(tmp_path: Path) -> None:
    random_drafter(head=HeadConfig(type="residual", rank=5)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_tensors(tmp_path / "model.safetensors")

    def load(head: object, weights: dict[str, torch.Tensor] = weights) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, "head": head}))
        save_tensors(tmp_path / "model.safetensors", weights)
        Drafter.from_pretrained(tmp_path)

    with pytest.raises(CheckpointError, match=r"head\.\w+\.weight has shape \[5, 32\], config\.json says \[6, 32\]"):
        load({"type": "residual", "rank": 6})
    with pytest.raises(
        CheckpointError, match=r"unknown head\.context\.weight, head\.output\.weight, head\.previous\.weight"
    ):
        load(None)
    headless = {name: tensor for name, tensor in weights.items() if not name.startswith("head.")}
    with pytest.raises(
        CheckpointError, match=r"missing head\.context\.weight, head\.output\.weight, head\.previous\.weight"
    ):
        load(config["head"], headless)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"type": "residuel", "rank": 5}, "unknown drafter head 'residuel'; did you mean 'residual'"),
        ({"type": "residual", "rank": 0}, r"head\.rank is 0; it must be a positive integer"),
        ({"type": "residual", "rank": 4, "candidates": 2.5}, r"head\.candidates is 2\.5; it must be"),
        ({"type": "residual"}, "head lacks 'rank'"),
        ({"rank": 4}, "head lacks 'type'"),
        ({"type": "residual", "rank": 4, "rang": 1}, "unknown drafter head key 'rang'; did you mean 'rank'"),
        ("residual", "head is 'residual'; it must be an object"),
    ],
)
def test_wrong_heads_are_named(head: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_json({**drafter_config().to_json(), "head": head})
