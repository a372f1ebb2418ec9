"""Real vLLM on SmolLM2 with the drafter that volley ships for it: volley's tokens, and as many drafts accepted."""

from pathlib import Path

import pytest
import torch

from volley.files import find_smollm2
from volley.models.gguf.model import load_model
from volley.models.gguf.tokenizer import load_gguf_tokenizer
from volley.vllm import PluginOptions, engine_args

pytest.importorskip("vllm")


def test_the_shipped_drafter(tmp_path: Path) -> None:
    from .test_engine import Run, by_volley

    published = find_smollm2()
    if published is None or published[1] is None:
        pytest.skip("SmolLM2 is not installed beside vLLM")
    file, drafter = published
    load_model(file, torch.float32).save_pretrained(tmp_path)
    load_gguf_tokenizer(file).save_pretrained(tmp_path)
    expected = by_volley(tmp_path, drafter)
    run = Run(tmp_path, **engine_args(PluginOptions(drafter=drafter, policy="fixed")))
    assert run.answer() == expected["tokens"]
    assert run.count("spec_decode_num_drafts") == expected["drafts"]
    assert run.count("spec_decode_num_accepted_tokens") == expected["accepted"] > 50
