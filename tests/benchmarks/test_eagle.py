"""τ of EAGLE-3 trees: a tree of one path is the engine's chain, and nodes of a wide one have the definition's chances."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import embedding

from benchmarks.eagle import NODES, Trees, measure
from tests import eagle
from tests.tiny import Pair
from volley import Engine, SamplingParams
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.eagle import EagleDrafter

PROMPT = [5, 6, 7, 8]


def answered(pair: Pair, folder: Path) -> tuple[EagleDrafter, list[int], list[int]]:
    """Return the drafter, prompt with answer, and the tokens gained by each cycle of the engine's chains."""
    drafter = load_drafter(folder, pair.target, "bf16")
    assert isinstance(drafter, EagleDrafter)
    engine = Engine(pair.target, drafter, policy="fixed:8", num_pages=64)
    result = next(iter(engine.generate([PROMPT], SamplingParams(max_tokens=40))))
    return drafter, PROMPT + result.token_ids, result.stats.accepted_lengths


@pytest.mark.parametrize("switches", [{}, {"norm_output": True, "drafted": [*range(3, 40)]}])
@torch.inference_mode()
def test_a_tree_of_one_path_is_the_engines_chain(pair: Pair, tmp_path: Path, switches: dict[str, bool]) -> None:
    drafter, text, lengths = answered(pair, eagle.checkpoint(tmp_path, **switches))
    start = 1 + len(PROMPT)
    assert Trees(pair.target, drafter, text, width=1).lengths(text, start, 8) == lengths
    assert len(Trees(pair.target, drafter, text).lengths(text, start, 60)) < len(lengths)


@torch.inference_mode()
def test_nodes_have_the_chances_of_the_definition(pair: Pair, tmp_path: Path) -> None:
    drafter, text, _ = answered(pair, eagle.checkpoint(tmp_path))
    weights, table, length = eagle.tensors(), pair.hf.get_input_embeddings().weight, 9
    hidden = pair.hf(torch.tensor([text[: length - 1]]), output_hidden_states=True).hidden_states
    tapped = torch.cat([hidden[tap + 1][0] for tap in eagle.TAPS], -1)
    nodes = Trees(pair.target, drafter, text, width=3).after(length)
    assert [len(node.path) for node in nodes] == [1] * 3 + [depth for depth in range(2, 8) for _ in range(9)]
    for node in nodes[3::5]:
        states, tokens, chance = tapped @ weights["fc.weight"].T, text[1:length], 0.0
        for token in node.path:
            own = eagle.layer(weights, embedding(torch.tensor(tokens), table), states)[-1:]
            normed = own * torch.rsqrt(own.pow(2).mean() + 1e-6) * weights["norm.weight"]
            chance += float((normed @ weights["lm_head.weight"].T).log_softmax(-1)[0, token])
            states, tokens = torch.cat([states, own]), [*tokens, token]
        assert node.chance == pytest.approx(chance, abs=1e-3)


def test_every_drafter_has_its_rows(pair: Pair, tmp_path: Path) -> None:
    published, folder = eagle.checkpoint(tmp_path / "eagle"), tmp_path / "block" / "drafter"
    pair.drafter.save_pretrained(folder)
    rows = measure(pair.target, str(published), [str(folder)], [PROMPT], 8)
    assert [(row["drafter"], row["draft"]) for row in rows] == [
        ("EAGLE-3", "chain of 8"), *(("EAGLE-3", f"tree of {nodes}") for nodes in NODES),
        ("block", "chain of 8"), ("block", "chain of 16"), ("block", "tree of 16"),
    ]  # fmt: skip
    assert all(row["tau"] >= 1 for row in rows)
