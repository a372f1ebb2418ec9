"""Perplexity: it is transformers' of the same chunks, in any process; and llama.cpp's estimate is read."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.perplexity import joined, perplexity, read_estimate, row_in_a_process
from volley import Engine
from volley.files import REFERENCE
from volley.models.targets.loading import load_causal_lm

TEXT = "To list all files of a folder, use the command `ls -a`. It shows hidden files, too. " * 12


def test_it_is_that_of_the_second_halves_of_chunks() -> None:
    engine = Engine.from_pretrained(drafter=None, num_pages=16, dtype=torch.float32)
    tokens = engine.tokenizer.encode(TEXT)[:200]
    found, count = perplexity(engine, tokens, 64)
    model, losses = load_causal_lm(REFERENCE / "target", torch.float32), []
    for first in (0, 64, 128):
        chunk = torch.tensor(tokens[first : first + 64])
        logits = model(chunk[None]).logits[0, 32:63].detach()
        losses.append(torch.nn.functional.cross_entropy(logits, chunk[33:]))
    assert count == 3 * 31
    assert found == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-4)


@pytest.mark.slow
def test_a_row_is_a_process_with_a_peak(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = Namespace(chunk=64, chunks=2, threads=1)
    found = row_in_a_process(REFERENCE / "target", "bf16", tmp_path / "text.txt", options)
    assert found.tokens == 2 * 31
    assert 1 < found.perplexity < 1e3
    assert found.peak > 50 * 2**20


def test_texts_are_joined_without_the_first(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": f"a{n}", "number": n} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert joined([tmp_path / "rows.jsonl"], 1) == "q1\na1\n\nq2\na2"


def test_the_estimate_is_read() -> None:
    assert read_estimate("...\nFinal estimate: PPL = 6.3012 +/- 0.10\n") == 6.3012
    with pytest.raises(SystemExit, match="gave no estimate: error: no such"):
        read_estimate("error: no such file")
