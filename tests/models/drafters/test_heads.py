"""Sequential heads: what they say against a slow reference, the distribution they are trained for, and their checkpoints."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import VOCAB, drafter_config, random_drafter
from volley import native
from volley.errors import ConfigError
from volley.models.checkpoints.checkpoint import DrafterConfig, HeadConfig
from volley.models.drafters.domino import BoundRecurrent, DominoHead
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.heads import BoundHead, ResidualHead, SequentialHead
from volley.native.sampling import Tables, draw_after, follow

H = 32


def bind(drafter: Drafter, candidates: int) -> BoundHead:
    embedding, output = torch.randn(VOCAB, H), torch.randn(VOCAB, H)
    assert isinstance(drafter.head, SequentialHead)
    return BoundHead(drafter.head, candidates, lambda ids: embedding[ids], lambda x: x @ output.T, VOCAB)


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


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("kind", ["residual", "markov", "selector"])
def test_a_greedy_chain_has_the_likeliest_token_of_each_slot_after_the_one_before(kind: str, paired: bool) -> None:
    head = HeadConfig(type=kind, rank=5, candidates=VOCAB)  # type: ignore[arg-type]
    bound = bind(random_drafter(head=head), VOCAB)
    hidden = torch.randn(5, H)
    logits = torch.randn(5, VOCAB)
    chains = bound.paired_chains if paired else bound.chains
    tokens, sure = chains(hidden, logits, [7, 11], [3, 2])
    after = bound.transitions(hidden, logits, [3, 2])
    for slot, before in enumerate([7, *tokens[:2], 11, tokens[3]]):
        law = after([slot], [before])[0].softmax(-1)
        assert tokens[slot] == int(law.argmax())
        assert sure[slot] == pytest.approx(float(law.max()), rel=1e-5)


def test_a_selector_chooses_among_as_many_candidates_as_its_checkpoint_says() -> None:
    bounds = [
        bind(random_drafter(head=HeadConfig(type=kind, rank=5, candidates=2)), 2) for kind in ("selector", "markov")
    ]
    assert [bound.most for bound in bounds] == [2, VOCAB]
    hidden, logits = torch.randn(40, H), torch.randn(40, VOCAB)
    tokens, _ = bounds[0].chains(hidden, logits, [7], [40])
    best = logits.topk(2).indices.tolist()
    assert all(token in few for token, few in zip(tokens, best, strict=True))


@given(
    seed=st.integers(0, 2**16),
    count=st.sampled_from([1, 20, 1024, 2500]),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    uniform=st.floats(0, 1, exclude_max=True) | st.just(1 - 2.0**-53),
)
@pytest.mark.skipif(not native.is_built, reason="the library was not built")
def test_a_token_is_drawn_from_its_distribution(seed: int, count: int, temperature: float, uniform: float) -> None:
    torch.manual_seed(seed)
    logits, outputs, mixed = (3 * torch.randn(count)).bfloat16(), torch.randn(count + 3, 20).bfloat16(), torch.randn(20)
    logits[1::3] = -torch.inf
    found = torch.empty(count)
    place = draw_after(logits, outputs, mixed, temperature, uniform, found)
    expected = ((logits.double() + outputs[:count].double() @ mixed.double()) / temperature).softmax(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-7)
    through = float(found[: place + 1].double().sum())
    assert found[place] > 0
    assert through - float(found[place]) - 1e-5 <= uniform <= through + 1e-5


@pytest.mark.parametrize("kind", ["residual", "markov", "selector"])
@pytest.mark.skipif(not native.is_built, reason="the library was not built")
def test_a_drawn_chain_is_drawn_after_each_of_its_tokens(kind: str) -> None:
    bound = bind(random_drafter(head=HeadConfig(type=kind, rank=5, candidates=VOCAB)), VOCAB)  # type: ignore[arg-type]
    bound.head.bfloat16()
    bound.rows, bound.outputs = bound.rows.bfloat16(), bound.outputs.bfloat16()
    hidden, logits = torch.randn(5, H).bfloat16(), torch.randn(5, VOCAB).bfloat16()
    found = bound.drawn(hidden, logits, 7, [0.1, 0.9, 0.5, 0.3, 0.7], 0.8)
    assert found is not None
    tokens, probs, drafted = found
    assert drafted is None
    after = bound.transitions(hidden, logits, [5])
    for slot, before in enumerate([7, *tokens[:-1]]):
        expected = (after([slot], [before], torch.arange(VOCAB))[0].float() / 0.8).softmax(-1)
        torch.testing.assert_close(probs[slot], expected, rtol=0.1, atol=0.01)  # its transitions are rounded to bf16
    assert bound.drawn(hidden.float(), logits.float(), 7, [0.1] * 5, 0.8) is None


@given(
    seed=st.integers(0, 2**16),
    vocab=st.sampled_from([20, 300, 1500, 70_000]),
    most=st.sampled_from([1, 7, 64, 2000]),
    steps=st.sampled_from([1, 64, 2**20]),
    kind=st.sampled_from(["residual", "markov"]),
    drafted=st.sampled_from(["all", "reduced"]),
)
@pytest.mark.skipif(not native.is_built, reason="the library was not built")
def test_chains_in_c_are_those_of_the_reference(
    seed: int, vocab: int, most: int, steps: int, kind: str, drafted: str
) -> None:
    """Few ``steps`` make logits that are equal: then more than ``most`` of them may be looked at."""
    torch.manual_seed(seed)
    sizes, rank = [3, 1, 6], 20
    logits = ((torch.randn(10, vocab) * steps).round() / steps + 0.0).bfloat16()  # no -0
    tokens = None if drafted == "all" else torch.randperm(vocab)[: vocab // 2]
    rows, outputs = (torch.randn(vocab, rank).bfloat16() for _ in range(2))
    own = torch.randn(10, rank).bfloat16() if kind == "residual" else None
    found, sure = follow(logits, Tables(rows, outputs, own), [3, 0, 9], sizes, most, tokens)
    known = torch.arange(vocab) if tokens is None else tokens
    slots, at = iter(range(10)), 0
    for size, anchor in zip(sizes, [3, 0, 9], strict=True):
        before = anchor
        for slot in islice(slots, size):
            base = logits[slot, known].float()
            least = base.topk(min(most, len(known))).values[-1]
            places = (base >= least).nonzero()[:, 0]
            mixed = rows[before].float()
            mixed = mixed if own is None else torch.nn.functional.silu(mixed + own[slot].float())
            scores = base[places] + outputs[known[places]].float() @ mixed
            (place,) = (known[places] == found[at]).nonzero()[:, 0].tolist()  # it is one of the candidates
            assert scores[place] >= scores.max() - 1e-4
            assert sure[at] == pytest.approx(float(scores.softmax(-1)[place]), rel=1e-3)
            before = found[at]
            at += 1


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


def test_a_plain_drafter_knows_nothing_of_heads(tmp_path: Path) -> None:
    random_drafter().save_pretrained(tmp_path)
    assert "head" not in json.loads((tmp_path / "config.json").read_text())
    assert DrafterConfig.from_json({**drafter_config().to_json(), "head": None}).head is None


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
