"""A Markov head in the speculators format as real vLLM reads it: its config, its loading and its products are volley's.

vLLM 0.32 drafts with DSpark in its second model runner, which needs Triton; its CPU build has none, so nothing is decoded here.
"""

import gc
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from volley.files import REFERENCE
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import export
from volley.models.drafters.heads import BoundHead
from volley.models.targets.target import Target
from volley.tensors import load_tensors

pytest.importorskip("vllm")

DRAFTED = 1024


def markov_drafter(folder: Path) -> Path:
    """The bundled DFlash drafter with a random head."""
    plain = Drafter.from_pretrained(REFERENCE / "drafter-dflash", torch.float32)
    torch.manual_seed(0)
    headed = Drafter(replace(plain.config, head=HeadConfig(type="markov", rank=8)))
    assert headed.head is not None
    torch.nn.init.normal_(headed.head.output.weight, std=0.5)  # type: ignore[union-attr]
    headed.load_state_dict(plain.state_dict(), strict=False)
    headed.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", [None, DRAFTED])
@torch.inference_mode()
def test_vllm_adds_the_same_to_the_logits(tmp_path: Path, size: int | None) -> None:
    from vllm.config import SpeculativeConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

    from .test_engine import Run

    counts, name = range(8192, 0, -1), str(REFERENCE / "target")
    own = markov_drafter(tmp_path / "own")
    export(own, tmp_path / "out", "speculators", target=name, draft_vocab_size=size, counts=counts)
    run = Run()
    config, target_model = run.llm.llm_engine.vllm_config, run.runner.model
    speculative = SpeculativeConfig(
        method="dspark",
        model=str(tmp_path / "out"),
        num_speculative_tokens=7,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    assert speculative.draft_model_config.architectures == ["Qwen3DSparkModel"]
    config = copy(config)
    config.speculative_config = speculative
    with set_current_vllm_config(config):
        theirs = Qwen3DSparkForCausalLM(vllm_config=config)
    theirs.load_weights(load_tensors(tmp_path / "out" / "model.safetensors").items())
    process_weights_after_loading(theirs, speculative.draft_model_config, torch.device("cpu"))
    if size is None:
        theirs.lm_head = target_model.lm_head  # as its speculator does
    gc.collect()

    target, drafter = (
        Target.from_pretrained(name, dtype=torch.float32),
        Drafter.from_pretrained(tmp_path / "out", torch.float32),
    )
    assert drafter.head is not None
    tokens = torch.tensor([5, 700, 4000, 8000, 17, 300, 2047])
    states = torch.randn(len(tokens), 256)
    head = BoundHead(drafter.head, 32, target.embed, target.head, 8192, drafter.drafted)
    mine = head.transitions(states, drafter.logits(states, target.head), [len(tokens)])(
        list(range(len(tokens))), tokens.tolist()
    )
    found = theirs.compute_draft_logits(states) + theirs.markov_bias(theirs.markov_embed(tokens))
    drafted = theirs.map_draft_to_target(torch.arange(found.shape[-1]))
    torch.testing.assert_close(mine[:, drafted], found, atol=1e-3, rtol=1e-3)
    assert drafted.tolist() == list(range(size or 8192))
    plain = drafter.logits(states, target.head)[:, drafted]
    assert (plain.argmax(-1) != found.argmax(-1)).any(), "the head must matter"
