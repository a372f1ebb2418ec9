"""Targets with recurrent layers against transformers' own full pass, and what is refused by name."""

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from tests import hybrid
from tests.tiny import eager_model
from volley.errors import UnsupportedModelError
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import DenseKVStore
from volley.memory.recurrent_pass import RecurrentPass, Wanted
from volley.memory.recurrent_store import RecurrentStore
from volley.models.targets.recurrent import FAMILIES, RECURRENT_LAYERS, LayoutProbe
from volley.models.targets.target import Target, check_config

LENGTH = 40
CPU = torch.device("cpu")
# Each pass: (sequence, known tokens, draft tokens that turn out wrong, whether the known ones are marked as certain).
PASSES = [
    [(0, 7, 0, True)],
    [(0, 13, 0, True), (1, 5, 0, True)],
    [(1, 7, 0, False), (0, 1, 0, False)],
    [(0, 1, 5, False), (1, 1, 0, False)],
    [(1, 3, 5, False), (0, 2, 5, False)],
    [(0, 16, 0, True), (1, 24, 0, True)],
]


class Pages:
    """K/V and states of two sequences."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.kv = DenseKVStore(target.kv_shapes, 2 * 64, torch.float32, CPU)
        self.states = RecurrentStore(target.recurrent, 3, torch.float32, CPU)
        self.tables = [BlockTable(64, [0]), BlockTable(64, [1])]
        self.tables[0].state, self.tables[1].state = 2, 0
        self.done = [0, 0]

    @torch.inference_mode()
    def run(
        self, work: list[tuple[int, list[int], tuple[int, ...] | None, bool]], kept: list[list[int]]
    ) -> list[Tensor]:
        """Logits of each segment ``(sequence, token_ids, parents, is_certain)``; rows ``kept`` of each stay."""
        segments = [
            Segment(self.tables[which], self.done[which], len(ids), parents=parents) for which, ids, parents, _ in work
        ]
        batch = RaggedBatch(segments, torch.tensor([token for _, ids, _, _ in work for token in ids]))
        marks = [(len(ids) // 2, len(ids) - 1) if certain else () for _, ids, _, certain in work]
        own = RecurrentPass(batch, self.target.recurrent, self.states, marks)
        logits = self.target.forward(batch, self.kv, torch.arange(len(batch)), states=own)
        slots = [self.tables[which].state or 0 for which, *_ in work]
        own.write([Wanted(index, rows[-1], slots[index]) for index, rows in enumerate(kept)])
        for (which, *_), rows in zip(work, kept, strict=True):
            self.done[which] += len(rows)
        return list(logits.split([segment.length for segment in segments]))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def tokens() -> list[list[int]]:
    drawn: list[list[int]] = torch.randint(1, 50, (2, LENGTH), generator=torch.Generator().manual_seed(5)).tolist()
    return drawn


@pytest.mark.parametrize("name", hybrid.CONFIGS)
def test_logits_are_those_of_a_full_pass(name: str) -> None:
    """Prompts in parts, single tokens and drafts that are rolled back, of two sequences in shared passes."""
    text, pages = tokens(), Pages(hybrid.target(name))
    with torch.inference_mode():
        expected = hybrid.model(name)(input_ids=torch.tensor(text), use_cache=False).logits
    for works in PASSES:
        starts = [pages.done[which] for which, *_ in works]
        segments, kept = [], []
        for (which, known, drafted, certain), start in zip(works, starts, strict=True):
            own, wrong = text[which][start : start + known], text[which][start + known : start + known + drafted]
            segments.append((which, own + [(token + 1) % 50 for token in wrong], None, certain))
            kept.append(list(range(known)))
        found = pages.run(segments, kept)
        for (which, known, _, _), start, rows in zip(works, starts, found, strict=True):
            assert error(rows[:known], expected[which, start : start + known]) < 1e-3
    assert pages.done == [LENGTH, LENGTH]


def test_clamped_time_steps_are_those_of_a_full_pass() -> None:
    """For transformers computes them otherwise token by token."""
    text, free = torch.tensor([tokens()[0]]), hybrid.model("nemotron_h")
    clamped = eager_model(hybrid.nemotron_h(time_step_min=0.5))
    with torch.inference_mode():
        expected = clamped(input_ids=text, use_cache=False).logits[0]
        assert error(free(input_ids=text, use_cache=False).logits[0], expected) > 1e-2, "the clamp must matter"
    pages = Pages(Target(eager_model(hybrid.nemotron_h(time_step_min=0.5))))
    found = [pages.run([(0, [token], None, False)], [[0]])[0] for token in tokens()[0][:12]]
    found += pages.run([(0, tokens()[0][12:], None, True)], [[*range(LENGTH - 12)]])
    assert error(torch.cat(found), expected) < 1e-3


def test_a_state_that_is_not_rolled_back_would_be_found() -> None:
    text, pages = tokens()[0], Pages(hybrid.target("qwen3_5_text"))
    with torch.inference_mode():
        expected = hybrid.model("qwen3_5_text")(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    pages.run([(0, text[:10], None, True)], [[*range(10)]])
    pages.run([(0, [text[10], 1, 2, 3], None, False)], [[*range(4)]])  # the draft stays, and it was wrong
    pages.done[0] = 11
    (found,) = pages.run([(0, text[11:14], None, False)], [[*range(3)]])
    assert error(found, expected[11:14]) > 1e-2


@pytest.mark.parametrize("name", hybrid.KINDS)
def test_each_node_of_a_tree_sees_its_path(name: str) -> None:
    text, pages = tokens()[0][:12], Pages(hybrid.target(name))
    pages.run([(0, text, None, True)], [[*range(12)]])
    nodes, parents = [5, 6, 7, 8, 9, 10], (0, 0, 1, 3, 2)
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 2, 5]]
    (found,) = pages.run([(0, nodes, parents, False)], [[0, 2, 5]])
    for row, path in zip(found, paths, strict=True):
        whole = [*text, *(nodes[node] for node in path)]
        with torch.inference_mode():
            expected = hybrid.model(name)(input_ids=torch.tensor([whole]), use_cache=False).logits[0, -1]
        assert error(row, expected) < 1e-3


def test_transformers_own_runs_stay_as_they_were() -> None:
    """The wrapped functions do what they did where no target's pass runs."""
    config = hybrid.CONFIGS["qwen3_5_text"]()
    ids = torch.tensor([tokens()[0]])
    with torch.inference_mode():
        Target(eager_model(config))
        own = eager_model(config)(input_ids=ids, use_cache=True)
    assert own.past_key_values.layers[0].recurrent_states[0].abs().max() > 0
    module = tf.models.qwen3_5.modeling_qwen3_5
    torch.manual_seed(0)
    rule = [torch.randn(1, 5, 2, 4) for _ in range(3)]
    gates = {"g": -torch.rand(1, 5, 2), "beta": torch.rand(1, 5, 2)}
    chunked, _ = module.torch_chunk_gated_delta_rule(*rule, **gates)
    stepped, _ = module.torch_recurrent_gated_delta_rule(*rule, **gates)
    torch.testing.assert_close(chunked, stepped, rtol=1e-4, atol=1e-4)


def test_every_family_that_is_taken_is_tried() -> None:
    assert set(hybrid.CONFIGS) == FAMILIES


REFUSED: dict[str, tuple[Any, str]] = {
    "jamba": (tf.JambaConfig(num_hidden_layers=2), "jamba has Mamba-1 layers"),
    "mamba": (tf.MambaConfig(num_hidden_layers=2), "mamba has Mamba-1 layers"),
    "falcon_mamba": (tf.FalconMambaConfig(num_hidden_layers=2), "falcon_mamba has Mamba-1 layers"),
    "mamba2": (tf.Mamba2Config(num_hidden_layers=2), "mamba2 has no attention layer"),
    "zamba2": (tf.Zamba2Config(), "zamba2 has attention layers that share"),
    "minimax": (tf.MiniMaxConfig(num_hidden_layers=2), "minimax has lightning attention"),
    "qwen4_exp": (tf.Qwen4ExpConfig(), "qwen4_exp_text has further convolution states and an indexer"),
    "inkling": (tf.InklingConfig(), "inkling_text has further convolution states and an indexer"),
    "glm5_next": (tf.Glm5NextConfig(), "glm5_next_text has an indexer"),
    "recurrent_gemma": (tf.RecurrentGemmaConfig(num_hidden_layers=3), "recurrent_gemma has a recurrence of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_recurrent_models_are_refused_by_name(name: str) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        check_config(config)


def test_a_family_whose_layers_call_something_else_is_refused() -> None:
    model = eager_model(hybrid.CONFIGS["qwen3_5_text"]())
    mixer = model.model.layers[1].linear_attn
    mixer.forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(UnsupportedModelError, match="3 recurrent layers called 2 convolutions and 2 rules"):
        Target(model)


def test_the_probe_knows_every_recurrent_type() -> None:
    for kind in RECURRENT_LAYERS:
        with pytest.raises(UnsupportedModelError, match="called 0 convolutions"):
            LayoutProbe().layout([kind])
    assert not LayoutProbe().layout(["full_attention", "moe"])


def test_shapes_are_found_by_running_the_model() -> None:
    target = Target(copy.deepcopy(hybrid.model("falcon_h1")))
    assert target.kv_shapes == [(2, 8)] * 4
    assert target.recurrent.convolutions == ((3, 112),) * 4
    assert target.recurrent.rules == ((8, 12, 8),) * 4
