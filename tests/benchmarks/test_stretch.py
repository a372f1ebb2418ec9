"""A stretched copy of a target answers beyond the context it was trained for, and the target stays as it is."""

from pathlib import Path

import torch

from benchmarks.stretch import stretch
from tests.conftest import TinyPair
from volley import Engine, SamplingParams


def test_answers_may_be_longer_than_the_context(tiny_pair: TinyPair, tmp_path: Path) -> None:
    usual = Engine.from_pretrained(tiny_pair.target, dtype=torch.float32)
    copy = stretch(Path(tiny_pair.target), 2, tmp_path / "copy")
    length = usual.target.context_length
    engine = Engine.from_pretrained(copy, tiny_pair.drafter, dtype=torch.float32, num_pages=2 * length // 16 + 2)
    assert engine.target.context_length == 2 * length
    prompt, params = [3 + n % 9 for n in range(length - 10)], SamplingParams(max_tokens=20, ignore_eos=True)
    (drafted,) = engine.generate([prompt], params)
    (plain,) = Engine.from_pretrained(copy, dtype=torch.float32).generate([prompt], params)
    assert len(drafted.token_ids) == 20
    assert drafted.token_ids == plain.token_ids
