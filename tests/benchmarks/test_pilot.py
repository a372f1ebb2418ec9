"""BlockPilot's ablations: every way is trained on columns of the same labels."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.pilot import WAYS, Labelled, compare, labels_of
from tests.conftest import TinyPair
from tests.costs import settle
from volley import Engine
from volley.train.options import PilotOptions


@pytest.mark.slow
def test_every_way_is_compared_with_the_best_fixed_block(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    file = tmp_path / "p.jsonl"
    file.write_text("".join(f'{{"prompt": "number {i}"}}\n' for i in range(6)))
    engine = Engine.from_pretrained(tiny_pair.target, tiny_pair.drafter, dtype=torch.float32, num_pages=200)
    options = PilotOptions(prompts=(str(file),), radius=3, max_tokens=12, epochs=2, temperatures=(0.0,))
    ways = {name: replace(way, width=way.width // 8) for name, way in WAYS.items()}
    found = compare(engine, options, ways)
    assert set(found) == set(WAYS)
    assert all(0 < row["speed"] <= row["possible"] + 1e-9 for row in found.values())
    assert found["3 layers"]["mebibytes"] > found["paper"]["mebibytes"] > found["1 layer"]["mebibytes"] > 0


def test_hard_labels_are_the_sizes_with_the_longest_acceptance() -> None:
    tokens, cycles = torch.tensor([[8, 8, 8], [8, 8, 8]]), torch.tensor([[8, 4, 3], [2, 4, 4]])
    nothing = torch.zeros(2, 1)
    examples = Labelled(
        prompt=torch.arange(2), temperature=torch.zeros(2), logits=nothing, hidden=nothing, tokens=tokens, cycles=cycles
    )
    seconds = torch.tensor([1.0, 1.5, 4.0])
    assert labels_of(examples, seconds, is_hard=True).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert labels_of(examples, seconds, is_hard=False).argmax(dim=1).tolist() == [1, 0]
