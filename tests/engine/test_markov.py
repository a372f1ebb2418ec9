"""Markov heads, DSpark's tables among them: every draft and every acceptance is a slow reference's, and no answer changes.

The reference runs transformers' model over the whole text for the tapped states, the drafter's layers with dense attention over
context and block, and then walks the block over all tokens of the vocabulary, one after the other.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_greedy import check_drafter
from tests.tiny import VOCAB, Pair, greedy, make_pair, random_drafter
from volley import Engine, SamplingParams
from volley.errors import ConfigError
from volley.models.checkpoints.checkpoint import Checkpoint, HeadConfig
from volley.models.checkpoints.formats import write_checkpoint
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.heads import MarkovTables
from volley.tensors import save_tensors

LENGTH = 32
KINDS: dict[str, dict[str, Any]] = {
    "markov": {"head": HeadConfig(type="markov", rank=4, candidates=VOCAB)},
    "dspark": {"head": HeadConfig(type="dspark", rank=4, candidates=VOCAB)},
    "anchored": {"head": HeadConfig(type="dspark", rank=4, candidates=VOCAB), "sample_from_anchor": True},
    "wide": {
        "head": HeadConfig(type="dspark", rank=4, candidates=VOCAB),
        "hidden_size": 24,
        "target_hidden_size": 32,
        "own_embedding": True,
        "draft_vocab_size": VOCAB,
    },
    "reduced": {"head": HeadConfig(type="dspark", rank=4, candidates=VOCAB), "draft_vocab_size": VOCAB // 2},
    "headless": {"sample_from_anchor": True},
}


def drafter_of(kind: str) -> Drafter:
    drafter = random_drafter(**KINDS[kind])
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.arange(len(drafter.d2t)))  # the even tokens
    if drafter.head is not None:
        for weight in drafter.head.parameters():
            weight.mul_(5)  # transitions that matter
    return drafter


def correction(drafter: Drafter, pair: Pair, state: Tensor, before: int) -> Tensor:
    """Return the head's correction of the logits ``[V]`` of ``state`` after a token."""
    if isinstance(drafter.head, MarkovTables):
        bias = drafter.head.markov_w2.weight @ drafter.head.markov_w1.weight[before]
        return bias if drafter.drafted is None else torch.zeros(VOCAB).index_copy(0, drafter.drafted, bias)
    if drafter.head is None:
        return torch.zeros(VOCAB)
    embedding, output = pair.hf.get_input_embeddings(), pair.hf.get_output_embeddings()
    return (output(drafter.head(state[None], embedding(torch.tensor([before])))) - output(state[None]))[0]


def slow_draft(pair: Pair, drafter: Drafter, text: Sequence[int], positions: int) -> list[int]:
    """So many tokens after ``text``, whose last token is the anchor."""
    config, length = drafter.config, len(text) - 1
    hidden = pair.hf(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    taps = torch.cat([hidden[layer + 1][0] for layer in config.target_layer_ids], dim=-1)
    context = drafter.context_kv(taps, torch.arange(length))

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = torch.cat([context[layer][0], keys]), torch.cat([context[layer][1], values])
        groups = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        weights = (torch.einsum("qhd,khd->hqk", queries, keys) * config.head_dim**-0.5).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    slots = 1 + positions - config.sample_from_anchor
    block = torch.tensor([text[-1]] + [config.mask_token_id] * (slots - 1))
    embeddings = drafter.embed(block, pair.hf.get_input_embeddings())
    states = drafter(embeddings, length + torch.arange(slots), attend)
    states = states if config.sample_from_anchor else states[1:]
    tokens = [text[-1]]
    for state, logits in zip(states, drafter.logits(states, pair.hf.get_output_embeddings()), strict=True):
        tokens.append(int((logits + correction(drafter, pair, state, tokens[-1])).argmax()))
    return tokens[1:]


def drafts_of(engine: Engine, prompt: list[int]) -> tuple[list[tuple[list[int], list[int], int]], list[int]]:
    """The text before each draft, the draft and how much of it was accepted; and the answer."""
    found: list[tuple[list[int], list[int], int]] = []

    def note(request: Any, proposal: Any, verdict: Any) -> None:
        if proposal.token_ids:
            before = request.token_ids[: request.length - len(verdict.token_ids)]
            found.append((before, list(proposal.token_ids), verdict.accepted))

    engine.on_verified.append(note)
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=LENGTH))
    return found, result.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_drafts_and_acceptances_are_the_references(pair: Pair, kind: str) -> None:
    drafter, prompt = drafter_of(kind), [7, 9, 30, 2]
    found, answer = drafts_of(Engine(pair.target, drafter, policy="fixed:6"), prompt)
    assert answer == greedy(pair.hf, prompt, LENGTH)
    for text, draft, accepted in found:
        assert draft == slow_draft(pair, drafter, text, len(draft))
        following = (prompt + answer)[len(text) :]
        assert accepted == next((i for i, token in enumerate(draft) if token != following[i]), len(draft))
    assert len(found) > 5
    assert max(len(draft) for _, draft, _ in found) == 5


def write_deepspec(folder: Path, drafter: Drafter) -> None:
    """As DeepSpec's trainer leaves a drafter that samples from the anchor, with an estimate of what is accepted."""
    config = drafter.config
    assert config.head is not None
    raw = {key: value for key, value in config.to_json().items() if key not in ("dflash_config", "head")}
    raw |= {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config.block_size - 1,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "markov_rank": config.head.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
    }
    tensors = {name.replace("head.markov", "markov_head.markov"): t for name, t in drafter.state_dict().items()}
    save_tensors(folder / "model.safetensors", {**tensors, "confidence_head.proj.weight": torch.ones(1, 36)})
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("kind", "layout"), [("anchored", "deepspec"), ("dspark", "speculators"), ("reduced", "speculators")]
)
@torch.no_grad()
def test_checkpoints_of_others_draft_what_was_trained(pair: Pair, tmp_path: Path, kind: str, layout: str) -> None:
    drafter, prompt = drafter_of(kind), [7, 9, 30, 2]
    if layout == "deepspec":
        write_deepspec(tmp_path, drafter)
    else:
        write_checkpoint(tmp_path, Checkpoint(drafter.config, drafter.state_dict()), "speculators")
    loaded = Drafter.from_pretrained(tmp_path, torch.float32)
    head = loaded.config.head
    assert head is not None
    loaded.config = replace(loaded.config, head=replace(head, candidates=VOCAB))
    found, answer = drafts_of(Engine(pair.target, loaded, policy="fixed:6"), prompt)
    assert answer == greedy(pair.hf, prompt, LENGTH)
    assert all(draft == slow_draft(pair, drafter, text, len(draft)) for text, draft, _ in found)
    assert len(found) > 5


def anchored_configs(drafter: Drafter) -> dict[str, dict[str, Any]]:
    """A drafter without a head, whose anchor's slot drafts, as others declare it: five slots are five tokens."""
    own, slots = drafter.config.to_json(), drafter.config.block_size - 1
    dflash = {key: value for key, value in own["dflash_config"].items() if key != "block_size"}
    shape = {
        key: value for key, value in own.items() if key not in ("dflash_config", "sample_from_anchor", "block_size")
    }
    layers = {key: value for key, value in shape.items() if key not in ("architectures", "num_target_layers")}
    no_head = {"markov_rank": 0, "markov_head_type": "vanilla", "enable_confidence_head": False}
    speculators = {
        "speculators_config": {},
        "transformer_layer_config": layers,
        "block_size": slots,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in dflash["target_layer_ids"]],
        "mask_token_id": dflash["mask_token_id"],
        "sample_from_anchor": True,
    }
    anchors: dict[str, Any] = {"sample_from_anchor": True, "query_zero_predicts_next": True}
    return {
        "deepspec": {**shape, **dflash, **no_head, "block_size": slots},
        "deepspec, declared twice": {**shape, **dflash, **no_head, "block_size": slots, "dflash_config": anchors},
        "query_zero": {**shape, "block_size": slots, "dflash_config": {**dflash, "query_zero_predicts_next": True}},
        "sample_from_anchor": {**shape, "dflash_config": {**dflash, "block_size": slots, "sample_from_anchor": True}},
        "shift_label": {
            **shape,
            "block_size": slots,
            "dflash_config": {**dflash, "projector_type": "dflash", "shift_label": True},
        },
        "speculators": {**speculators, **no_head, "speculators_model_type": "dspark"},
        "speculators, dflash": {**speculators, "speculators_model_type": "dflash"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*anchored_configs(drafter_of("headless")), "written by volley"])
@torch.no_grad()
def test_a_folder_whose_anchor_drafts_without_a_head_drafts_what_was_trained(
    pair: Pair, tmp_path: Path, layout: str
) -> None:
    drafter, prompt = drafter_of("headless"), [7, 9, 30, 2]
    if layout == "written by volley":
        write_checkpoint(tmp_path, Checkpoint(drafter.config, drafter.state_dict()), "speculators")
    else:
        save_tensors(tmp_path / "model.safetensors", drafter.state_dict())
        (tmp_path / "config.json").write_text(json.dumps(anchored_configs(drafter)[layout]))
    loaded = Drafter.from_pretrained(tmp_path, torch.float32)
    assert (loaded.config.block_size, loaded.config.sample_from_anchor, loaded.head) == (6, True, None)
    found, answer = drafts_of(Engine(pair.target, loaded, policy="fixed:6"), prompt)
    assert answer == greedy(pair.hf, prompt, LENGTH)
    assert all(draft == slow_draft(pair, drafter, text, len(draft)) for text, draft, _ in found)
    assert max(len(draft) for _, draft, _ in found) == 5


@torch.no_grad()
def test_a_reference_that_forgets_a_transition_is_seen(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of("dspark")
    found, _ = drafts_of(Engine(pair.target, drafter, policy="fixed:6"), [7, 9, 30, 2])
    monkeypatch.setitem(globals(), "correction", lambda *_: torch.zeros(VOCAB))
    assert any(draft != slow_draft(pair, drafter, text, len(draft)) for text, draft, _ in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"tree_nodes": 9}])
def test_greedy_answers_are_the_targets(pair: Pair, kind: str, options: dict[str, Any]) -> None:
    check_drafter(pair, drafter_of(kind), **options)


def test_a_drafter_that_samples_from_the_anchor_has_no_slot_to_denoise(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="denoising_steps is 2, and this drafter predicts from the anchor's slot"):
        Engine(pair.target, drafter_of("anchored"), denoising_steps=2)


def test_tables_are_not_trained() -> None:
    with pytest.raises(ConfigError, match="two tables, which volley does not train; train with --head markov"):
        make_pair(drafter=KINDS["dspark"]).drafter.head(torch.ones(1, 32), torch.ones(1, 32))  # type: ignore[misc]
