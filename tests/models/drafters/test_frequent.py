"""Drafts from the first tokens of a large vocabulary and those seen last, against drafts from all of it."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiles import needs_kernels
from tests.tiny import random_drafter
from volley import Engine, SamplingParams, native
from volley.files import REFERENCE
from volley.models.drafters.frequent import LARGE, SEEN, FrequentHead, pays
from volley.models.drafters.heads import BoundHead, MarkovTables, ResidualHead, Selector, SequentialHead
from volley.native import Weights

pytestmark = needs_kernels
FIRST, VOCAB, H, RANK = LARGE // 3, LARGE + 16, 64, 8
RARE = [FIRST, VOCAB - 1, FIRST + 77]


def made_up_head(seed: int = 0) -> native.Product:
    torch.manual_seed(seed)
    return native.Product(torch.randn(VOCAB, H).bfloat16(), None, "bf16")


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_logits_are_those_of_the_whole_head(weights: Weights) -> None:
    whole = made_up_head()
    frequent, hidden = FrequentHead(whole, weights, RARE[:1]), torch.randn(5, H).bfloat16()
    frequent.see([7, *RARE[1:]])
    found, expected = frequent(hidden), native.Product(whole, None, weights)(hidden)
    assert torch.equal(found[:, :FIRST], expected[:, :FIRST])
    torch.testing.assert_close(found[:, RARE], whole(hidden)[:, RARE])
    assert frequent.tokens.tolist() == [*range(FIRST), *RARE]
    found[:, frequent.tokens] = -torch.inf
    assert bool((found == -torch.inf).all())
    own = 0 if weights == "bf16" else whole.first(FIRST).nbytes * (2 if weights == "int8" else 1) // 4
    assert own <= frequent.nbytes - SEEN * H * 2 <= 1.3 * own, "rows that the target has in these codes are not copied"


def test_a_cap_leaves_out_what_is_not_drafted() -> None:
    whole = made_up_head()
    drafter = random_drafter(hidden_size=H, vocab_size=VOCAB, final_logit_softcapping=3.0)
    hidden, drafter.own_head = torch.randn(2, H).bfloat16(), FrequentHead(whole, "bf16", RARE)
    found = drafter.logits(hidden, whole)
    assert bool((found[:, drafter.own_head.tokens].abs() <= 3).all())
    found[:, drafter.own_head.tokens] = -torch.inf
    assert bool((found == -torch.inf).all())


def test_the_tokens_seen_last_are_drafted() -> None:
    """The tokens that came first make room, but not those that always stay."""
    whole = made_up_head()
    frequent, hidden = FrequentHead(whole, "bf16", RARE[:1]), torch.randn(1, H).bfloat16()
    texts = torch.split(torch.arange(FIRST + 100, FIRST + 100 + 2 * SEEN), 900)
    for text in texts:
        frequent.see([*text.tolist(), RARE[0], 5])
        changes = frequent.changes
        frequent.see(text.tolist())
        assert frequent.changes == changes, "they were known"
    last = torch.cat(texts)[-(SEEN - 1) :]
    assert sorted(frequent.tokens.tolist()) == [*range(FIRST), RARE[0], *last.tolist()]
    assert torch.equal(frequent.tokens[frequent.places[last]], last)
    torch.testing.assert_close(frequent(hidden)[:, last], whole(hidden)[:, last])
    assert frequent(hidden)[0, FIRST + 100] == -torch.inf
    frequent.see(range(FIRST, VOCAB))  # more than there is room for, at once
    assert len(frequent.tokens) == FIRST + SEEN
    assert {RARE[0], VOCAB - 1} <= set(frequent.tokens.tolist())


def make_sequential(kind: str) -> SequentialHead:
    if kind == "selector":
        selector = Selector(H, VOCAB, RANK)
        torch.nn.init.normal_(selector.predecessor_codebook)
        torch.nn.init.normal_(selector.successor_codebook)
        return selector
    if kind == "tables":
        return MarkovTables(VOCAB, VOCAB, RANK)
    residual = ResidualHead(H, RANK, with_context=kind == "residual")
    torch.nn.init.normal_(residual.output.weight)
    return residual


@pytest.mark.parametrize("kind", ["residual", "markov", "selector", "tables"])
def test_a_sequential_head_corrects_as_over_all_tokens(kind: str) -> None:
    whole, anchor = made_up_head(), RARE[1]
    head = make_sequential(kind).bfloat16().requires_grad_(False)
    frequent, hidden = FrequentHead(whole, "bf16"), torch.randn(3, H).bfloat16()
    reference = BoundHead(head, 6, whole.rows, whole, VOCAB)
    bound = BoundHead(head, 6, whole.rows, whole, VOCAB, frequent=frequent)
    for tokens in (RARE[:2], RARE[2:]):
        frequent.see(tokens)
        bound.catch_up()
    logits = frequent(hidden).float()
    logits += 1e-3 * torch.rand_like(logits)  # no ties, which may be ordered otherwise
    logits[0, RARE[0]] = logits[1, RARE[2]] = logits.max() + 4  # candidates that had to be seen
    (expected,) = reference.lattices(hidden, logits, [anchor], [3])
    (found,) = bound.lattices(hidden, logits, [anchor], [3])
    assert (found.tokens == expected.tokens).all()
    assert {RARE[0], RARE[2]} < set(found.tokens.ravel().tolist())
    assert reference.drafted_transitions(hidden, logits)[1] is None
    close = partial(torch.testing.assert_close, rtol=2**-6, atol=0.25)
    close(torch.from_numpy(found.scores), torch.from_numpy(expected.scores))
    among = torch.tensor([4, RARE[0], FIRST + 5])
    for before in (anchor, 9):
        after = [each.transitions(hidden, logits, [3])([1], [before]) for each in (bound, reference)]
        close(*after)
        some = bound.transitions(hidden, logits, [3])([1], [before], among)
        close(some, after[0][:, among])
        following, tokens = bound.drafted_transitions(hidden, logits)
        assert tokens is not None
        assert torch.equal(tokens, frequent.tokens)
        assert torch.equal(following([1], [before]), after[0][:, tokens])
        for each, [row] in zip((bound, reference), after, strict=True):
            best = each.chooser(hidden, logits.bfloat16())
            assert best is not None
            for allowed in (torch.ones(VOCAB, dtype=torch.bool), torch.arange(VOCAB) % 11 == 3):
                chances = row.float().masked_fill(~allowed, -torch.inf).softmax(dim=-1)
                token, chance = best(1, before, np.packbits(allowed.numpy(), bitorder="little")) or (0, 0.0)
                assert allowed[token]
                assert row[token] >= row[allowed].max() - 0.25, "rows are rounded, these choices are not"
                assert chance == pytest.approx(float(chances[token]), rel=0.3)
            undrafted = torch.isinf(logits[1])
            assert best(1, before, np.packbits(undrafted.numpy(), bitorder="little")) is None


@pytest.fixture(scope="module")
def rare_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled pair with the tokens of its vocabulary at the end of a large one: none is drafted that was not seen."""
    folder = tmp_path_factory.mktemp("rare")
    for name in ("target", "drafter"):
        shutil.copytree(REFERENCE / name, folder / name)
    target, drafter = (json.loads((folder / name / "config.json").read_text()) for name in ("target", "drafter"))
    weights = load_file(REFERENCE / "target/model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    moved = rows.new_zeros(VOCAB, rows.shape[1])
    moved[-len(rows) :] = rows.flip(0)
    save_file(weights | {"model.embed_tokens.weight": moved}, folder / "target/model.safetensors", {"format": "pt"})
    target |= {"vocab_size": VOCAB, "eos_token_id": VOCAB - 1 - target["eos_token_id"]}
    drafter["vocab_size"] = VOCAB
    drafter["dflash_config"]["mask_token_id"] = VOCAB - 1 - drafter["dflash_config"]["mask_token_id"]
    (folder / "target/generation_config.json").unlink()
    for name, config in (("target", target), ("drafter", drafter)):
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_a_text_of_rare_tokens_is_drafted_once_they_are_seen(rare_pair: Path) -> None:
    """Answers are plain decoding's, greedy and sampled; drafts come from what prompt and answer have shown."""
    bundled = Engine.from_pretrained(None, None)
    prompt = bundled.encode([{"role": "user", "content": "Write a Python function that adds two numbers."}])
    engine = Engine.from_pretrained(
        rare_pair / "target", rare_pair / "drafter", policy="fixed:8", num_pages=64, prefix_caching=False
    )
    assert engine.drafter is not None
    assert engine.drafter.frequent_head is not None
    plain = Engine(engine.target, num_pages=64, prefix_caching=False, block_size=1)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=48, temperature=temperature, seed=3, ignore_eos=True)
        (found,) = engine.generate([[VOCAB - 1 - token for token in prompt]], params)
        (expected,) = plain.generate([[VOCAB - 1 - token for token in prompt]], params)
        assert found.token_ids == expected.token_ids
        assert len(found.stats.accepted_lengths) < 40, "drafts were accepted"
    (judged,) = engine.generate([[VOCAB - 1 - token for token in prompt]], replace(params, seed=None))
    assert len(judged.stats.accepted_lengths) < 40, "drafts were accepted by their distributions"
    drafted = set(engine.drafter.frequent_head.tokens.tolist())
    assert {VOCAB - 1 - token for token in prompt} <= drafted


@pytest.mark.slow
def test_small_vocabularies_are_drafted_whole() -> None:
    engine = Engine.from_pretrained()
    assert not pays(engine.target.kept_head)
    assert engine.drafter is not None
    assert engine.drafter.frequent_head is None
